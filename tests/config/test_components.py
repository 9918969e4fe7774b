"""Sections that choose a component and hold its options alone: losses, advantages, rewards, filters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import programs
import pytest

from embodyrl.config import ConfigUse, load_config, renames, to_commented_yaml, to_plain
from embodyrl.config.build import differences

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
