"""Rules between settings: none forbids what is legal; `test_broken.py` has files that break them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from embodyrl.config import ConfigError, ConfigUse, algorithm_rules, load_config
from embodyrl.config.rules import _multiples, divisors, public_checkpoints, weights_to_name
from embodyrl.pipelines import rules as _its_rules  # noqa: F401  (whose import adds them)
from embodyrl.registry import Requirement

PPO = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\n"
GRPO = (
    "defaults: [env: metaworld/reach, model: mlp, algorithm: grpo, _self_]\n"
    "env: {num_envs: 8, max_episode_steps: 50}\n"
    "rollout: {num_chunks: 50, episodes: whole, group_size: 4}\n"
)


@pytest.mark.parametrize(
    "text",
    [
        PPO + "tracking: {sinks: []}\n",
        PPO + "model: {hidden_sizes: []}\n",
        PPO + "env: {num_envs: 1, workers: 1}\nalgorithm: {minibatches: 1}\n",
        PPO + "env: {num_envs: 6, workers: 3}\nrollout: {num_chunks: 2}\nalgorithm: {minibatches: 12}\n",
        PPO + "env: {max_episode_steps: 32}\nrollout: {chunk_size: 32}\n",
        PPO + "env: {max_episode_steps: 10, num_envs: 4}\nrollout: {episodes: whole, num_chunks: 4, chunk_size: 3}\n",
        PPO + "env: {start_states: 100}\neval: {first_start_state: 100}\n",
        PPO + "env: {tasks: [reach-v3, push-v3]}\n",
        PPO + "algorithm: {bootstrap: none, value_coef: 0}\n",
        GRPO,
        GRPO.replace("group_size: 4", "group_size: 8"),
        GRPO + "algorithm: {gamma: 0.9, minibatches: 5}\n",
    ],
)
def test_what_is_legal_is_accepted(workplace, text):
    workplace.load(text)


def test_a_checkpoint_that_exists_is_accepted(workplace):
    (workplace.folder / "policy").mkdir()
    save_file({"actor.0.weight": np.zeros((128, 39), np.float32)}, workplace.folder / "policy" / "model.safetensors")
    assert workplace.load(PPO + "model: {checkpoint: policy}\n").model.checkpoint == "policy"
    workplace.write("", "policy.pt")
    [fault] = workplace.faults(PPO + "model: {checkpoint: policy.pt}\n")
    assert fault.startswith(
        "my.yaml:2:21: model.checkpoint = 'policy.pt' is a file - name the folder of a saved policy"
    )


def test_rules_stay_silent_about_settings_that_have_a_fault_already(workplace):
    faults = workplace.faults(PPO + "env: {num_envs: '9', workers: 2}\nrollout: {group_size: -1}\n")
    assert [fault.split(" ", 1)[1] for fault in faults] == [
        'env.num_envs must be a whole number, got the text "9" - remove the quotes',
        "rollout.group_size = -1 is too small - use a value of 1 or more",
    ]


def test_rules_speak_about_sound_settings_beside_faulty_ones(workplace):
    faults = workplace.faults(PPO + "sed: 3\nenv: {num_envs: 8, workers: 5, tasks: 7}\n")
    assert any("cannot be spread over env.workers = 5" in fault for fault in faults)
    assert len(faults) == 3


def test_a_rule_points_at_what_the_user_wrote(workplace):
    workplace.write("name: metaworld\ntasks: [reach-v3]\nnum_envs: 9\n", "env/nine.yaml")
    text = PPO.replace("metaworld/reach", "nine") + "algorithm: {minibatches: 1}\n"
    [in_file] = workplace.faults(
        text + "rollout:\n  group_size: 2\n  episodes: whole\n  num_chunks: 500\n",
        "algorithm.name=grpo",
        "algorithm.advantage=grpo",
        "algorithm.bootstrap=none",
        "algorithm.value_coef=0",
    )
    assert in_file.startswith("my.yaml:4:15: env.num_envs = 9 cannot be split into groups of rollout.group_size = 2")
    [on_command_line] = workplace.faults(text, "env.workers=2")
    assert on_command_line.startswith("command line: env.num_envs = 9 cannot be spread over env.workers = 2")


@pytest.mark.parametrize(("number", "of", "words"), [(9, 6, "6 or 12"), (2, 6, "6"), (13, 6, "12 or 18")])
def test_the_nearest_multiples(number, of, words):
    assert _multiples(number, of) == words


@pytest.mark.parametrize(
    ("number", "of", "words"), [(3, 8, "2 or 4"), (9, 8, "8"), (7, 40, "5 or 8"), (5, 7, "1 or 7")]
)
def test_the_nearestdivisors(number, of, words):
    assert divisors(number, of) == words


def test_a_checkpoint_may_be_left_open_until_the_config_runs() -> None:
    words = ["model.checkpoint=<weights>"]
    assert load_config("metaworld_reach", words).config.model.checkpoint == "<weights>"
    with pytest.raises(ConfigError, match="left open") as caught:
        load_config("metaworld_reach", words, use=ConfigUse.run)
    assert "name the weights of mlp for these tasks, model.checkpoint=DIR or hf://owner/name" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["libero_spatial_grpo_openvla_oft", "env=libero/goal"], ["Haozhan72/Openvla-oft-SFT-libero-goal-traj1"]),
        (
            ["libero_spatial_grpo_openvla_oft", "algorithm=sft", "model.action_head=l1", "data.path=x"],
            ["moojink/openvla-7b-oft-finetuned-libero-spatial"],
        ),
        (["libero_spatial_ppo_pi0", "env.tasks=[libero_spatial/0, libero_10/0]"], []),
        (
            ["libero_spatial_grpo_smolvla", "algorithm=sft", "data.path=x"],
            ["HuggingFaceVLA/smolvla_libero", "lerobot/smolvla_base"],
        ),
    ],
)
def test_weights_that_are_left_open_are_those_of_the_model_and_its_tasks(words: list[str], names: list[str]) -> None:
    config = load_config(words[0], words[1:], use=ConfigUse.show).config
    assert public_checkpoints(config) == [f"hf://{name}" for name in names]
    assert all(name in weights_to_name(config) for name in names)


def test_weights_that_are_not_there_are_answered_with_public_ones() -> None:
    with pytest.raises(ConfigError, match="or public weights: hf://RLinf/RLinf-Gr00t-SFT-Spatial"):
        load_config("libero_spatial_ppo_gr00t", ["model.checkpoint=nowhere"])


def test_adapters_without_the_package_that_makes_them(monkeypatch):
    missing = Requirement(module="no_such_package_xyz", install="pip install 'embodyrl[vla]'")
    monkeypatch.setattr(algorithm_rules, "PEFT", missing)
    with pytest.raises(ConfigError, match=r"needs package 'no_such_package_xyz'.*run: pip install 'embodyrl\[vla\]'"):
        load_config("experiment/tiny_oft_sft", ["engine.lora.rank=8"])


def test_what_is_missing_here_may_be_elsewhere(tmp_path: Path) -> None:
    words = [f"model.checkpoint={tmp_path / 'nowhere'}"]
    with pytest.raises(ConfigError, match="does not exist"):
        load_config("metaworld_reach", words)
    assert load_config("metaworld_reach", words, use=ConfigUse.elsewhere)


def test_ids_that_this_machine_lacks_are_left_to_the_run_where_it_runs_elsewhere() -> None:
    words = ["env.tasks=[ALE/Pong-v5]", "env.success_return=null", "env.max_episode_steps=100"]
    with pytest.raises(ConfigError, match=r"gymnasium has no task 'ALE/Pong-v5' - list the module .* under plugins:"):
        load_config("gym_pendulum", words)
    notes = load_config("gym_pendulum", words, use=ConfigUse.elsewhere).notes
    assert notes == ("unchecked until the run: gymnasium has no task 'ALE/Pong-v5'",)


def test_asynchronous_runs_without_lag_say_when_their_numbers_are_those_of_sync() -> None:
    words = ["rollout.mode=async", "rollout.max_staleness=0"]
    expected = {
        ("placement.rollout.workers=2",): ["To compare the two, set rollout.blocks=2 in both"],
        ("placement.rollout.workers=2", "rollout.blocks=2"): [],
        ("placement.rollout.workers=1",): [],
        ("placement.rollout.workers=2", "rollout.max_staleness=1"): [],
        ("placement.rollout.workers=2", "engine.parallel.world_size=2"): [],
    }
    found = {
        more: [note.rpartition(". ")[2] for note in load_config("gym_pendulum", [*words, *more]).notes]
        for more in expected
    }
    assert found == expected


def test_ids_that_a_plug_in_registers_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_ids.py").write_text(
        "import gymnasium\ngymnasium.register('own_ids/Swing-v3', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["plugins=[own_ids]", "env.success_return=null", "env.max_episode_steps=100"]
    assert load_config("gym_pendulum", [*words, "env.tasks=[own_ids/Swing-v3]"], plugin_dir=tmp_path)
    wanted = r"no task 'own_ids/Swing-v4' - did you mean 'own_ids/Swing-v3'\? \(versions: own_ids/Swing-v3\)"
    with pytest.raises(ConfigError, match=wanted):
        load_config("gym_pendulum", [*words, "env.tasks=[own_ids/Swing-v4]"], plugin_dir=tmp_path)


@pytest.mark.parametrize("weights", ["<weights>", "hf://lerobot/pi0_base"])
def test_files_beside_weights_that_are_not_here_yet_are_looked_for(weights, tmp_path):
    """Before anything is downloaded; statistics may be of demonstrations that are yet to be recorded."""
    given = ["env=gym/pendulum_rgb", "model=pi0", f"model.checkpoint={weights}", "model.statistics=nowhere/stats.json"]
    with pytest.raises(ConfigError) as caught:
        load_config("gym_cartpole", [*given, "model.tokenizer=nowhere.json"], use=ConfigUse.elsewhere)
    assert "model.tokenizer = 'nowhere.json' does not exist" in str(caught.value)
    assert "stats.json' does not exist" not in str(caught.value)
