"""pi0-FAST against numbers of LeRobot's unmodified classes.

The case is not part of the repository; `test_pi0_fast_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models.pi0_fast.checkpoint import MATRICES, FastLayout
from embodyrl.models.pi0_fast.config import Architecture
from embodyrl.models.pi0_fast.network import PiFast, visible
from embodyrl.models.sampling import TokenDistribution
from embodyrl.models.vla.processor import fitted
from embodyrl.models.vla.transformer import KeyValueCache, positions_of
from tests.parity.pi0_fast_mutations import MUTATIONS, bos_seen_by_the_prompt
from tests.parity.pi0_fast_reference import ABSENT, FOLDER, REFERENCE, Case

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the reference case is not beside this clone")
ABSOLUTE, RELATIVE, OF_LOGPROBS = 1e-5, 5e-6, 2e-6
"""Tolerances: absolute, and of the largest entry; that of log-probs and losses."""


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(scope="module")
def policy(case: Case) -> Any:
    return case.policy()


def room(wanted: torch.Tensor, relative: float) -> float:
    """How far numbers may be off."""
    return ABSOLUTE + relative * float(wanted.double().abs().max())


def assert_near(found: torch.Tensor, wanted: torch.Tensor, relative: float = RELATIVE) -> None:
    difference = float((found.detach().double() - wanted.double().reshape(found.shape)).abs().max())
    assert difference <= room(wanted, relative), difference


@torch.inference_mode()
def test_from_observations_to_inputs(case: Case, policy: Any) -> None:
    side, device = policy.architecture.image_size, torch.device("cpu")
    for number, name in enumerate(case.images):
        if not name.startswith(ABSENT):
            assert torch.equal(
                fitted(case[f"raw/{name}"].unsqueeze(1), side, device, centred=True)[:, 0], case["in/images"][:, number]
            )
    ids, mask = policy.prompts.batch(case.facts["tasks"], policy.written(case["raw/state"]))
    assert torch.equal(torch.from_numpy(ids), case["in/tokens"])
    assert torch.equal(torch.from_numpy(mask), case["in/token_mask"])
    assert_near(policy.states.normalize(case["raw/state"]), case["norm/state"])
    assert_near(policy.actions.normalize(case["raw/action"]), case["norm/action"])
    found, wanted = policy.answers({}, case["raw/action"]), case.targets
    width = found[0].shape[1]
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs[:, :width]) and not theirs[:, width:].any()


@torch.inference_mode()
def test_actions_as_codes_and_back(case: Case, policy: Any) -> None:
    fast, chunks, codes = policy.codes.fast, case["norm/action"].numpy(), case["fast/codes"]
    assert np.array_equal(fast.coefficients(chunks), case["fast/coefficients"].numpy())
    assert [fast.encode(chunk) for chunk in chunks] == [row[row >= 0].tolist() for row in codes]
    decoded, whole = policy.codes(codes, codes >= 0)
    assert_near(decoded, case["fast/decoded"])
    assert whole.all()
    found, valid = policy.decode(case.targets[0])
    assert_near(found, case["decode/action"])
    assert_near(policy.finish(found, {}), case["decode/action_raw"])
    assert valid.all()
    others = {"bad": "decode/bad_tokens", "negative": "decode/negative_tokens", "greedy": "sample/greedy"}
    for name, tokens in others.items():
        found, valid = policy.decode(case[tokens])
        assert_near(found, case[f"decode/{name}"])
        assert not valid.any()


@contextmanager
def streams(policy: Any) -> Iterator[list[torch.Tensor]]:
    """A list that gets the output of every layer of the language model."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, given, result: outputs.append(result[0]))
        for layer in policy.network.language.layers
    ]
    yield outputs
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def test_every_stage_of_a_training_pass(case: Case, policy: Any) -> None:
    network, answer = policy.network, case["in/action_tokens"]
    there, own = case["train/pad_masks"], case["in/action_token_mask"]
    seen = network.vision(pixel_values=case["in/images"][:, 0]).last_hidden_state
    assert_near(seen, case["vision"])
    assert_near(network.embed_images(case["in/images"][:, :1]), case["image_embs"])
    with streams(policy) as outputs:
        read = case.read(policy, answer)
    embedded = torch.cat(
        [network.embed_prefix(case["in/images"], case["in/tokens"]), network.embed_words(answer)], dim=1
    )
    assert_near(embedded[there], case["train/embs"][there])
    assert torch.equal(torch.cat([read.there, own], dim=1), there)
    both = there[:, None, :] & there[:, :, None]
    assert torch.equal(visible(read.there, answer.shape[1])[:, 0] & both, case["train/attention"])
    assert torch.equal(positions_of(there)[there], case["train/position_ids"][there])
    kept = sorted(key for key in case.arrays if key.startswith("train/layer"))
    for key, stream in zip(kept, outputs, strict=True):
        assert_near(stream[there], case[key][there])
    assert_near(read.answer[own], case["train/hidden"][own])
    assert_near(network.logits(read.answer)[own], case["train/logits"][own])


