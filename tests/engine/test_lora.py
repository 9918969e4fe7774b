from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_policy, resumed, whole_state
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from vla import SPEC, TASK_DESCRIPTIONS, make_batch, make_engine, make_observation, make_oft, oft_config

from embodyrl.config.build import build_section
from embodyrl.config.schema import LoraConfig, ModelConfig, Precision
from embodyrl.engine import lora
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.models import Policy, PolicyError, PolicyObservation, build_policy
from embodyrl.registry import SupportedModel

if importlib.util.find_spec("peft") is None:
    pytest.skip("needs peft: pip install 'embodyrl[vla]'", allow_module_level=True)


def adapted(policy: Policy | None = None, **settings: Any) -> HybridEngine:
    chosen = {name: settings.pop(name) for name in ("alpha", "targets") if name in settings}
    return make_engine(policy, lora=LoraConfig(rank=4, **chosen), **settings)


def learn(engine: HybridEngine, updates: int = 2) -> HybridEngine:
    for _ in range(updates):
        engine.learner.update(make_batch(engine), TASK_DESCRIPTIONS)
    return engine


def state(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.network.action_logits(
            policy.slot_states(policy.preprocess(PolicyObservation.of(make_observation())))
        )


def test_fresh_adapters_change_nothing_and_learn_with_the_heads_alone() -> None:
    plain = make_oft()
    engine = adapted()
    assert torch.equal(logits(engine.policy), logits(plain))
    before = state(engine.policy)
    learn(engine)
    moved = {name for name, value in engine.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] for name in moved} == {"network", "value_head"}
    assert all("lora_" in name for name in moved if name.startswith("network."))
    assert {name for name, each in engine.policy.named_parameters() if each.requires_grad} == moved
    assert len(engine.optimizer.inner.state) == len(moved), "there is optimiser state for what learns, and no other"


@pytest.mark.parametrize(
    ("name", "scratch"),
    [
        ("pi0", {"layers": 1}),
        ("gr00t", {"layers": 1, "action_layers": 1, "action_horizon": 4}),
        ("gr00t_n17", {"layers": 1, "action_layers": 3, "action_horizon": 4}),
    ],
)
def test_an_action_head_inside_the_adapted_network_learns_in_full(name: str, scratch: dict[str, int]) -> None:
    SupportedModel.entry(name).load()
    config = build_section(ModelConfig, {"name": name, "denoising_steps": 2, "scratch": scratch})
    policy = build_policy(config, SPEC, chunk_size=2, seed=1)
    lora.add_adapters(policy, LoraConfig(rank=2), seed=1)
    heads = policy.head_tensors().keys() & dict(policy.named_parameters()).keys()
    learning = {name for name, each in policy.named_parameters() if each.requires_grad}
    assert any(name.startswith("network.") for name in heads), "the head lies where peft freezes"
    assert learning == heads | {name for name in learning if "lora_" in name} and learning > heads


def test_targets_choose_layers_by_the_ends_of_their_names() -> None:
    layers = lora.adapted_layers(adapted(targets=["q_proj", "mlp.up_proj"]).policy)
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "up_proj"} and len(layers) == 4
    everything = lora.adapted_layers(adapted().policy)
    assert len(everything) > 14 and not any("lm_head" in name for name in everything)


def test_frozen_vision_towers_get_no_adapters() -> None:
    layers = lora.adapted_layers(adapted(make_oft(freeze_vision=True)).policy)
    assert layers and not any("vision" in name for name in layers)


def test_a_target_that_no_layer_has_is_refused_with_a_near_one() -> None:
    with pytest.raises(PolicyError, match=r"engine\.lora\.targets: .* ends in 'q_porj': did you mean 'q_proj'\?"):
        adapted(targets=["q_porj"])


def test_a_model_without_adaptable_layers_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"'mlp' has no layers that an adapter could change: set engine"):
        lora.add_adapters(make_policy(), LoraConfig(rank=4), 1)


