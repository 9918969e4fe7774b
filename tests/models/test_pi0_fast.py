"""pi0-FAST: codes and bytes, answers of different lengths, what is learned of them, files, configs that do not fit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from tokenizers import Tokenizer, decoders, models

from embodyrl.algorithms.columns import logprobs_at_level, valid_at
from embodyrl.config import ConfigError, load_config
from embodyrl.config.rules import checkpoint_notes
from embodyrl.config.schema import Level, LoraConfig
from embodyrl.engine.lora import add_adapters
from embodyrl.methods.stages import chosen_in, rollout_metrics
from embodyrl.models import PolicyError, build_policy, load_policy
from embodyrl.models.pi0_fast.codes import REPLACEMENT, ActionCodes, code_points
from embodyrl.models.pi0_fast.config import Convention, Decoding, LossMean, Pi0FastConfig, ScratchConfig
from embodyrl.models.pi0_fast.fast import PROCESSOR, FastTokenizer, byte_characters, dct_matrix, new_fast
from embodyrl.models.policy import SAMPLE_WEIGHTS
from embodyrl.models.saved import from_own_folder
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import Rollout
from tests.models.test_pi import SPEC, observation, rewrite

SHAPE = ScratchConfig(image_size=32, layers=2)
C, D = 4, 4


def options(**changes: Any) -> Pi0FastConfig:
    return Pi0FastConfig(**{"name": "pi0_fast", "value_sizes": [8], "scratch": SHAPE} | changes)


def scratch(*, seed: int = 1, **changes: Any) -> Any:
    return build_policy(options(**changes), SPEC, chunk_size=C, seed=seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as a run saves it."""
    folder = tmp_path_factory.mktemp("saved")
    scratch().save(folder, options())
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, without what only ours have."""
    copy = Path(shutil.copytree(saved, tmp_path / "policy"))
    (copy / "policy.json").unlink()
    return copy


def load(folder: Path, **changes: Any) -> Any:
    return load_policy("pi0_fast", checkpoint=folder, simulator=SPEC, **{"chunk_size": C, "value_sizes": [8]} | changes)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


# ---- codes


def of_bytes() -> FastTokenizer:
    """A tokenizer whose codes are the 256 bytes, and a few of several."""
    spelled = {byte: character for character, byte in byte_characters().items()}
    texts = [bytes([byte]) for byte in range(256)] + [b"ab", "é".encode(), "é".encode()[1:] + b"a"]
    vocabulary = {"".join(spelled[byte] for byte in text): number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return FastTokenizer(tokenizer, 10.0, 0, 0x10FFFF)


def test_bytes_are_decoded_as_the_tokenizers_package_does_it() -> None:
    """Also where they are no text: lone and missing continuations, overlong forms, surrogates, beyond U+10FFFF."""
    fast, draw = of_bytes(), random.Random(0)
    codes = ActionCodes(fast, 1, 4)
    odd = [0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0xC1, 0xC2, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x7F, *range(256, 259)]
    rows = [[draw.choice([draw.randrange(259), draw.choice(odd)]) for _ in range(8)] for _ in range(500)]
    assert len({code for row in rows for code in row}) == fast.size
    given = torch.tensor(rows)
    points, found = code_points(*codes._bytes(given, torch.ones_like(given, dtype=torch.bool)))
    for row, mine, there in zip(rows, points, found, strict=True):
        assert mine[there].tolist() == [ord(character) for character in fast.tokenizer.decode(row)]
    assert (points[found] == REPLACEMENT).any()


def test_a_chunk_and_its_codes() -> None:
    matrix = dct_matrix(5)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(matrix[0], 5**-0.5)
    chunk = (1, -2, 0, 3, 1)
    by_hand = sum(np.cos(np.pi * (t + 0.5) * 2 / 5) * value for t, value in enumerate(chunk)) * 0.4**0.5
    np.testing.assert_allclose(matrix[2] @ chunk, by_hand)
    fast = FastTokenizer.read(new_fast(10.0))
    codes = ActionCodes(fast, 5, 3)
    chunks = np.random.default_rng(0).uniform(-1, 1, (6, 5, 3)).astype(np.float32)
    chunks[0, :, 1:] = 0.0
    rows = [fast.encode(chunk) for chunk in chunks]
    assert len({len(row) for row in rows}) > 1, "zeros that follow each other share a code"
    width = max(map(len, rows))
    given = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    found, whole = codes(given, given >= 0)
    assert whole.all()
    # Each coefficient is at most 0.05 off, and the transform keeps lengths.
    assert float((found - torch.from_numpy(chunks)).square().sum(1).max()) <= 5 * 0.05**2 + 1e-6
    wild = np.full((5, 3), 100.0)
    given = torch.tensor([fast.encode(wild)])
    assert codes(given, given >= 0)[1].all(), "what is too large for a code has the largest"


def test_what_is_no_chunk_is_the_nearest_one() -> None:
    fast = FastTokenizer.read(new_fast(10.0))
    codes, zero = ActionCodes(fast, 2, 2), 64
    rows = {
        "whole": [zero + 10, zero, zero, zero],
        "short": [zero + 10],
        "long": [zero + 10, zero, zero, zero, zero + 9],
        "foreign": [zero + 10, fast.size, zero, zero],
        "negative": [zero + 10, -1, zero, zero],
    }
    width = max(map(len, rows.values()))
    there = torch.tensor([[place < len(row) for place in range(width)] for row in rows.values()])
    given = torch.tensor([row + [0] * (width - len(row)) for row in rows.values()])
    found, whole = codes(given, there)
    assert whole.tolist() == [True, False, False, False, False]
    close(found[0], torch.tensor([[2**-0.5, 0.0]] * 2))
    assert all(torch.equal(found[row], found[0]) for row in (1, 2, 3)) and not found[4].any()


# ---- answers


@pytest.mark.parametrize("decoding", Decoding)
@pytest.mark.parametrize("convention", Convention)
def test_act_and_evaluate_agree_alone_and_together(decoding: Decoding, convention: Convention) -> None:
    policy = scratch(decoding=decoding, convention=convention, temperature=0.9)
    inputs = policy.preprocess(observation(5))
    with torch.inference_mode():
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    trace = {name: each.clone() for name, each in acted.trace.items()}
    whole = policy.evaluate(inputs, trace)
    close(whole.logprobs, acted.logprobs)
    close(whole.values, acted.values)
    parts = [slice(0, 1), slice(1, 3), slice(3, 5)]
    for name in ("logprobs", "entropy", "values"):
        scored = [
            getattr(policy.evaluate(*({key: each[part] for key, each in of.items()} for of in (inputs, trace))), name)
            for part in parts
        ]
        close(torch.cat(scored), getattr(whole, name))
    longest = policy.act(inputs, "eval")
    alone = policy.act({key: each[3:4] for key, each in inputs.items()}, "eval")
    assert torch.equal(alone.trace["tokens"], longest.trace["tokens"][3:4])
    close(alone.actions, longest.actions[3:4])


def ended(policy: Any, tokens: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Tokens with the end of the answer at these places and anything behind."""
    rows = tokens.clone()
    for row, length in enumerate(lengths):
        rows[row, length - 1] = policy.vocabulary.stop
    return rows


