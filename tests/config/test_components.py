"""Sections that choose a component and hold its options alone: losses, advantages, rewards, filters."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import programs
import pytest

from embodyrl.config import ConfigUse, load_config, renames, to_commented_yaml, to_plain
from embodyrl.config.build import differences
from embodyrl.registry import LOSSES

PPO = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\n"
OLD = Path(__file__).parent / "saved_by_an_earlier_version.yaml"

PLUGIN = '''
from dataclasses import dataclass

import embodyrl.algorithms.losses as losses
from embodyrl.config.schema import LossConfig, RewardConfig, setting
from embodyrl.registry import LOSSES, REWARDS


@dataclass(frozen=True, kw_only=True)
class TemperedConfig(LossConfig):
    """PPO with a temperature."""

    temperature: float = setting(1.0, above=0.0)
    """Log-ratios are divided by it."""


def tempered(*, logprobs, old_logprobs, advantages, temperature, clip_low=0.2):
    ratio = ((logprobs - old_logprobs) / temperature).exp()
    return losses.clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=0.2, dual_clip=None)


def scaled(*, rewards, scale=0.01):
    return rewards * scale


LOSSES.register("tempered", target=tempered, options=TemperedConfig, whole=False, summary="tempered PPO")
REWARDS.register("scaled", target=scaled, whole=False, summary="a hundredth")
'''


def loss_of(workplace, text: str, *overrides: str) -> dict[str, object]:
    return dataclasses.asdict(workplace.load(PPO + text, *overrides).algorithm.loss)


GSPO = {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("algorithm: {loss: gspo}\n", [], GSPO),
        ("algorithm: {loss: {name: gspo}}\n", [], GSPO),
        ("algorithm: {loss: {name: ppo, clip_low: 0.1}}\n", ["algorithm.loss=gspo"], GSPO),
        ("algorithm: {loss: {clip_low: 0.1}}\n", ["algorithm.loss.name=gspo"], GSPO),
        (
            "algorithm: {loss: {clip_low: 0.1}}\n",
            ["algorithm.loss={name: gspo, clip_high: 0.3}"],
            GSPO | {"clip_high": 0.3},
        ),
        # options on the command line are those of what it chooses, in whatever order they stand
        ("", ["algorithm.loss.clip_low=0.1", "algorithm.loss=gspo"], GSPO | {"clip_low": 0.1}),
        ("", ["algorithm.loss.clip_low=0.1", "algorithm.loss.name=gspo"], GSPO | {"clip_low": 0.1}),
        # the same component keeps what it has, unless its name alone is written
        (
            "algorithm: {loss: {name: ppo, clip_low: 0.1}}\n",
            ["algorithm.loss.name=ppo"],
            {"name": "ppo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": None},
        ),
        (
            "algorithm: {loss: {name: ppo, clip_low: 0.1}}\n",
            ["algorithm.loss=ppo"],
            {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        ),
        (
            "algorithm: {loss: {clip_low: '${algorithm.loss.clip_high}'}}\n",
            ["algorithm.loss.clip_high=0.3"],
            {"name": "ppo", "clip_low": 0.3, "clip_high": 0.3, "dual_clip": None},
        ),
    ],
)
def test_another_name_begins_the_section_anew(workplace, text, overrides, expected):
    whole = "rollout: {episodes: whole, num_chunks: 100}\nenv: {max_episode_steps: 100}\n"
    assert loss_of(workplace, text + whole, *overrides) == expected


def test_the_options_of_a_group_file_do_not_pass_to_another_component(workplace):
    text = (
        "defaults: [env: metaworld/reach, model: mlp, algorithm: gspo, _self_]\n"
        "rollout: {episodes: whole, num_chunks: 100, group_size: 4}\nenv: {max_episode_steps: 100}\n"
    )
    assert workplace.load(text).algorithm.loss.clip_low == 0.02
    assert workplace.load(text, "algorithm.loss=ppo").algorithm.loss.clip_low == 0.2
    assert workplace.load(text + "algorithm: {loss: ppo}\n").algorithm.loss.clip_low == 0.2
    assert workplace.load(text + "algorithm: {loss: {clip_high: 0.04}}\n").algorithm.loss.clip_low == 0.02


def test_a_group_file_of_ones_own_may_be_such_a_section(workplace):
    workplace.write("clip_low: 0.1\nname: cpgd\n", "algorithm/loss/mine.yaml")
    text = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, algorithm/loss: mine, _self_]\n"
    loss = workplace.load(text).algorithm.loss
    assert (loss.name, loss.clip_low, loss.drift_coef) == ("cpgd", 0.1, 1.0e-3)


def test_a_component_shows_its_own_options_and_no_others(workplace):
    text = to_commented_yaml(workplace.load(PPO))
    section = text[text.index("  loss:\n") : text.index("  logprob_level:")]
    assert "clip_high: 0.2" in section and "# Smallest probability ratio" in section
    assert (
        "drift_coef" not in text
        and "steepness" not in text
        and "accuracy_low" not in text
        and "eps: 1.0e-6" not in text
    )
    workplace.write(text, "shown.yaml")
    assert load_config("shown.yaml").config == load_config("my.yaml").config


def test_options_of_a_plugin_are_part_of_the_schema(workplace):
    workplace.write(PLUGIN, "tempering.py")
    text = f"{PPO}plugins: [tempering]\nalgorithm:\n  loss: {{name: tempered, temperature: 2.0}}\n  reward: scaled\n"
    config = workplace.load(text)
    assert type(config.algorithm.loss).__name__ == "TemperedConfig" and config.algorithm.loss.temperature == 2.0
    assert "# Log-ratios are divided by it." in to_commented_yaml(config)
    assert workplace.faults(text, "algorithm.loss.temperature=0", "algorithm.loss.temprature=1") == [
        "command line: unknown key 'algorithm.loss.temprature' - did you mean 'algorithm.loss.temperature'?",
        "command line: algorithm.loss.temperature = 0 is too small - use a value above 0",
    ]


def test_options_must_be_derived_from_those_of_their_kind(workplace):
    workplace.write(PLUGIN.replace("options=TemperedConfig", "options=RewardConfig"), "tempering_wrongly.py")
    [fault] = workplace.faults(f"{PPO}plugins: [tempering_wrongly]\nalgorithm: {{loss: tempered}}\n")
    assert "the options of loss 'tempered' (RewardConfig) are no subclass of embodyrl.config.schema.LossConfig" in fault


def test_who_names_what_is_made_for_others_is_told_how_to_get_it(workplace):
    workplace.write(
        PLUGIN.replace("*, rewards, scale=0.01", "*, rewards, embeddings, images, scale=0.01"), "embedded.py"
    )
    faults = workplace.faults(f"{PPO}plugins: [embedded]\nalgorithm: {{reward: scaled}}\n")
    where = "my.yaml:3:21: reward 'scaled' names "
    assert faults == [
        f"{where}'embeddings', but its options do not say how episodes are encoded - derive them from "
        "embodyrl.algorithms.options.EncodingRewardConfig",
        f"{where}'images', but there are no images - name some in env.cameras",
    ]


def test_an_advantage_of_actions_gets_none_of_what_decisions_have(workplace):
    workplace.write(
        "from embodyrl.registry import ADVANTAGES\n"
        "def hopeful(*, rewards, values, terminated): return rewards, rewards\n"
        "ADVANTAGES.register('hopeful', target=hopeful, critic=True, whole=False, actions=True, summary='hope')\n",
        "hoping.py",
    )
    text = f"{PPO}plugins: [hoping]\nalgorithm: {{advantage: hopeful, logprob_level: action}}\n"
    workplace.load(text)
    sentence = (
        "my.yaml:3:24: advantage 'hopeful' names {!r}, but actions have none (algorithm.reward_level is 'action')"
    )
    assert workplace.faults(text, "algorithm.reward_level=action") == [
        f"{sentence.format(name)} - set algorithm.reward_level to chunk" for name in ("values", "terminated")
    ]


def test_a_component_that_cannot_be_imported_is_found_before_the_run(workplace):
    workplace.write("import no_such_module_abc\n", "late_module.py")
    workplace.write(
        "from embodyrl.registry import REWARDS\n"
        "REWARDS.register('late', target='late_module:late', whole=False, summary='late')\n",
        "late.py",
    )
    [fault] = workplace.faults(f"{PPO}plugins: [late]\nalgorithm: {{reward: late}}\n")
    assert fault.startswith(
        "my.yaml:3:21: reward 'late' cannot be loaded: ModuleNotFoundError: No module named 'no_such"
    )


def test_the_program_says_how_a_setting_is_called_now(workplace):
    done = programs.run(["-m", "embodyrl", "validate", "metaworld_reach", "algorithm.clip_low=0.1"])
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "command line: unknown key 'algorithm.clip_low' - renamed to 'algorithm.loss.clip_low'"
    )


def saved_in(workplace, text: str):
    """What an earlier version wrote into the folder of a run, as it is read now."""
    workplace.write('{"source": "my.yaml", "plugin_dir": "/nowhere"}', "run/origin.json")
    return load_config(workplace.write(text, "run/config.yaml"), use=ConfigUse.show).config


def test_a_config_that_an_earlier_version_saved_is_read_as_it_was_meant(workplace):
    old = saved_in(workplace, OLD.read_text())
    asked = [
        *("run.eval_every=0", "run.save_every=0", "eval.episodes=2", "engine.device=cpu", "run.iterations=3"),
        *("env.num_envs=16", "algorithm.reward=dense", "algorithm.filter.metric=total_reward", "run.dir=runs/old"),
        "engine.gradient_checkpointing=false",
    ]
    now = load_config("metaworld_reach_dapo", asked, use=ConfigUse.show).config
    assert to_plain(old)["algorithm"] == to_plain(now)["algorithm"]
    assert old.algorithm.max_collections == 10 and old.algorithm.loss.clip_high == 0.28
    assert not differences(old, now)


def test_what_a_saved_config_says_of_components_that_it_did_not_use_goes(workplace):
    text = OLD.read_text().replace("loss: ppo", "loss: cpgd").replace("drift_coef: 0.001", "drift_coef: 0.5")
    config = saved_in(workplace, text)
    assert dataclasses.asdict(config.algorithm.loss) == {
        "name": "cpgd",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "drift_coef": 0.5,
    }
    assert saved_in(workplace, to_commented_yaml(config)) == config


def test_an_old_config_that_is_run_anew_lists_what_to_change(workplace):
    faults = workplace.faults(OLD.read_text())
    assert "my.yaml:56:13: unknown key 'algorithm.clip_low' - renamed to 'algorithm.loss.clip_low'" in [
        fault.replace(fault.split(" ")[0], "my.yaml:56:13:") for fault in faults
    ]
    assert all("renamed to" in fault or "no such option" in fault for fault in faults)


@pytest.fixture
def renamed(monkeypatch):
    """Tables with names that earlier versions might have had."""
    table = {
        "eval.first": "eval.start",
        "eval.start": "eval.first_start_state",
        "rollout.turns": "rollout.num_chunks",
        "env.sentences": "env.task_descriptions",
        "engine.shards.ranks": "engine.parallel.world_size",
        "model.width": "model.hidden_sizes",
    }
    monkeypatch.setattr(renames, "SETTINGS", {**renames.SETTINGS, **table})
    monkeypatch.setattr(renames, "METRICS", {"train/rounds": "train/epochs", "time/phase/": "time/part/"})


def test_a_row_of_the_table_is_all_that_a_renaming_takes(workplace, renamed):
    """Who writes the old key is told the new one, in a file and on the command line, also of a section that is gone."""
    text = f"{PPO}eval: {{start: 7}}\nengine: {{shards: {{ranks: 1}}}}\n"
    assert sorted(workplace.faults(text, "rollout.turns=8", "eval.first=1")) == [
        "command line: unknown key 'eval.first' - renamed to 'eval.first_start_state'",
        "command line: unknown key 'rollout.turns' - renamed to 'rollout.num_chunks'",
        "my.yaml:2:8: unknown key 'eval.start' - renamed to 'eval.first_start_state'",
        "my.yaml:3:19: unknown key 'engine.shards.ranks' - renamed to 'engine.parallel.world_size'",
    ]


def test_a_saved_config_with_old_keys_is_read_by_the_table(workplace, renamed):
    now = load_config(
        "metaworld_reach", ["eval.first_start_state=77777", "env.task_descriptions={reach-v3: go}"], use=ConfigUse.show
    ).config
    text = to_commented_yaml(now)
    assert saved_in(workplace, text) == now
    names = {"first_start_state: 77777": "first: 77777", "num_chunks:": "turns:", "task_descriptions:": "sentences:"}
    for new, old in {**names, "hidden_sizes:": "width:"}.items():
        assert text.count(f"\n  {new}") == 1
        text = text.replace(f"\n  {new}", f"\n  {old}")
    lines = [line for line in text.splitlines() if not line.startswith("    world_size:")]
    lines.insert(lines.index("engine:") + 1, f"  shards: {{ranks: {now.engine.parallel.world_size}}}")
    assert saved_in(workplace, "\n".join(lines)) == now


def test_options_of_a_saved_policy_and_metrics_are_read_by_the_tables(renamed):
    mlp = type(load_config("metaworld_reach", use=ConfigUse.show).config.model)
    found = renames.convert_options({"name": "mlp", "width": [8]}, "model", mlp)
    assert found == {"name": "mlp", "hidden_sizes": [8]}
    assert renames.newest_metric("train/rounds") == "train/epochs" and renames.newest_metric("loss") == "loss"
    assert renames.newest_metric("time/phase/x") == "time/part/x"


OPTIONS = """
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np

