from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from engines import make_batch, make_engine, weights
from torch import nn

from embodyrl.config.schema import LearningRate, OptimizerConfig
from embodyrl.engine.adamw import SmallAdamW
from embodyrl.engine.optimizer import Optimizer
from embodyrl.errors import UserError
from embodyrl.registry import OPTIMIZERS

TINY = OptimizerConfig(lr=1e-4, max_grad_norm=1e9)
"""A step of 1e-4 is a fortieth of the distance between neighbours of 1 in bfloat16."""


def learn(parameters: list[nn.Parameter], optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.clear()
        sum(parameter.float().sum() for parameter in parameters).backward()
        optimizer.clip()
        optimizer.step()


def ones(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype))


def test_small_steps_add_up_in_master_weights_and_are_lost_without() -> None:
    kept, lost = ones(torch.bfloat16), ones(torch.bfloat16)
    learn([kept], Optimizer([kept], TINY, 1), 100)
    learn([lost], Optimizer([lost], OptimizerConfig(lr=1e-4, master_weights=False), 1), 100)
    assert torch.equal(lost, ones(torch.bfloat16))
    assert kept.float().tolist() == pytest.approx([0.99] * 3, abs=0.004)


def test_master_weights_are_those_that_float32_would_learn() -> None:
    half, single = ones(torch.bfloat16), ones(torch.float32)
    of_half, of_single = Optimizer([half], TINY, 1), Optimizer([single], TINY, 1)
    learn([half], of_half, 20)
    learn([single], of_single, 20)
    assert torch.equal(of_half.stepped[0], single) and torch.equal(half, single.to(torch.bfloat16))
    assert of_single.stepped[0] is single, "float32 needs no copy"
    assert of_half.inner.state[of_half.stepped[0]]["exp_avg"].dtype is torch.float32


def test_master_weights_are_part_of_the_state() -> None:
    first = [ones(torch.bfloat16), ones(torch.float32)]
    optimizer = Optimizer(first, TINY, 1)
    learn(first, optimizer, 7)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    other = Optimizer(second, TINY, 1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameters, each in ((first, optimizer), (second, other)):
        learn(parameters, each, 7)
    assert all(torch.equal(one, two) for one, two in zip(optimizer.stepped, other.stepped, strict=True))
    assert list(optimizer.state_dict()["copies"]) == ["0"]


def test_what_is_frozen_has_no_state() -> None:
    frozen, free = ones(torch.float32).requires_grad_(False), ones(torch.float32)
    optimizer = Optimizer([frozen, free], TINY, 1)
    learn([free], optimizer, 1)
    assert optimizer.parameters == [free] and len(optimizer.state_dict()["moments"]["state"]) == 1


def test_gradients_are_scaled_to_the_norm_and_the_norm_is_told() -> None:
    parameter = ones(torch.float32)
    optimizer = Optimizer([parameter], OptimizerConfig(max_grad_norm=0.5), 1)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    assert float(optimizer.clip()) == pytest.approx(5.0)
    assert parameter.grad.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_the_learning_rate_follows_its_schedule() -> None:
    def rates(schedule: LearningRate, lr_floor: float = 0.0) -> list[float]:
        config = OptimizerConfig(lr=1.0, schedule=schedule, lr_floor=lr_floor)
        optimizer = Optimizer([ones(torch.float32)], config, 4)
        found = [optimizer.set_learning_rate(update) for update in range(6)]
        assert optimizer.inner.param_groups[0]["lr"] == found[-1]
        return found

    assert rates(LearningRate.constant) == [1.0] * 6
    assert rates(LearningRate.linear) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert rates(LearningRate.cosine) == pytest.approx([1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0], abs=1e-4)
    assert rates(LearningRate.linear, 0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates(LearningRate.cosine, 0.1) == pytest.approx([1.0, 0.8682, 0.55, 0.2318, 0.1, 0.1], abs=1e-4)


def test_the_learning_rate_warms_up() -> None:
    def rates(schedule: LearningRate) -> list[float]:
        optimizer = Optimizer([ones(torch.float32)], OptimizerConfig(lr=1.0, schedule=schedule, warmup=3), 8)
        return [optimizer.set_learning_rate(update) for update in range(6)]

    assert rates(LearningRate.constant) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(LearningRate.linear) == pytest.approx([0.25, 0.5 * 7 / 8, 0.75 * 6 / 8, 5 / 8, 4 / 8, 3 / 8])


def test_the_critic_learns_at_a_rate_of_its_own_also_after_a_resume() -> None:
    config = OptimizerConfig(lr=1e-3, critic_lr=1e-2, schedule=LearningRate.linear, max_grad_norm=1e9)
    actor, critic = ones(torch.float32), ones(torch.bfloat16)
    optimizer = Optimizer([actor, critic], config, 2, critic=[critic])
    assert optimizer.set_learning_rate(1) == pytest.approx(5e-4)
    learn([actor, critic], optimizer, 1)
    assert actor.tolist() == pytest.approx([1 - 5e-4] * 3) and critic.tolist() == pytest.approx([0.995] * 3, abs=2e-3)
    other = Optimizer([actor, critic], dataclasses.replace(config, critic_lr=2e-2), 2, critic=[critic])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.set_learning_rate(0)
    assert [group["lr"] for group in other.inner.param_groups] == pytest.approx([1e-3, 2e-2])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 1))