def test_answers_count_through_their_end() -> None:
    policy = scratch()
    inputs = policy.preprocess(observation(3))
    tokens = policy.act(inputs, "train", torch.Generator().manual_seed(0)).trace["tokens"]
    some = tokens.where(tokens != policy.vocabulary.stop, policy.vocabulary.first)
    short = ended(policy, some, 3, 9, policy.answer_length)
    counted = policy.counted(short)
    assert counted.sum(1).tolist() == [3, 9, policy.answer_length]
    scored = policy.evaluate(inputs, {"tokens": short})
    for each in (scored.logprobs, scored.entropy):
        assert not each[~counted].any() and (each[counted] != 0).all()
    other = torch.where(counted, short, policy.vocabulary.stop)
    again = policy.evaluate(inputs, {"tokens": other})
    close(again.logprobs, scored.logprobs, 1e-6)
    scored.logprobs.sum().backward()
    assert all(each.grad.isfinite().all() for each in policy.network.parameters() if each.grad is not None)


def test_only_codes_and_the_end_are_chosen_unless_all_may_be() -> None:
    policy, free = scratch(), scratch(decoding=Decoding.all)
    found = {}
    for name, each in (("codes", policy), ("all", free)):
        inputs = each.preprocess(observation(20))
        found[name] = each.act(inputs, "train", torch.Generator().manual_seed(0)).trace["tokens"]
    ids = {*range(policy.vocabulary.lowest, policy.vocabulary.first + 1), policy.vocabulary.stop}
    assert set(found["codes"].flatten().tolist()) <= ids
    assert not set(found["all"].flatten().tolist()) <= ids
    assert found["all"].shape[1] == found["codes"].shape[1] + len(policy.vocabulary.prefix)
    # Given by the prompt or chosen: the same answer, read alike.
    prefix = torch.tensor([policy.vocabulary.prefix]).expand(20, -1)
    chunks, valid = policy.decode(found["codes"])
    with_prefix, still = free.decode(torch.cat([prefix, found["codes"]], dim=1))
    assert torch.equal(chunks, with_prefix) and torch.equal(valid, still)


