"""The written-out gradient of small networks, acting in numpy, and products by oneDNN, each against torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import build_policy, products
from embodyrl.models.mlp import acting, network
from embodyrl.models.mlp.network import MODULES, build_network
from embodyrl.models.mlp.options import Activation, MLPConfig

SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0, 0.0), high=(1.0, 3.0)),),
    proprio_dim=39,
    max_episode_steps=10,
    control_frequency=1.0,
)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all products be oneDNN's, if this torch has them."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "SMALLEST", 1)


def as_autograd(written_out: nn.Sequential) -> nn.Sequential:
    """The same network of torch's own modules."""
    own = {network.Tanh: nn.Tanh}
    return nn.Sequential(
        *(own[type(each)]() if type(each) in own else copy.deepcopy(each) for each in written_out.children())
    )


def passes(net: nn.Sequential, features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, and gradients of the features and of all parameters."""
    seen = features.clone().requires_grad_()
    outputs = net(seen)
    gradients = torch.autograd.grad((outputs * weights).sum(), [seen, *net.parameters()])
    return outputs.detach(), gradients[0], list(gradients[1:])


def same_passes(activation: Activation, seed: int) -> None:
    torch.manual_seed(seed)
    net = build_network([39, 128, 64, 4], MODULES[activation], 0.5)
    features, weights = torch.randn(256, 39), torch.randn(256, 4) / 256
    got, wanted = passes(net, features, weights), passes(as_autograd(net), features, weights)
    torch.testing.assert_close(got[0], wanted[0], **CLOSE)
    torch.testing.assert_close(got[1], wanted[1], **CLOSE)
    for own, other in zip(got[2], wanted[2], strict=True):
        assert float((own - other).abs().max()) <= 1e-6


@pytest.mark.parametrize("activation", Activation)
def test_the_written_out_gradient_is_autograds(activation: Activation) -> None:
    for seed in range(10):
        same_passes(activation, seed)


def test_the_written_out_gradient_by_onednn_is_autograds(by_onednn: None) -> None:
    for seed in range(10):
        same_passes(Activation.tanh, seed)


def test_an_ensemble_by_onednn_has_the_numbers_of_torchs(by_onednn: None) -> None:
    torch.manual_seed(0)
    found = []
    given = torch.randn(50, 96).expand(3, -1, -1), torch.randn(3, 96, 64), torch.randn(3, 1, 64)
    for multiply in (products.ensemble_product, lambda seen, weights, biases: torch.baddbmm(biases, seen, weights)):
        seen, weights, biases = (each.clone().requires_grad_() for each in given)
        output = multiply(seen, weights, biases)
        found.append((output, *torch.autograd.grad(output.square().sum(), (seen, weights, biases))))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-3)


def test_products_elsewhere_are_torchs(by_onednn: None) -> None:
    weight = torch.zeros(8, 4)
    assert products.suits(torch.zeros(2, 4), weight)
    assert not products.suits(torch.zeros(2, 4, device="meta"), weight)
    assert not products.suits(torch.zeros(2, 4).double(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not products.suits(torch.zeros(2, 4), weight)
    layer = nn.Sequential(nn.Linear(4, 8))
    products.use_onednn(layer)
    # A layer that a sharded run moves to its GPU later.
    assert layer.to("meta")(torch.zeros(2, 4, device="meta")).device.type == "meta"


def test_other_layers_in_between_are_left_to_autograd() -> None:
    net = build_network([3, 8, 2], MODULES[Activation.tanh], 1.0)
    net.insert(1, nn.LayerNorm(8))
    got, wanted = (passes(each, torch.ones(5, 3), torch.ones(5, 2)) for each in (net, as_autograd(net)))
    torch.testing.assert_close(got[0], wanted[0], **CLOSE)
    assert len(got[2]) == 6


def test_layers_by_onednn_have_the_numbers_of_torchs(by_onednn: None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 64, bias=False))
    by_products = copy.deepcopy(plain)
    products.use_onednn(by_products)
    assert "forward" in vars(by_products[0]) and "forward" not in vars(plain[0])
    features, weights = torch.randn(3, 50, 96), torch.randn(3, 50, 64)
    got, wanted = passes(by_products, features, weights), passes(plain, features, weights)
    for own, other in zip([*got[:2], *got[2]], [*wanted[:2], *wanted[2]], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(by_products(features), wanted[0], rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert by_products(features).dtype is torch.bfloat16
    double = copy.deepcopy(by_products).double()
    assert double(features.double()).dtype is torch.float64


@pytest.mark.parametrize("activation", [Activation.tanh, Activation.relu])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_acting_in_numpy_gives_the_bits_of_torch(mode: Any, activation: Activation) -> None:
    config = MLPConfig(name="mlp", hidden_sizes=[32, 16], activation=activation)
    policy: Any = build_policy(config, SPEC, chunk_size=3, seed=1)
    policy.update_statistics({"proprio": 2.0 + torch.randn(64, 39)})
    inputs = {"proprio": 3.0 * torch.randn(8, 39)}
    streams = [torch.Generator().manual_seed(7) for _ in range(2)]
    with torch.inference_mode():
        assert acting.suits(inputs["proprio"], policy._most_in_numpy)
        quick = policy.act(inputs, mode, streams[0])
        policy._most_in_numpy = 0
        slow = policy.act(inputs, mode, streams[1])
    assert torch.equal(*(stream.get_state() for stream in streams))
    for name in ("actions", "logprobs", "values"):
        assert torch.equal(getattr(quick, name), getattr(slow, name)), name
    assert torch.equal(quick.trace["sample"], slow.trace["sample"])
    assert quick.actions.shape == (8, 3, 2)
    # What learning computes of the same chunks.
    scored = policy.evaluate(inputs, quick.trace)
    assert torch.equal(scored.logprobs.detach(), quick.logprobs)
    assert torch.equal(scored.values.detach(), quick.values)


def test_acting_in_numpy_is_for_few_observations_without_gradients() -> None:
    policy: Any = build_policy(MLPConfig(name="mlp", hidden_sizes=[128, 128]), SPEC, chunk_size=1, seed=1)
    assert policy._most_in_numpy == 128
    assert not acting.suits(torch.zeros(8, 39), 128)
    with torch.inference_mode():
        assert acting.suits(torch.zeros(128, 39), 128)
        assert not acting.suits(torch.zeros(129, 39), 128)
        assert not acting.suits(torch.zeros(8, 39, dtype=torch.float64), 128)
    elu: Any = build_policy(MLPConfig(name="mlp", activation=Activation.elu), SPEC, chunk_size=1, seed=1)
    assert elu._most_in_numpy == 0