def test_alpha_over_rank_is_what_adapters_are_multiplied_by() -> None:
    one, other = adapted(alpha=8), adapted(alpha=16)
    for engine in (one, other):
        for layer in lora.adapted_layers(engine.policy).values():
            torch.nn.init.constant_(layer.lora_B["default"].weight, 0.01)
    base = logits(make_oft())
    layer = "network.language_model.model.layers.0.self_attn.q_proj"
    seen = torch.ones(1, 32)
    changes = []
    for engine in (one, other):
        module = engine.policy.get_submodule(layer)
        with torch.no_grad():
            changes.append(module(seen) - module.get_base_layer()(seen))
    torch.testing.assert_close(changes[1], 2 * changes[0])
    assert not torch.equal(logits(one.policy), base)


def test_merged_weights_give_the_logits_of_the_adapters() -> None:
    engine = learn(adapted())
    wanted, base = logits(engine.policy), logits(make_oft())
    lora.merge(engine.policy)
    assert not lora.adapted_layers(engine.policy)
    assert state(engine.policy).keys() == state(make_oft()).keys()
    torch.testing.assert_close(logits(engine.policy), wanted, atol=1e-5, rtol=0)
    assert (wanted - base).abs().max() > 1e-3


def test_a_saved_adapter_is_read_by_the_model_option_adapter(tmp_path: Path) -> None:
    base, config = tmp_path / "base", oft_config()
    base.mkdir()
    make_oft().save(base, config)
    engine = learn(adapted(build_policy(oft_config(checkpoint=str(base)), SPEC, chunk_size=2, seed=7)))
    lora.save_adapter(engine.policy, tmp_path / "adapter", base=str(base))
    options = oft_config(checkpoint=str(base), adapter=str(tmp_path / "adapter"))
    merged = build_policy(options, SPEC, chunk_size=2, seed=9)
    torch.testing.assert_close(logits(merged), logits(engine.policy), atol=1e-5, rtol=0)


def test_a_saved_adapter_is_read_by_peft_itself(tmp_path: Path) -> None:
    from peft import PeftModel

    engine = learn(adapted())
    lora.save_adapter(engine.policy, tmp_path, base=None)
    other = make_oft()
    wrapped = PeftModel.from_pretrained(other.network, str(tmp_path))
    other.network = wrapped.base_model.model
    torch.testing.assert_close(logits(other), logits(engine.policy), atol=1e-6, rtol=0)


@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_a_saved_policy_with_adapters_comes_back_exactly(from_checkpoint: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    make_oft().save(base, oft_config())
    config = oft_config(checkpoint=str(base)) if from_checkpoint else oft_config()
    engine = learn(adapted(build_policy(config, SPEC, chunk_size=2, seed=1)))
    folder = tmp_path / "policy"
    folder.mkdir()
    lora.save_policy(engine.policy, folder, config)
    # Other random weights, where the base is not from a checkpoint: the folder brings it.
    other = adapted(build_policy(config, SPEC, chunk_size=2, seed=2), saved=folder)
    assert state(other.policy).keys() == state(engine.policy).keys()
    assert all(torch.equal(value, state(engine.policy)[name]) for name, value in state(other.policy).items())
    weights = [path.name for path in folder.iterdir() if path.name.startswith("model")]
    assert bool(weights) != from_checkpoint, "weights of a checkpoint are not written again"
    assert json.loads((folder / "base.json").read_text())["base"]["checkpoint"] == config.checkpoint
    names = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in names)


def test_a_run_with_adapters_goes_on_exactly(tmp_path: Path) -> None:
    first = learn(adapted(kl_coef=0.1))
    lora.save_policy(first.policy, tmp_path, oft_config())
    second = adapted(kl_coef=0.1, saved=tmp_path)
    resumed(second, whole_state(first))
    learn(first)
    learn(second)
    assert all(torch.equal(value, state(second.policy)[name]) for name, value in state(first.policy).items())


@pytest.mark.parametrize("rank", [0, 8])
def test_a_saved_policy_with_other_adapters_is_refused(rank: int, tmp_path: Path) -> None:
    lora.save_policy(adapted().policy, tmp_path, oft_config())
    wanted = r"engine\.lora\.rank is 0" if rank == 0 else r"does not fit: .*lora_A\.weight is \[4, \d+\], .* \[8, \d+\]"
    with pytest.raises(PolicyError, match=wanted):
        make_engine(lora=LoraConfig(rank=rank), saved=tmp_path)