def test_what_an_answer_may_be_long() -> None:
    assert scratch().answer_length == C * D + 1
    short = scratch(answer_length=3)
    output = short.act(short.preprocess(observation(8)), "train", torch.Generator().manual_seed(0))
    assert output.logprobs.shape == (8, 3)
    assert output.invalid is not None and output.invalid.all(), "three tokens are no chunk of sixteen numbers"
    assert output.actions.isfinite().all()


def test_an_answer_that_is_one_chunk_is_valid_and_means_it() -> None:
    policy = scratch()
    inputs = policy.preprocess(observation(3))
    wanted = torch.rand(3, C, D, generator=torch.Generator().manual_seed(0)) * 1.8 - 0.9
    tokens, there = policy.answers(inputs, wanted)
    assert torch.equal(tokens[:, 0], torch.full((3,), policy.vocabulary.prefix[0]))
    codes = tokens[:, len(policy.vocabulary.prefix) :]
    assert (codes == policy.vocabulary.stop).sum(1).tolist() == [1, 1, 1]
    chunks, valid = policy.decode(codes)
    assert valid.all()
    arm = policy.finish(chunks, inputs)[..., :3] - wanted[..., :3]
    assert float(arm.abs().max()) < 0.1 and int(there.sum(1).min()) > 5


# ---- learning


def batch_of(policy: Any, count: int) -> TrajectoryBatch:
    """A rollout of one chunk in each of `count` envs, of which the last is no decision."""
    output = policy.act(policy.preprocess(observation(count)), "train", torch.Generator().manual_seed(0))
    valid = torch.ones(1, count, dtype=torch.bool)
    valid[0, -1] = False
    none, flag = torch.zeros(1, count, dtype=torch.int64), torch.zeros(1, count, dtype=torch.bool)
    columns: dict[str, Any] = {
        "task_index": none,
        "actions": output.actions[None],
        "logprobs": output.logprobs[None],
        "counted": output.counted[None],
        "invalid_actions": output.invalid[None],
        "rewards": torch.zeros(1, count, C),
        "success": torch.zeros(1, count, C, dtype=torch.bool),
        "terminated": flag,
        "truncated": flag,
        "steps": none + 2,
        "valid": valid,
        "episode": none,
        "group": none,
        "version": none,
    }
    return TrajectoryBatch(columns, ["push"])


def test_tokens_of_a_chunk_count_if_anything_of_it_is_executed() -> None:
    policy = scratch()
    batch = batch_of(policy, 6)
    counts = chosen_in(batch)
    assert torch.equal(counts[0, :5], batch["counted"][0, :5]) and not counts[0, 5].any()
    tokens = logprobs_at_level(Level.token, batch["logprobs"], counts)
    assert torch.equal(tokens[0, :5].squeeze(-1), batch["logprobs"][0, :5])
    chunks = logprobs_at_level(Level.chunk, batch["logprobs"], counts)
    close(chunks[0, :5], batch["logprobs"][0, :5].sum(1), 1e-4)
    assert torch.equal(valid_at(Level.token, counts, 1).squeeze(-1), counts)
    assert valid_at(Level.chunk, counts, 1)[0].tolist() == [True] * 5 + [False]
    share = rollout_metrics([Rollout(batch=batch, finished=[], env_steps=10)])["env/invalid_actions"]
    assert share == pytest.approx(float(batch["invalid_actions"][0, :5].float().mean()))