def test_logprobs_loss_and_gradients(case: Case) -> None:
    policy = case.policy()
    losses, (_, there) = case.losses(policy), case.targets
    assert_near(-losses[there], case["train/logprobs"][there], OF_LOGPROBS)
    loss = (losses * there).sum() / there.sum()
    assert_near(loss, case["loss"], OF_LOGPROBS)
    loss.backward()
    layout = policy.files.layout
    for key in [key for key in case.arrays if key.startswith("grad/")]:
        gradient = policy.network.get_parameter(layout.own(key.removeprefix("grad/"))).grad
        assert_near(gradient, case[key])


@torch.inference_mode()
def test_the_loss_has_both_means_and_openpi_s_order_its_logprobs(case: Case, policy: Any) -> None:
    """Through `sft_loss`, with what the engine makes of `sample_sizes`."""
    other = case.policy(convention="openpi")
    losses, (_, there) = case.losses(other), case.targets
    assert_near(-losses[there], case["openpi/logprobs"][there], OF_LOGPROBS)
    assert_near((losses * there).sum(1) / there.sum(1), case["openpi/loss"], OF_LOGPROBS)
    names = ("in/images", "in/tokens", "in/token_mask")
    inputs = dict(zip(("pixel_values", "input_ids", "attention_mask"), (case[name] for name in names), strict=True))
    for each, wanted in ((policy, case["loss"]), (other, case["openpi/loss"].mean())):
        each.read = lambda inputs, answer, cache=None, each=each: case.read(each, answer)
        sizes = each.sample_sizes(inputs, case["raw/action"])
        given = inputs if sizes is None else inputs | {"sample_weights": sizes / sizes.mean()}
        assert (sizes is None) == (each is other)
        assert_near(each.sft_loss(given, case["raw/action"], {}), wanted, OF_LOGPROBS)
        del each.read


@torch.inference_mode()
def test_lerobot_s_own_sampling_if_the_prompt_sees_its_second_begin_token(case: Case) -> None:
    """What training never does: there log-probs differ by about 0.05, and here both use the training mask."""
    policy = case.policy()
    tokens, there = case.targets
    trained = -case.losses(policy)
    assert float((trained - case["sample/logprobs"])[there].abs().max()) > 0.01
    bos_seen_by_the_prompt(policy)
    _, hidden = case.predicted(policy)
    logits = policy.network.logits(hidden)
    assert_near(logits[there], case["sample/logits"][there])
    for temperature, name in ((1.0, "sample/logprobs"), (0.7, "sample/logprobs_T0.7")):
        found = TokenDistribution(logits, temperature=temperature, top_k=0, top_p=1.0).logprobs(tokens)
        assert_near(found[there], case[name][there], OF_LOGPROBS)
    greedy = case["sample/greedy"]
    read = case.read(policy, torch.cat([policy.begin.expand(len(greedy), -1), greedy[:, :-1]], dim=1))
    assert_near(policy.network.logits(read.answer), case["sample/greedy_logits"])
    assert torch.equal(policy.network.logits(read.answer).argmax(-1), greedy)


@pytest.mark.parametrize("convention", ["lerobot", "openpi"])
@pytest.mark.parametrize("decoding", ["codes", "all"])
@torch.inference_mode()
def test_a_cache_changes_no_number(case: Case, convention: str, decoding: str) -> None:
    policy = case.policy(convention=convention, decoding=decoding)
    network, tokens = policy.network, case.targets[0][:, :12]
    tokens = tokens if decoding == "all" else tokens[:, len(policy.vocabulary.prefix) :]
    names = ("in/images", "in/image_masks_used", "in/tokens", "in/token_mask")
    whole = case.read(policy, torch.cat([policy.given.expand(3, -1), tokens[:, :-1]], dim=1))
    cache = KeyValueCache(case["in/tokens"].shape[1] + whole.there.shape[1] + 16)
    begun = network.read(*(case[name] for name in names), policy.given.expand(3, -1), cache)
    there = torch.cat([begun.there, torch.ones(3, len(policy.given), dtype=torch.bool)], dim=1)
    for step in range(tokens.shape[1] - 1):
        there = torch.cat([there, torch.ones(3, 1, dtype=torch.bool)], dim=1)
        hidden = network.next(tokens[:, step], there, cache, torch.float32)
        assert_near(hidden, whole.answer[:, len(policy.given) + step])