def test_a_policy_without_adapters_is_refused_by_a_run_with_them(tmp_path: Path) -> None:
    make_oft().save(tmp_path, oft_config())
    with pytest.raises(PolicyError, match=r"holds no base\.json"):
        adapted(saved=tmp_path)


def test_the_reference_of_adapters_is_the_policy_without_them_and_no_copy() -> None:
    with_adapters, full = adapted(kl_coef=0.1), make_engine(kl_coef=0.1)
    assert with_adapters.reference.weights is None and full.reference.weights is not None
    first = {name: value.clone() for name, value in full.policy.state_dict().items()}
    learn(with_adapters)
    learned = state(with_adapters.policy)
    with with_adapters.reference.scoring() as reference:
        assert all(torch.equal(value, first[name]) for name, value in reference.state_dict().items())
    assert all(torch.equal(value, learned[name]) for name, value in state(with_adapters.policy).items())
    assert "train/reference_kl" in with_adapters.learner.update(make_batch(with_adapters), TASK_DESCRIPTIONS)


def test_adapters_of_bfloat16_weights_learn_in_float32() -> None:
    engine = adapted(make_oft(dtype="bfloat16"))
    assert engine.precision is torch.bfloat16
    layers = lora.adapted_layers(engine.policy).values()
    assert {layer.lora_A["default"].weight.dtype for layer in layers} == {torch.float32}
    assert {layer.get_base_layer().weight.dtype for layer in layers} == {torch.bfloat16}
    before = logits_in_bfloat16(engine)
    learn(engine)
    assert not torch.equal(before, logits_in_bfloat16(engine))


def logits_in_bfloat16(engine: HybridEngine) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return logits(engine.policy)


class Casts(TorchDispatchMode):
    """Counts conversions of floating-point tensors to another type."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.count += (kwargs or {}).get("dtype", args[0].dtype) is not args[0].dtype
        return func(*args, **kwargs or {})


def test_adapters_in_16_bits_compute_the_same_numbers_with_fewer_casts() -> None:
    engine = adapted(make_oft(dtype="bfloat16"), precision=Precision.bfloat16)
    inputs = engine.policy.preprocess(PolicyObservation.of(make_observation()))
    layers = lora.adapted_layers(engine.policy).values()
    with torch.no_grad():
        for layer in layers:
            layer.lora_B["default"].weight.normal_(std=0.1)
    found, casts = [], []
    for through_float32 in (False, True):
        for layer in layers:
            assert through_float32 or not layer.cast_input_dtype_enabled
            layer.cast_input_dtype_enabled = through_float32
        with torch.no_grad(), engine.computing, Casts() as counted:
            found.append(engine.policy.act(inputs, "eval"))
        casts.append(counted.count)
    assert torch.equal(found[0].actions, found[1].actions) and torch.equal(found[0].logprobs, found[1].logprobs)
    assert casts[0] <= casts[1] - len(layers)
    assert all(layer.cast_input_dtype_enabled for layer in lora.adapted_layers(adapted().policy).values())


def test_adapters_do_without_bitsandbytes() -> None:
    """It warns where there is no GPU; the 8-bit optimiser can still import it afterwards."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes: pip install 'embodyrl[bnb]'")
    program = (
        "import sys; from embodyrl.config.schema import LoraConfig; from embodyrl.engine.lora import add_adapters; "
        "from vla import make_oft; add_adapters(make_oft(), LoraConfig(rank=2), 0); "
        "assert 'peft' in sys.modules and 'bitsandbytes' not in sys.modules; import bitsandbytes"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True, timeout=240)


def test_naming_the_adapters_of_a_large_policy_does_not_look_at_all_modules_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = adapted().policy
    plan, looks = policy.parallel_plan(), []
    monkeypatch.setattr(policy, "parallel_plan", lambda: looks.append(1) or plan)
    assert len(lora.adapter_tensors(policy)) > 10 and len(looks) == 1