def test_long_answers_count_for_more_in_lerobot_s_mean_alone() -> None:
    wanted = torch.zeros(3, C, D)
    wanted[1:] = torch.rand(2, C, D, generator=torch.Generator().manual_seed(0))
    for mean in LossMean:
        policy = scratch(loss_mean=mean)
        inputs = policy.preprocess(observation(3))
        sizes = policy.sample_sizes(inputs, wanted)
        if mean is LossMean.samples:
            assert sizes is None
            continue
        tokens, there = policy.answers(inputs, wanted)
        assert sizes.tolist() == there.sum(1).tolist() and sizes[0] < sizes[1]
        weighted = policy.sft_loss(inputs | {SAMPLE_WEIGHTS: sizes / sizes.mean()}, wanted, {})
        _, hidden = policy.predicting(inputs, policy.begin, tokens)
        logits = policy.network.logits(hidden)
        close(weighted, torch.nn.functional.cross_entropy(logits[there], tokens[there]))
        assert float((weighted - policy.sft_loss(inputs, wanted, {})).detach().abs()) > 1e-4


def test_chunks_shorter_than_an_answer_are_not_learned(folder: Path) -> None:
    policy = load(folder, chunk_size=2)
    inputs = policy.preprocess(observation(3))
    assert policy.act(inputs, "eval").actions.shape == (3, 2, D)
    with pytest.raises(PolicyError, match="have 2 actions, an answer of the model is a whole chunk of 4"):
        policy.sft_loss(inputs, torch.zeros(3, 2, D), {})


def test_actions_relative_to_the_state_are_learned_as_they_are_executed() -> None:
    policy = scratch(relative_action_dims=3)
    inputs = policy.preprocess(observation(3))
    chunks = 0.5 * torch.rand(3, C, D, generator=torch.Generator().manual_seed(0))
    actions = policy.finish(chunks, inputs)
    inside = (actions.abs() < 0.99).all(1, keepdim=True)
    tokens, _ = policy.answers(inputs, actions)
    again = policy.finish(policy.decode(tokens[:, len(policy.vocabulary.prefix) :])[0], inputs)
    assert float(((again - actions) * inside)[..., :3].abs().max()) < 0.15


def test_adapters_go_to_the_language_model_and_the_critic_learns_in_full() -> None:
    policy = scratch()
    add_adapters(policy, LoraConfig(rank=2), seed=1)
    learning = {name for name, each in policy.named_parameters() if each.requires_grad}
    adapters = {name for name in learning if "lora_" in name}
    assert adapters and all(name.startswith("network.") and ".language." in name for name in adapters)
    assert {name.split(".")[0] for name in learning - adapters} == {"value_head"}


def test_a_vision_tower_that_is_frozen_learns_nothing() -> None:
    policy = scratch(freeze_vision=True)
    still = {name for name, each in policy.named_parameters() if not each.requires_grad}
    assert still and all(name.startswith("network.vision.") for name in still)


# ---- files