from embodyrl.algorithms.losses import LossOutput
from embodyrl.config.schema import LossConfig, RewardConfig, setting
from embodyrl.registry import LOSSES


class Mode(StrEnum):
    HARD = "hard"
    SOFT = "soft"


class Number(Enum):
    one = 1
    two = 2


@dataclass
class Thawed:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class MyConfig(LossConfig):
    OPTION


def mine(*, logprobs, option):
    return LossOutput(losses=logprobs)


LOSSES.register("mine", target=mine, options=MyConfig, whole=False, summary="mine")
"""
NUMBERS = itertools.count()
EACH = (
    'declare it as bool, int, float, str, a StrEnum, Literal["a", "b"], a frozen dataclass, or list[...] or '
    "dict[str, ...] of one of these; each also with `| None`"
)


def with_plugin(workplace, module: str) -> str:
    """Write a plug-in under a name that no other test has imported; returns a config that chooses its loss."""
    name = f"module_{next(NUMBERS)}"
    workplace.write(module, f"{name}.py")
    return f"{PPO}plugins: [{name}]\nalgorithm: {{loss: mine}}\n"


@pytest.mark.parametrize(
    ("option", "kind", "remedy"),
    [
        ("option: dict = setting({})", "dict", f"write `option: dict[str, float]`, or {EACH}"),
        (
            "option: Mapping[str, int] = setting({})",
            "Mapping[str, int]",
            f"write `option: dict[str, float]`, or {EACH}",
        ),
        ("option: dict[int, str] = setting({})", "dict[int, str]", f"write `option: dict[str, float]`, or {EACH}"),
        ("option: list = setting([])", "list", f"write `option: list[float]`, or {EACH}"),
        ("option: list[list[int]] = setting([])", "list[list[int]]", f"write `option: list[float]`, or {EACH}"),
        ("option: tuple[int, int] = setting((1, 2))", "tuple[int, int]", f"write `option: list[float]`, or {EACH}"),
        ("option: np.float32 = setting(1.0)", "np.float32", f"write `option: float`, or {EACH}"),
        ("option: np.int64 | None = setting(None)", "np.int64 | None", f"write `option: int`, or {EACH}"),
        ("option: np.ndarray = setting()", "np.ndarray", f"write `option: list[float]`, or {EACH}"),
        ("option: Any = setting(1)", "Any", EACH),
        ("option: object = setting(1)", "object", EACH),
        ("option: None = setting(None)", "None", EACH),
        ("option: bool | float = setting(1.0)", "bool | float", EACH),
        ("option: Literal[1, 2] = setting(1)", "Literal[1, 2]", EACH),
        ("option: Thawed = field(default_factory=Thawed)", "Thawed", EACH),
        (
            "option: int | str = setting('auto')",
            "int | str",
            'name the legal texts, as in `setting(1, words=("auto",))`',
        ),
    ],
)
def test_an_option_of_a_type_that_no_yaml_can_give_is_refused(workplace, option, kind, remedy):
    fault = refused(workplace, option)
    assert fault == f"option 'option' of MyConfig has the type {kind}, which no option can have - {remedy}"


def refused(workplace, option):
    """What is said of an option, without the line of the plug-in, which is checked."""
    text = with_plugin(workplace, OPTIONS.replace("OPTION", option))
    [fault] = workplace.faults(text)
    [module] = workplace.folder.glob("module_*.py")
    found = re.fullmatch(r"my\.yaml:3:19: (.*) \((.+):(\d+)\)( - .*)", fault)
    assert found is not None, fault
    what, place, line, remedy = found.groups()
    assert (workplace.folder / place).samefile(module)
    assert module.read_text().splitlines()[int(line) - 1].strip() in (option, "@dataclass(frozen=True, kw_only=True)")
    return what + remedy


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "option = 0.2",
            "'option' of MyConfig has no type, so that it is no option - write `option: float = setting(0.2)`",
        ),
        (
            "option: float = setting(0.0, above=0.0)",
            "the default of option 'option' of MyConfig = 0.0 is too small - use a value above 0",
        ),
        (
            "option: float = setting(0.5, low=1.0, high=0.0)",
            "option 'option' of MyConfig has low=1 above high=0, so that no value is legal - write low=0, high=1",
        ),
        (
            "option: float = setting(None)",
            "the default of option 'option' of MyConfig is None - write `option: float | None`",
        ),
        (
            "option: list[float] = setting([1.0, 'a'])",
            "the default of option 'option' of MyConfig must be a number, got the text \"a\" - write a number",
        ),
        (
            "option: list[float] = setting((1.0, 2.0))",
            "the default of option 'option' of MyConfig = (1.0, 2.0) is no list - write setting([...])",
        ),
        (
            "option: Mode = setting('hard')",
            "the default of option 'option' of MyConfig = 'hard' is no Mode - write one of Mode.HARD, Mode.SOFT",
        ),
        (
            "option: Undefined = setting(1)",
            "the annotations of MyConfig cannot be read: NameError: name 'Undefined' is not defined - import types of "
            "options where the class is, not under TYPE_CHECKING",
        ),
    ],
)
def test_an_option_that_can_never_be_right_is_refused(workplace, option, message):
    assert refused(workplace, option) == message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "option: list[int] = []",
            "ValueError: mutable default <class 'list'> for field option is not allowed: use default_factory "
            "({place}:36) - write setting(...) around the default, which copies lists and maps for every instance",
        ),
        (
            "option = setting(1)",
            "TypeError: 'option' is a field but has no type annotation ({place}:36) - write its type, as in "
            "`width: float = setting(0.2)`",
        ),
    ],
)
def test_what_python_itself_refuses_comes_with_the_line_of_the_plugin(workplace, option, message):
    text = with_plugin(workplace, OPTIONS.replace("OPTION", option))
    [module] = workplace.folder.glob("module_*.py")
    assert workplace.faults(text) == [
        f"my.yaml:2:11: plug-in {module.stem!r} failed while it was imported: {message.format(place=module)}"
    ]


def test_a_decorator_that_is_not_that_of_options_is_answered_with_the_right_one(workplace):
    right = "@dataclass(frozen=True, kw_only=True)\nclass MyConfig"
    text = OPTIONS.replace("OPTION", "option: int = setting(1)")
    [fault] = workplace.faults(with_plugin(workplace, text.replace(right, "@dataclass(kw_only=True)\nclass MyConfig")))
    assert "TypeError: cannot inherit non-frozen dataclass from a frozen one" in fault
    assert fault.endswith(" - write @dataclass(frozen=True, kw_only=True) above the class")
    [fault] = workplace.faults(with_plugin(workplace, text.replace(right, "class MyConfig")))
    assert fault.startswith("my.yaml:3:19: MyConfig is no dataclass, so that what it declares is no option (")
    assert fault.endswith(") - write @dataclass(frozen=True, kw_only=True) above it")


CHOICES = """
    option: Literal["plain", "squared"] = setting("plain")
    mode: Mode | None = setting(Mode.HARD)
    number: Number = setting(Number.one)
    several: list[Literal["a", "b"]] = setting(["a"])
    by_key: dict[str, Mode] = setting({})
    pause: float | str = setting("never", words=("never",))
    part: Part = field(default_factory=Part)
    given: Literal["x", "y"] = setting()