def test_names_and_shapes_at_full_size() -> None:
    expected = json.loads((REFERENCE / "pi0-fast-expected-keys.json").read_text())
    with torch.device("meta"):
        network = PiFast(Architecture.from_config({}))
    layout = FastLayout(prefix="model.")
    found = {layout.public(key): list(value.shape) for key, value in network.named_parameters()}
    assert found == expected["keys"] and len(found) == expected["tensors"]
    total = sum(value.numel() for value in network.parameters())
    assert total == expected["parameters"]
    assert total - network.lm_head.weight.numel() == expected["parameters_with_one_vocabulary_matrix"] == 2_923_335_408


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_what_is_saved_is_what_was_loaded_byte_for_byte(case: Case, dtype: str, tmp_path: Path) -> None:
    policy = case.policy(dtype=dtype)
    policy.save(tmp_path, policy.config)
    loaded = [path for path in sorted((case.folder / "checkpoint").rglob("*")) if path.is_file()]
    for path in loaded:
        saved = tmp_path / path.relative_to(case.folder / "checkpoint")
        assert saved.read_bytes() == path.read_bytes(), path.name


def test_a_matrix_that_has_learned_is_saved_beside_the_other(case: Case, tmp_path: Path) -> None:
    policy = case.policy()
    assert len(policy.files.layout.matrices) == 1, "the case's file has one for both"
    assert torch.equal(*(policy.network.get_parameter(name) for name in MATRICES))
    with torch.no_grad():
        policy.network.lm_head.weight[0, 0] += 1.0
    policy.save(tmp_path, policy.config)
    from embodyrl.models import load_policy

    again: Any = load_policy("pi0_fast", checkpoint=tmp_path, chunk_size=policy.spec.chunk_size)
    for (name, mine), (_, theirs) in zip(
        policy.network.named_parameters(), again.network.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@torch.inference_mode()
def test_bfloat16_is_near(case: Case) -> None:
    """LeRobot keeps vision, projector and norms in float32, which is not repeated."""
    policy = case.policy(dtype="bfloat16")
    policy.network.to(torch.bfloat16)
    policy.dtype = torch.bfloat16
    images = case["in/images"].bfloat16()
    tokens, there = case.targets
    others = (case[name] for name in ("in/image_masks_used", "in/tokens", "in/token_mask"))
    read = policy.network.read(images, *others, torch.cat([policy.begin.expand(3, -1), tokens[:, :-1]], dim=1))
    found = policy.network.logits(read.answer)
    assert float((found - case["bf16/logits"])[there].abs().max()) < 0.3
    loss = torch.nn.functional.cross_entropy(found[there], tokens[there])
    assert abs(float(loss) - float(case["bf16/loss"])) < 0.02


def compared(case: Case, policy: Any) -> float:
    """By how many tolerances the stream between two layers, logits and log-probs of a policy are off."""
    _, there = case.targets
    with streams(policy) as outputs:
        _, hidden = case.predicted(policy)
    seen = case["train/pad_masks"][:, :-1]
    pairs = [
        (outputs[1][seen], case["train/layer1"][:, :-1][seen], RELATIVE),
        (policy.network.logits(hidden)[there], case["train/logits"][:, :-1][there], RELATIVE),
        (-case.losses(policy)[there], case["train/logprobs"][there], OF_LOGPROBS),
    ]
    return max(float((found - wanted).abs().max()) / room(wanted, relative) for found, wanted, relative in pairs)


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(case: Case, name: str) -> None:
    policy = case.policy()
    assert compared(case, policy) < 1.0
    MUTATIONS[name](policy)
    assert compared(case, policy) > 2.0


@torch.inference_mode()
def test_a_loss_of_samples_and_a_prompt_in_lower_case_are_other_ones(case: Case, policy: Any) -> None:
    losses, (_, there) = case.losses(policy), case.targets
    samples = ((losses * there).sum(1) / there.sum(1)).mean()
    assert abs(float(samples - case["loss"])) > 2.0 * room(case["loss"], OF_LOGPROBS)
    other = case.policy(convention="openpi")
    ids, _ = other.prompts.batch(case.facts["tasks"], other.written(case["raw/state"]))
    assert not torch.equal(torch.from_numpy(ids), case["in/tokens"])