def test_openpi_s_convention_is_that_of_weights_without_lerobot_s_prefix(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    assert load(folder).config.convention is Convention.lerobot
    save_file({name.removeprefix("model."): each for name, each in load_file(path).items()}, path, {"format": "pt"})
    policy = load(folder)
    assert policy.config.convention is Convention.openpi and policy.config.loss_mean is LossMean.samples
    assert not len(policy.begin) and load(folder, convention="lerobot").config.loss_mean is LossMean.tokens
    again = folder.parent / "again"
    again.mkdir()
    policy.save(again, policy.config)
    assert (again / "model.safetensors").read_bytes() == path.read_bytes()
    assert load(again, convention=None).config.convention is Convention.openpi


def test_a_tokenizer_from_elsewhere_is_saved_with_the_policy(folder: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.move(folder / "fast", tmp_path / "elsewhere"))
    with pytest.raises(PolicyError, match="no FAST tokenizer"):
        load(folder)
    policy = load(folder, action_tokenizer=str(elsewhere))
    again = tmp_path / "again"
    again.mkdir()
    policy.save(again, policy.config)
    assert (again / "fast" / PROCESSOR).read_bytes() == (elsewhere / PROCESSOR).read_bytes()
    shutil.rmtree(elsewhere)  # as on another machine
    alone = from_own_folder(policy.config, again)
    assert build_policy(alone, SPEC, chunk_size=C, seed=1).codes.fast.size == policy.codes.fast.size


# ---- bad input


def faults(folder: Path, *settings: str) -> str:
    """What is said about a config of this checkpoint."""
    robot = ["env.tasks=[EmbodyrlArm-v0]", "env.kwargs={states: 5, actions: 4}", "env.success_return=null"]
    model = ["model=pi0_fast", f"model.checkpoint={folder}", "model.cameras=[render,absent]"]
    given = ["env=gym/pendulum_rgb", *robot, *model, "rollout.chunk_size=4"]
    try:
        load_config("gym_cartpole", [*given, *settings])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_config_that_fits_has_no_fault_and_notes_say_how_it_is_read(folder: Path) -> None:
    assert faults(folder) == ""
    robot = ["env.tasks=[EmbodyrlArm-v0]", "env.kwargs={states: 5, actions: 4}", "env.success_return=null"]
    model = ["model=pi0_fast", f"model.checkpoint={folder}", "model.cameras=[render,absent]", "model.decoding=all"]
    config = load_config("gym_cartpole", ["env=gym/pendulum_rgb", *robot, *model, "rollout.chunk_size=4"]).config
    notes = " ".join(checkpoint_notes(config))
    assert "tokens are in LeRobot's order (by the layout of the weights; model.convention changes it)" in notes
    assert "normalised by quantile" in notes and "among the whole vocabulary" in notes


SETTINGS: dict[str, tuple[list[str], str]] = {
    "longer than the horizon": (["rollout.chunk_size=5"], "rollout.chunk_size = 5, but the checkpoint gives 4 actions"),
    "log-probs of actions": (
        ["algorithm.logprob_level=action"],
        "algorithm.logprob_level is 'action', but the tokens of model 'pi0_fast' belong to whole chunks - set "
        "algorithm.logprob_level to chunk or token",
    ),
    "no folder": (["model.action_tokenizer=nowhere"], "'nowhere' has no tokenizer.json and no processor_config.json"),
    "cameras": (["model.cameras=[]"], "the checkpoint expects 2 images (front, hand), named: 1 (render)"),
    "state": (["model.state=token"], "model.state = token, which model 'pi0_fast' has no place for"),
    "prompt": (["model.prompt_length=2"], "tokens, the model takes 2: set model.prompt_length to"),
    "data set": (["model.unnorm_key=opnpi"], "has no statistics of unnorm_key = 'opnpi'"),
    "other model": (["model=pi0"], "config.json is that of a 'pi0_fast' model: set model.name to that one"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_do_not_fit_are_named(folder: Path, settings: list[str], message: str) -> None:
    assert message in faults(folder, *settings)


def change_fast(**changes: Any) -> Callable[[Path], object]:
    """A change of processor_config.json; None removes an entry."""

    def change(folder: Path) -> None:
        def rewritten(content: dict[str, Any]) -> None:
            content.update(changes)
            for name in [name for name, value in changes.items() if value is None]:
                del content[name]

        rewrite(folder / "fast" / PROCESSOR, rewritten)

    return change


def change_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder / "config.json", lambda content: content.update(changes))


def other_tokenizer(folder: Path) -> None:
    rewrite(folder / "fast" / "tokenizer.json", lambda content: content.update(decoder={"type": "Fuse"}))


def other_weights(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: torch.zeros(2) for name in names}, folder / "model.safetensors")

    return change


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "abandoned": (
        change_config(type="pi0fast"),
        "type is 'pi0fast', a layout that LeRobot has abandoned: its weights have other names and its prompts another "
        "form - take a checkpoint of type 'pi0_fast', such as lerobot/pi0fast-base",
    ),
    "pi0's": (change_config(type="pi0"), "config.json is that of a 'pi0' model: set model.name to that one"),
    "with an expert": (
        other_weights("model.paligemma_with_expert.gemma_expert.model.norm.weight"),
        "the weights in model.checkpoint have an action expert, so they are not those of pi0-FAST",
    ),
    "without scale": (change_fast(scale=None), f"{PROCESSOR} lacks scale"),
    "scale of nothing": (change_fast(scale=0), f"{PROCESSOR}: scale is 0, a number above 0"),
    "scale of text": (change_fast(scale="10"), f"{PROCESSOR}: scale is '10', a number above 0"),
    "huge ends": (change_fast(min_token=-(10**9)), f"{PROCESSOR}: min_token is -1000000000, a whole number from"),
    "another vocabulary": (
        change_fast(vocab_size=2048),
        "has 131 codes, its processor_config.json says vocab_size = 2048",
    ),
    "no bytes": (other_tokenizer, "has the decoder 'Fuse', FAST's is a byte-level BPE (ByteLevel)"),
    "no tokenizer": (
        lambda folder: shutil.rmtree(folder / "fast"),
        "no FAST tokenizer (config.json: action_tokenizer_name",
    ),
    "half a tokenizer": (
        lambda folder: (folder / "fast" / PROCESSOR).unlink(),
        f"the action tokenizer has no {PROCESSOR}",
    ),
    "garbage": (
        lambda folder: (folder / "fast" / "tokenizer.json").write_text("{"),
        "the action tokenizer's tokenizer.json cannot be read",
    ),
    "tokens outside": (
        change_config(fast_skip_tokens=600),
        "131 codes of the action tokenizer and 600 ids behind them (fast_skip_tokens) do not fit into the",
    ),
    "a small network": (
        lambda folder: rewrite(
            folder / "config.json", lambda content: content["vlm_config"]["text_config"].update(vocab_size=99)
        ),
        "tokens, the network 99 - set model.tokenizer to the one that the weights were trained with",
    ),
    "no statistics": (lambda folder: (folder / "norm_stats.json").unlink(), "the checkpoint has no statistics"),
    "no tokenizer of texts": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json or"),
    "a negative horizon": (change_config(chunk_size=-1), "chunk_size is -1, a whole number from 1 on was expected"),
    "other sizes": (
        lambda folder: rewrite(
            folder / "config.json", lambda content: content["vlm_config"]["text_config"].update(rope_theta=5000)
        ),
        "rope_theta is 5000, which is not implemented",
    ),
    "a folder outside": (change_config(action_tokenizer_name="../fast"), ""),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_checkpoint_is_named_before_anything_starts(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder)
    found = faults(folder)
    assert message in found if message else found == ""


def test_a_tokenizer_outside_of_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "fast", tmp_path / "fast")
    for name in ("../fast", str(tmp_path / "fast")):
        change_config(action_tokenizer_name=name)(folder)
        assert "no FAST tokenizer" in faults(folder), name