"""


def test_options_with_choices_are_read_printed_and_answered_with_near_matches(workplace):
    names = "mode, number, several, by_key, pause, part, given"
    module = OPTIONS.replace("OPTION", CHOICES.strip()).replace("logprobs, option", f"logprobs, option, {names}")
    bare = with_plugin(workplace, module)
    text = bare.replace("loss: mine", "loss: {name: mine, mode: soft, by_key: {k: hard}, several: [b, a], given: y}")
    config = workplace.load(text)
    loss = config.algorithm.loss
    assert (loss.option, loss.mode.name, loss.number.value, loss.several) == ("plain", "SOFT", 1, ["b", "a"])
    assert loss.by_key == {"k": "hard"} and loss.given == "y"
    printed = to_commented_yaml(config)
    assert "# [one of plain, squared]\n    option: plain\n    # [one of hard, soft]\n    mode: soft\n" in printed
    assert "# [one of one, two]\n    number: one\n" in printed
    workplace.write(printed, "printed.yaml")
    assert load_config("printed.yaml").config == config
    # the name of a member is read as well, as it was written by earlier versions
    assert workplace.load(text, "algorithm.loss.mode=HARD").algorithm.loss.mode.value == "hard"
    asked = ["option=squard", "mode=SOFTT", "number=2", "several=[a,c]", "pause=nevr", "given=1"]
    assert workplace.faults(text, *(f"algorithm.loss.{each}" for each in asked)) == [
        "command line: algorithm.loss.option must be one of plain, squared; got \"squard\" - did you mean 'squared'?",
        "command line: algorithm.loss.mode must be one of hard, soft; got \"SOFTT\" - did you mean 'soft'?",
        "command line: algorithm.loss.number must be one of one, two; got 2 - choose one of them",
        'command line: algorithm.loss.several[1] must be one of a, b; got "c" - choose one of them',
        "command line: algorithm.loss.pause must be a number or 'never', got \"nevr\" - did you mean 'never'?",
        "command line: algorithm.loss.given must be one of x, y; got 1 - choose one of them",
    ]
    assert workplace.faults(bare)[0].startswith("my.yaml:3:13: algorithm.loss.given is missing")


NEWCOMER = """
from dataclasses import dataclass