def descend(of: nn.Sequential, optimizer: Optimizer, steps: int, layers: int = 4) -> list[float]:
    inputs, norms = torch.linspace(-1.0, 1.0, 40).view(8, 5), []
    for _ in range(steps):
        optimizer.clear()
        (of[:layers](inputs) - 3.0).square().sum().backward()
        norms.append(float(optimizer.clip()))
        optimizer.step()
    return norms


def both(config: OptimizerConfig) -> list[tuple[nn.Sequential, Optimizer]]:
    """A network with AdamW, and the same with that for small policies."""
    found = []
    for small in (False, True):
        of = network()
        found.append((of, Optimizer(of.parameters(), config, 1, keep_gradients=small)))
    assert [isinstance(optimizer.inner, SmallAdamW) for _, optimizer in found] == [False, True]
    return found


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_a_small_policy_learns_bit_for_bit_what_torch_would() -> None:
    (plain, of_plain), (small, of_small) = both(OptimizerConfig(lr=0.01, max_grad_norm=0.5))
    norms = descend(plain, of_plain, 5, layers=3)
    assert norms[0] > 0.5, "gradients are clipped"
    assert descend(small, of_small, 5, layers=3) == norms and same(plain, small)
    assert torch.equal(small[3].weight, network()[3].weight), "what has no gradient stays"


def test_states_of_small_policies_and_of_torch_continue_each_other() -> None:
    config = OptimizerConfig(lr=0.01)
    (plain, of_plain), (small, of_small) = both(config)
    assert of_small.state_dict() == of_plain.state_dict(), "before the first step there is no state"
    descend(plain, of_plain, 3)
    descend(small, of_small, 3)
    torch.testing.assert_close(of_small.state_dict(), of_plain.state_dict(), rtol=0, atol=0)
    for source, state in ((plain, of_plain.state_dict()), (small, of_small.state_dict())):
        saved = copy.deepcopy(state)
        resumed = both(config)
        for of, optimizer in resumed:
            of.load_state_dict(source.state_dict())
            optimizer.load_state_dict(copy.deepcopy(saved))
            descend(of, optimizer, 3)
        assert same(resumed[0][0], resumed[1][0]) and not same(resumed[0][0], source)


@pytest.mark.parametrize("change", [{"weight_decay": 0.1}, {"critic_lr": 1e-3}])
def test_parameters_that_learn_differently_stay_apart(change: dict[str, float]) -> None:
    parameters = [ones(torch.float32), ones(torch.float32)]
    optimizer = Optimizer(parameters, OptimizerConfig(**change), 1, critic=parameters[1:], keep_gradients=True)
    assert not isinstance(optimizer.inner, SmallAdamW)


def test_an_update_of_a_small_policy_is_bit_for_bit_that_of_torch() -> None:
    small, plain = make_engine(), make_engine()
    plain.optimizer = Optimizer(plain.policy.parameters(), plain.optimizer.config, 4)
    plain.optimizer.clear()
    assert isinstance(small.optimizer.inner, SmallAdamW)
    before = weights(plain)
    for _ in range(3):
        metrics = [engine.learner.update(make_batch(engine), ["push"]) for engine in (small, plain)]
        assert metrics[0] == metrics[1]
    assert torch.equal(weights(small), weights(plain)) and not torch.equal(weights(plain), before)


def eight_bit() -> OptimizerConfig:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'embodyrl[bnb]'")
    return OptimizerConfig(name="adamw_8bit", lr=1e-3, max_grad_norm=1e9)


def learn_towards(target: torch.Tensor, config: OptimizerConfig, steps: int) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(torch.zeros_like(target))
    optimizer = Optimizer([parameter], config, 1)
    for _ in range(steps):
        optimizer.clear()
        (parameter - target).square().sum().backward()
        optimizer.clip()
        optimizer.step()
    return parameter, optimizer


def test_moments_in_eight_bits_learn_nearly_the_same_in_a_quarter_of_the_memory() -> None:
    config = eight_bit()
    target = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    eight, of_eight = learn_towards(target, config, 40)
    full, of_full = learn_towards(target, OptimizerConfig(lr=1e-3, max_grad_norm=1e9), 40)
    assert not torch.equal(eight, full)
    torch.testing.assert_close(eight, full, atol=0.01, rtol=0)

    def size(optimizer: Optimizer) -> int:
        (state,) = optimizer.inner.state.values()
        return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    assert size(of_eight) < 0.3 * size(of_full)


def test_moments_in_eight_bits_are_part_of_the_state() -> None:
    config = eight_bit()
    target = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    parameter, optimizer = learn_towards(target, config, 3)
    other = nn.Parameter(parameter.detach().clone())
    resumed = Optimizer([other], config, 1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, owner in ((parameter, optimizer), (other, resumed)):
        owner.clear()
        (each - target).square().sum().backward()
        owner.step()
    assert torch.equal(parameter, other)


def test_a_registered_function_must_return_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_entries", {entry.name: entry for entry in OPTIMIZERS.entries()})
    OPTIMIZERS.register("wrong", target=lambda groups, config: groups, summary="a test")
    with pytest.raises(UserError, match="optimizer 'wrong' returned list, expected a torch"):
        Optimizer([ones(torch.float32)], OptimizerConfig(name="wrong"), 1)