def test_demonstrated_chunks_must_be_whole(folder: Path) -> None:
    found = faults(folder, "algorithm=sft", "data.path=nowhere", "rollout.chunk_size=3")
    assert "rollout.chunk_size = 3, but an answer of the checkpoint is a chunk of 4 actions" in found
    assert "an answer of the checkpoint" not in faults(folder, "algorithm=sft", "data.path=nowhere")


def test_sizes_of_random_weights_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"model.scratch.hidden_size = 30 cannot be split among 4 heads"):
        load_config("gym_cartpole", ["env=gym/pendulum_rgb", "model=pi0_fast", "model.scratch.hidden_size=30"])


# ---- plans


def test_a_plan_is_made_of_a_few_tokens_and_of_answers_that_nobody_has_written() -> None:
    from typer.testing import CliRunner

    from embodyrl.cli.main import app

    policy = scratch()
    inputs = policy.preprocess(observation(2))
    with policy.abridged():
        short = policy.act(inputs, "eval")
    whole = policy.act(inputs, "eval")
    assert short.logprobs.shape == whole.logprobs.shape and short.trace["tokens"].shape == whole.trace["tokens"].shape
    assert torch.equal(short.trace["tokens"][:, :3], whole.trace["tokens"][:, :3])
    words = ["plan", "tiny_pi0_fast_sft", "--elsewhere", "model.statistics=null", "model.scratch.layers=1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "weights" in done.output and "activations" in done.output
