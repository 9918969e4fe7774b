"""GR00T N1.5 against numbers of the unmodified public code (see the reference.json beside the cases).

The cases are not part of the repository; `test_gr00t_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models

from embodyrl.models import load_policy
from embodyrl.models.flow.policy import FlowPolicy, masked_error
from embodyrl.models.gr00t.checkpoint import NormStats
from embodyrl.models.gr00t.config import EMBODIMENTS, Interpolation, Normalization
from embodyrl.models.gr00t.policy import ImagePipeline, scale_of
from embodyrl.models.gr00t.prompts import PIECE
from embodyrl.models.vla.padding import causal_mask
from embodyrl.models.vla.processor import Normalizer
from tests.parity.gr00t_mutations import MUTATIONS

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference cases are not beside this clone")
TOLERANCE = 1.5e-5
SUMS = {"atol": 1e-5, "rtol": 2e-6}
"""For losses, and log-probs far from the mean, which are large."""
METHODS = {"flow_sde": ("flow_sde", 0.5), "flow_cps": ("flow_cps", 0.3), "reinflow": ("flow_noise", 0.5)}
STEPS = 4


@cache
def arrays(folder: str) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in np.load(REFERENCE / folder / "reference.npz").items()}


DRAWN = {"atol": 1e-4, "rtol": 2e-6}
"""For log-probs of what was drawn: up to four deviations, of down to 0.09, from means known to 2e-6 in float32 (summing
matrix products in two halves moves them by 7e-7): d logprob / d mean = (x - mean) / std^2 is up to 46."""


def assert_near(name: str, found: Tensor, folder: str = "gr00t") -> None:
    wanted = arrays(folder)[name]
    tolerance = SUMS if "loss" in name else DRAWN if "logprobs" in name else {"atol": TOLERANCE, "rtol": 0}
    torch.testing.assert_close(found.double(), wanted.double().reshape(found.shape), **tolerance)  # type: ignore[arg-type]


def simple_ranges(count: int) -> dict[str, list[float]]:
    return {"min": [-1.0] * count, "max": [1.0] * count, "mean": [0.0] * count, "std": [1.0] * count}


def add_what_the_cases_lack(folder: Path) -> None:
    """A tokenizer and statistics, with which nothing is computed here."""
    words = {PIECE if number == 251 else f"word{number}": number for number in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    tokenizer.add_special_tokens([AddedToken(PIECE, special=True)])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    robot = {"statistics": {"state": {"all": simple_ranges(7)}, "action": {"all": simple_ranges(5)}}}
    (folder / "experiment_cfg").mkdir()
    (folder / "experiment_cfg" / "metadata.json").write_text(
        json.dumps({"robot": robot | {"modalities": {"video": {"front": {}}}}})
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("reference") / "checkpoint"
    shutil.copytree(REFERENCE / "gr00t" / "checkpoint", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    add_what_the_cases_lack(folder)
    return folder


def load(checkpoint: Path, method: str = "flow_sde", level: float = 0.5) -> Any:
    """The policy, for samples of three robots, with the heads of the reference."""
    policy: Any = load_policy(
        "gr00t", checkpoint=checkpoint, chunk_size=5, embodiment_id=0, noise_method=method, noise_level=level
    )
    policy.embodiment = arrays("gr00t")["in/embodiment_id"]
    heads = load_file(REFERENCE / "gr00t" / "checkpoint" / "rl_heads.safetensors")
    value = {name.removeprefix("value_head."): tensor for name, tensor in heads.items() if name.startswith("value")}
    policy.value_head.load_state_dict(value)
    if policy.noise_network is not None:
        # Layers are counted with the activations between them.
        parts = [(name.split("."), tensor) for name, tensor in heads.items() if name.startswith("reinflow")]
        noise = {f"mlp.{2 * int(part[3])}.{part[-1]}": tensor for part, tensor in parts}
        policy.noise_network.load_state_dict(noise)
    return policy


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Any:
    return load(checkpoint)


def given_random_features(policy: Any) -> Any:
    case = arrays("gr00t")
    features, state = case["head/backbone_features"], case["in/state"]
    return policy.network.action_head.condition(features, state, policy.embodiment)


def denoise(policy: Any, condition: Any, noise: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Velocities, from noise to data, and the actions between them."""
    chain, velocities = [noise], []
    for step in range(STEPS):
        time, _, _ = policy.grid.at(torch.full((len(noise),), step))
        velocities.append(-policy.denoise(condition, chain[-1], time).velocity)
        chain.append(chain[-1] + velocities[-1] / STEPS)
    return velocities, chain