from torch import Tensor

from embodyrl.algorithms.losses import LossOutput
from embodyrl.config.schema import LossConfig, setting
from embodyrl.registry import LOSSES


@dataclass(frozen=True, kw_only=True)
class MyConfig(LossConfig):
    width: float = setting(0.2)
    \"\"\"Width of the trust region.\"\"\"


def mine(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, width: float) -> LossOutput:
    ratio = (logprobs - old_logprobs).exp()
    return LossOutput(losses=-advantages * ratio * width)


LOSSES.register("mine", target=mine, options=MyConfig, whole=False, summary="mine")
"""
LOSS_OF = "my.yaml:3:19: loss 'mine' "
GIVES = (
    "logprobs, old_logprobs, proximal_logprobs, reference_logprobs, advantages, valid, weights, executed, sequence, "
    "version, task_index, proprio, images, returns, old_values; options of its own: width"
)
WANTS_OUTPUT = "return LossOutput(losses=..., metrics={...}) of embodyrl.algorithms.losses"


@pytest.mark.parametrize(
    ("right", "wrong", "faults"),
    [
        (
            "old_logprobs: Tensor",
            "old_logprob: Tensor",
            [
                f"{LOSS_OF}names 'old_logprob', which is not there for it - did you mean 'old_logprobs'? (there are "
                f"{GIVES})"
            ],
        ),
        (
            "*, logprobs: Tensor, old_logprobs: Tensor",
            "logprobs: Tensor, /, old_logprobs: Tensor",
            [f"{LOSS_OF}takes 'logprobs' by its position, but is called by name - remove the `/` from its arguments"],
        ),
        (
            "width: float)",
            "**options: float)",
            [
                f"{LOSS_OF}takes **options, but gets only what it names - name each column and option that it needs",
                "my.yaml:3:19: loss 'mine' has an option 'width', which its function does not name - let the function "
                "name it, or remove the option",
            ],
        ),
        (
            "setting(0.2)",
            "setting()",
            [
                "my.yaml:3:13: algorithm.loss.width is missing - add `width: ...` to the section 'algorithm.loss' "
                "(Width of the trust region)"
            ],
        ),
        (
            "return LossOutput(losses=-advantages * ratio * width)",
            "return -advantages * ratio * width, {}",
            [f"{LOSS_OF}returns a tuple - {WANTS_OUTPUT}"],
        ),
        ("-> LossOutput", "-> Tensor", [f"{LOSS_OF}returns a Tensor - {WANTS_OUTPUT}"]),
        (
            "LOSSES.register(",
            "dict(name=",
            [
                f"{LOSS_OF}is not registered (registered: cpgd, decoupled_ppo, gspo, ppo) - if it is yours, one of the "
                "plug-ins must call LOSSES.register('mine', ...)"
            ],
        ),
    ],
)
def test_a_mistake_in_a_loss_of_ones_own_is_found_before_the_run(workplace, right, wrong, faults):
    workplace.load(with_plugin(workplace, NEWCOMER))
    assert NEWCOMER.count(right) == 1
    LOSSES._entries.pop("mine")
    assert workplace.faults(with_plugin(workplace, NEWCOMER.replace(right, wrong))) == faults


def test_only_what_a_function_itself_returns_counts(workplace):
    inner = "def pair(): return 1, 2\n    pairs = lambda: (1, 2)\n    ratio ="
    workplace.load(with_plugin(workplace, NEWCOMER.replace("ratio =", inner).replace(" -> LossOutput", "")))
