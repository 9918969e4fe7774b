"""pi0 and pi0.5 against numbers of the unmodified public code.

The cases are not part of the repository; `test_pi_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models.flow.denoising import euler
from embodyrl.models.pi.checkpoint import HEAD, NUMBERS, WORDS, Layout, scale_of
from embodyrl.models.pi.config import Architecture, Normalization
from embodyrl.models.pi.network import Pi, time_embedding
from embodyrl.models.pi.policy import letterbox, pixel_values
from embodyrl.models.pi.prompts import prompt_with_state
from embodyrl.models.vla.processor import Normalizer
from tests.parity import pi_mutations
from tests.parity.pi_mutations import MUTATIONS
from tests.parity.pi_reference import ENTRIES, EXECUTED, METHODS, REFERENCE, STEPS, Case

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference cases are not beside this clone")
ABSOLUTE, RELATIVE = 1e-5, 2e-6
DRAWN = 5e-5
"""For log-probs of what was drawn and for squared errors: d logprob / d mean = (x - mean) / std^2 and
d error / d velocity = 2 (velocity - target) multiply the last digits, which processors sum in another order without
AVX-512."""
NAMES = ["pi0", "pi05"]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, relative: float = 0.0, absolute: float = ABSOLUTE) -> None:
    torch.testing.assert_close(found.double(), wanted.double().reshape(found.shape), atol=absolute, rtol=relative)


@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint-lerobot-layout"])
@torch.inference_mode()
def test_every_stage_up_to_the_velocity(case: Case, layout: str) -> None:
    network = case.policy(layout=layout).network
    assert_near(network.embed_prefix(case["in/images"], case["in/tokens"]), case["prefix_embs"])
    prefix = case.seen(case.policy(layout=layout)).prefix
    assert torch.equal(prefix.mask, case["prefix_pad_masks"])
    assert_near(prefix.hidden[prefix.mask], case["prefix_out"][prefix.mask])
    assert torch.equal(time_embedding(case["in/time"], case["time_emb"].shape[1]), case["time_emb"])
    embedded, condition = network.embed_suffix(case["x_t"], case["in/time"], case["in/state"])
    assert_near(embedded, case["suffix_embs"])
    assert (condition is None) == (case.name == "pi0")
    if condition is not None:
        assert_near(condition, case["adarms_cond"])
    velocity, _ = network(prefix, case["x_t"], case["in/time"], case["in/state"])
    assert_near(velocity, case["velocity"])


@pytest.mark.parametrize("steps", [4, 10])
@torch.inference_mode()
def test_actions(case: Case, steps: int) -> None:
    policy = case.policy(denoising_steps=steps)
    policy.start = case["in/noise"]  # every row begins with its own
    reached = policy.act({"state": case["in/state"]}, "eval").trace["chain"][:, -1]
    assert_near(reached, case[f"actions_{steps}"])


def test_loss_and_gradients(case: Case) -> None:
    policy = case.policy()
    errors = case.loss(policy)
    assert_near(errors, case["loss"], RELATIVE, DRAWN)
    errors.mean().backward()
    assert_near(errors.mean(), case["loss_mean"], RELATIVE)
    network = policy.network
    assert_near(network.action_in_proj.weight.grad, case["grad/action_in_proj.weight"])
    assert_near(network.language.layers[0].self_attn.q_proj.weight.grad, case["grad/vlm_q_proj_0"])


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_logprobs_values_and_entropy_of_rollouts(case: Case, method: str) -> None:
    policy = case.policy(noise_method=method, **METHODS[method])
    chains, steps = case[f"rl/{method}/chains"], case[f"rl/{method}/denoise_inds"][:, 0]
    level = torch.full((len(chains),), policy.noise_level)
    scored = policy.evaluate({}, {"chain": chains, "step": steps, "noise_level": level})
    for stage in ("rollout", "train"):
        wanted = case[f"rl/{method}/{stage}_logprobs"]
        assert wanted.shape[1:] == (EXECUTED, ENTRIES)
        assert_near(scored.logprobs, wanted, RELATIVE, DRAWN)
    assert_near(scored.values, case[f"rl/{method}/train_values"])
    if method == "flow_noise":
        assert_near(scored.entropy.mean(1), case["rl/flow_noise/entropy"])
    values, full = [], []
    for number in range(STEPS):
        here = torch.full_like(steps, number)
        denoised, transition = policy._look(case.seen(policy), chains[:, number], here, level)
        values.append(policy._judge(None, denoised, transition, chains[:, number + 1]).value)
        full.append(transition.logprob(chains[:, number + 1]))
        if method != "flow_noise" and number != steps[0]:
            _, before, after = policy.grid.at(here)
            assert_near(euler(chains[:, number], denoised.velocity, before, after), chains[:, number + 1])
    # The public code records the mean over all steps in rollouts, and learns the value at the random one.
    assert_near(torch.stack(values).mean(0), case[f"rl/{method}/rollout_values"])
    every = torch.stack(full, dim=1)
    wanted = case[f"rl/{method}/train_logprobs_full"]
    assert_near(every if method == "flow_noise" else every[:, steps[0]], wanted[:, -STEPS:], RELATIVE, DRAWN)


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
@torch.inference_mode()
def test_first_middle_and_last_step_of_any_chain(case: Case, method: str) -> None:
    policy = case.policy(noise_method=method, **METHODS[method])
    chains, steps = case[f"rl/{method}/any/chains"], case[f"rl/{method}/any/denoise_inds"][:, 0]
    assert steps.tolist() == [0, 1, STEPS - 1]
    level, rows = torch.full((3,), policy.noise_level), torch.arange(3)
    _, transition = policy._look(case.seen(policy), chains[rows, steps], steps, level)
    assert_near(transition.mean, case[f"rl/{method}/any/mean"])
    assert_near(transition.std, case[f"rl/{method}/any/std"])
    assert_near(transition.logprob(chains[rows, steps + 1]), case[f"rl/{method}/any/logprobs"], RELATIVE)
    scored = policy.evaluate({}, {"chain": chains, "step": steps, "noise_level": level})
    assert_near(scored.values, case[f"rl/{method}/any/values"])


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_at_full_size(name: str) -> None:
    expected = json.loads((REFERENCE / f"{name}-expected-keys.json").read_text())
    with torch.device("meta"):
        network = Pi(Architecture.from_config(name, {}, expert_head=True))
    layout = Layout()
    found = {layout.public(key): list(value.shape) for key, value in network.named_parameters()}
    assert found.pop(HEAD) == expected["keys"].pop(HEAD) == expected["keys"].pop(WORDS)  # one of the tied pair is kept
    assert found == expected["keys"]
    assert sum(value.numel() for value in network.parameters()) == expected["total_in_file"]


@torch.inference_mode()
def test_images_states_and_prompts() -> None:
    folder = REFERENCE / "flow_preprocess"
    arrays, facts = np.load(folder / "reference.npz"), json.loads((folder / "reference.json").read_text())
    for number in range(4):
        image = arrays[f"pi_image/{number}/in"]
        resized = arrays[f"pi_image/{number}/resized"]
        assert np.array_equal(letterbox(torch.from_numpy(image)[None], 28)[0].numpy(), resized)
        found = pixel_values(torch.from_numpy(image)[None, None], 28, torch.device("cpu"))[0, 0]
        assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(arrays[f"pi_image/{number}/pixel_values"]))
    for normalization in Normalization:
        rule = Normalizer(scale_of(normalization, *(arrays[f"pi_norm/{name}"] for name in NUMBERS[normalization])))
        given = torch.from_numpy(arrays["pi_norm/x"]).float()
        assert_near(rule.normalize(given), torch.from_numpy(arrays[f"pi_norm/normalized_{normalization}"]), RELATIVE)
        output = torch.from_numpy(arrays["pi_norm/y"]).float()[:, : len(rule)]
        assert_near(rule.unnormalize(output), torch.from_numpy(arrays[f"pi_norm/unnormalized_{normalization}"])[:, :7])
    prompts = facts["pi05_prompt"]
    for task, state, wanted in zip(prompts["tasks"], arrays["pi05_prompt/state"], prompts["prompts"], strict=True):
        assert prompt_with_state(task, state) == wanted


@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint-lerobot-layout"])
def test_what_is_saved_is_what_was_loaded(case: Case, layout: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    policy = case.policy(layout=layout, dtype="bfloat16")
    policy.save(tmp_path, policy.config)
    wanted, found = (load_file(folder / "model.safetensors") for folder in (case.folder / layout, tmp_path))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted)


@torch.inference_mode()
def test_the_library_s_own_pi0_agrees_apart_from_its_time_embedding(tmp_path: Path) -> None:
    """transformers computes the time embedding in float32, hence the looser tolerance."""
    from transformers import PI0Config, PI0ForConditionalGeneration, __version__

    if tuple(map(int, __version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {__version__} gives its pi0 the published vocabulary, whatever the config says")
    case = Case("pi0", tmp_path)
    folder = case.folder / "checkpoint"
    config = PI0Config(**{key: value for key, value in json.loads((folder / "config.json").read_text()).items()})
    native = PI0ForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    there = case["prefix_pad_masks"]
    images = there.shape[1] - case["in/tokens"].shape[1]
    ids = torch.cat([there[:, :images] * config.vlm_config.image_token_id, case["in/tokens"]], dim=1)
    velocity = native(
        state=case["in/state"],
        noise=case["x_t"],
        timestep=case["in/time"],
        input_ids=ids,
        pixel_values=case["in/images"],
        pixel_attention_mask=case["in/image_masks"],
        attention_mask=there.long(),
    ).logits
    policy = case.policy()
    seen = case.seen(policy)
    own, _ = policy.network(seen.prefix, case["x_t"], case["in/time"], seen.state)
    assert 1e-5 < (velocity - own).abs().max() < 2e-4
    pi_mutations.time_in_float32(policy)
    rough, _ = policy.network(seen.prefix, case["x_t"], case["in/time"], seen.state)
    assert_near(rough, velocity)


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    case = Case(mutation.model, tmp_path)
    policy = case.policy()
    mutation.apply(policy)
    prefix = case.seen(policy).prefix
    velocity, _ = policy.network(prefix, case["x_t"], case["in/time"], case["in/state"])
    read = (prefix.hidden - case["prefix_out"])[prefix.mask].abs().max()
    assert max(read, (velocity - case["velocity"]).abs().max()) > 2.0 * ABSOLUTE