# ------------------------------------------------------------------------------------------------------------- network


@torch.inference_mode()
def test_action_head(policy: Any) -> None:
    case, head = arrays("gr00t"), policy.network.action_head
    condition = given_random_features(policy)
    assert_near("head/vlln", head.vlln(case["head/backbone_features"]))
    assert_near("head/vl_embs", condition.context)
    assert_near("head/state_features", condition.state)
    assert_near(
        "head/action_features_0", head.action_encoder(case["head/noise"], torch.zeros(3).long(), policy.embodiment)
    )
    buckets = torch.tensor([0, 250, 500, 750]).unsqueeze(1).expand(-1, 3)
    assert_near("head/temb", torch.stack([head.model.timestep_encoder(bucket) for bucket in buckets]))
    velocities, chain = denoise(policy, condition, case["head/noise"])
    assert_near("head/velocity", torch.stack(velocities, dim=1))
    assert_near("head/chain", torch.stack(chain, dim=1))
    assert_near("head/actions", chain[-1])


@torch.inference_mode()
def test_blocks_of_the_diffusion_transformer(policy: Any) -> None:
    seen: dict[str, Tensor] = {}
    model = policy.network.action_head.model
    parts = {f"dit_block{index}_0": block for index, block in enumerate(model.transformer_blocks)} | {
        "dit_out_0": model
    }

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    policy.denoise(given_random_features(policy), arrays("gr00t")["head/noise"], torch.zeros(3))
    for hook in hooks:
        hook.remove()
    assert len(seen) == 5
    for name, output in seen.items():
        assert_near(f"head/{name}", output)


@pytest.mark.parametrize("side", ["full_left", "full_right"])
@pytest.mark.parametrize("attention", ["fa2emu_", ""])
@torch.inference_mode()
def test_from_pixels_to_actions(policy: Any, side: str, attention: str) -> None:
    """fa2emu: padding gets nothing from attention, as in FlashAttention and in the policy. The other: padding behind
    the prompt looks at the prompt."""
    case, eagle = arrays("gr00t"), policy.network.backbone.eagle_model
    pixels, ids, valid = (case[f"{side}/eagle_{part}"] for part in ("pixel_values", "input_ids", "attention_mask"))
    assert_near(f"{side}/vit", eagle.vision_model(pixels).last_hidden_state)
    assert_near(f"{side}/mlp1", eagle.embed_images(pixels))
    mask = causal_mask(valid.bool())
    if not attention:
        mask = causal_mask(torch.ones_like(valid).bool()) & valid.bool()[:, None, None, :]
    features = policy.network.backbone(pixels, ids, mask)
    assert_near(f"{side}/{attention}backbone_features", features)
    condition = policy.network.action_head.condition(features, case["in/state"], policy.embodiment)
    _, chain = denoise(policy, condition, case[f"{side}/noise"])
    assert_near(f"{side}/{attention}actions", chain[-1])
    if not attention:
        assert_near(f"{side}/loss", loss(policy, condition, side))


def loss(policy: Any, condition: Any, side: str) -> Tensor:
    case = arrays("gr00t")
    time = case[f"{side}/loss_t"]
    errors = policy.flow_errors(condition, case["in/action"], case[f"{side}/loss_noise"], time, 1.0 - time)
    return masked_error(errors, case["in/action_mask"])


def test_loss_and_its_gradients(policy: Any) -> None:
    case, head = arrays("gr00t"), policy.network.action_head
    features = case["head/backbone_features"].clone().requires_grad_()
    condition = head.condition(features, case["in/state"], policy.embodiment)
    total = loss(policy, condition, "head")
    assert_near("head/loss", total)
    by_features, by_weights = torch.autograd.grad(total, [features, head.action_encoder.W1.W])
    assert_near("head/loss_grad_features", by_features)
    assert_near("head/loss_grad_W1", by_weights)
    time, noise = case["head/loss_t"], case["head/loss_noise"]
    between = (1.0 - time)[:, None, None] * noise + time[:, None, None] * case["in/action"]
    assert_near("head/loss_velocity", -policy.denoise(condition, between, time).velocity)


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(policy: Any, name: str) -> None:
    mutated, case = copy.deepcopy(policy), arrays("gr00t")
    MUTATIONS[name](mutated.network)
    velocities, _ = denoise(mutated, given_random_features(mutated), case["head/noise"])
    inputs = {part: case[f"full_left/eagle_{part}"] for part in ("pixel_values", "input_ids", "attention_mask")}
    features = mutated.network.backbone(
        inputs["pixel_values"], inputs["input_ids"], causal_mask(inputs["attention_mask"].bool())
    )
    condition = mutated.network.action_head.condition(features, case["in/state"], mutated.embodiment)
    _, chain = denoise(mutated, condition, case["full_left/noise"])
    off = [
        (torch.stack(velocities, dim=1) - case["head/velocity"]).abs().max(),
        (chain[-1] - case["full_left/actions"]).abs().max(),
    ]
    assert max(off) > 2 * TOLERANCE


# ---------------------------------------------------------------------------------------------- reinforcement learning


@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_random_steps(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means, standard deviations, log-probs and values, of rollouts and of arbitrary chains at every kind of step."""
    method, strength = METHODS[name]
    policy, case = load(checkpoint, method, strength), arrays("gr00t")
    condition = given_random_features(policy)
    monkeypatch.setattr(policy, "condition", lambda inputs: condition)
    level = torch.full((3,), strength)
    chains, step, rows = case[f"rl/{name}/any/chains"], case[f"rl/{name}/any/denoise_inds"][:, 0], torch.arange(3)
    assert step.tolist() == [0, 1, STEPS - 1]
    _, transition = FlowPolicy._look(policy, condition, chains[rows, step], step, level)
    assert_near(f"rl/{name}/any/mean", transition.mean)
    assert_near(f"rl/{name}/any/std", transition.std)
    # These chains lie up to forty deviations from means whose last digits, made by the order of sums, count so often:
    # d logprob / d mean = (x - mean) / std^2.
    found, after = transition.logprob(chains[rows, step + 1]), chains[rows, step + 1]
    wanted, slope = case[f"rl/{name}/any/logprobs"].view_as(found), (after - transition.mean).abs() / transition.std**2
    assert ((found - wanted).abs() <= SUMS["atol"] + SUMS["rtol"] * wanted.abs() + TOLERANCE * slope).all()
    step = case[f"rl/{name}/denoise_inds"][:, 0]
    trace = {"chain": case[f"rl/{name}/chains"], "step": step, "noise_level": level}
    scored = policy.evaluate({}, trace)
    assert_near(f"rl/{name}/train_logprobs", scored.logprobs)
    assert_near(f"rl/{name}/train_values", scored.values)
    assert_near(f"rl/{name}/rollout_values", scored.values)
    of_steps = torch.zeros(3, STEPS, scored.logprobs.shape[1])
    of_steps[rows, step] = scored.logprobs
    assert_near(f"rl/{name}/rollout_logprobs", of_steps)


# ------------------------------------------------------------------------------------------------------- preprocessing


def ranges(name: str) -> NormStats:
    low, high = (arrays("flow_preprocess")[f"pack/in/{name}_{end}"].tolist() for end in ("min", "max"))
    return NormStats(parts=[name], min=low, max=high, mean=low, std=high)


def test_states_and_actions(policy: Any) -> None:
    case, packing = arrays("flow_preprocess"), copy.copy(policy)
    state, action = (Normalizer(scale_of(ranges(name), Normalization.min_max)) for name in ("state", "action"))
    sizes = dataclasses.replace(policy.network.sizes, max_state_dim=12, max_action_dim=9, action_horizon=16)
    network = copy.copy(policy.network)
    network.sizes = sizes
    packing._modules = {**policy._modules, "network": network, "states": state, "actions": action}
    packing._buffers = {**policy._buffers, "start": torch.zeros(16, 9)}
    assert_near("pack/state", packing.padded_state(case["pack/in/state"], 3, 12).unsqueeze(1), "flow_preprocess")
    data, counts = packing.sft_targets(case["pack/in/action"], {})
    assert_near("pack/action", data, "flow_preprocess")
    assert torch.equal(counts.bool(), case["pack/action_mask"])
    assert set(case["pack/embodiment_id"].tolist()) == {EMBODIMENTS["new_embodiment"]}
    assert_near("unpack/out", action.unnormalize(case["unpack/in"][:, : len(action)]), "flow_preprocess")


@pytest.mark.parametrize("number", range(3))
def test_images(number: int) -> None:
    case = arrays("flow_preprocess")
    pipeline = ImagePipeline(28, center_crop=False, interpolation=Interpolation.bicubic)
    pixels = pipeline(case[f"eagle_image/{number}/in"][None, None], torch.device("cpu"))
    assert_near(f"eagle_image/{number}/pixel_values", pixels[0], "flow_preprocess")
