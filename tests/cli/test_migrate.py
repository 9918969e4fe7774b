"""`embodyrl migrate`: configs as RLinf writes them become configs that load, and no key is lost without a word."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml

from embodyrl.cli.migrate import account, to_yaml
from embodyrl.config import ConfigUse, load_config
from embodyrl.config.rlinf import Migration, convert
from embodyrl.config.rlinf_files import RLinfError, read_rlinf

MAIN: dict[str, Any] = {
    "defaults": ["env/suite@env.train", "env/suite@env.eval", {"model@actor.model": "net"}, "override hydra/x: y"],
    "hydra": {"searchpath": ["file://${oc.env:NOWHERE}/config/"]},
    "cluster": {"num_nodes": 1, "component_placement": {"actor,env,rollout": "all"}},
    "runner": {
        "max_epochs": 30,
        "max_steps": -1,
        "val_check_interval": -1,
        "save_interval": 5,
        "logger": {"experiment_name": "mine", "log_path": "../results", "logger_backends": ["tensorboard", "abacus"]},
    },
    "algorithm": {
        "adv_type": "gae",
        "loss_type": "actor_critic",
        "gamma": 0.97,
        "gae_lambda": 0.9,
        "update_epoch": 3,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.3,
        "value_clip": 0.2,
        "huber_delta": 10.0,
        "entropy_bonus": 0,
        "logprob_type": "chunk_level",
        "group_size": 1,
        "kl_beta": 0.05,
        "loss_agg_func": "token-mean",
        "gama": 0.5,
    },
    "env": {
        "train": {"total_num_envs": 16, "rollout_epoch": 2, "max_episode_steps": "${.limit}", "limit": 60},
        "eval": {"total_num_envs": 100, "rollout_epoch": 2, "video_cfg": {"save_video": True}},
    },
    "rollout": {"pipeline_stage_num": 2, "model": {"precision": "${actor.model.precision}"}},
    "actor": {
        "global_batch_size": 64,
        "micro_batch_size": 8,
        "seed": 7,
        "model": {"model_path": "/path/to/weights", "num_action_chunks": 5},
        "optim": {"lr": "1e-5", "value_lr": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
    },
}
ENV = {
    "env_type": "libero",
    "task_suite_name": "libero_spatial",
    "auto_reset": False,
    "ignore_terminations": False,
    "max_steps_per_rollout_epoch": "${.limit}",
    "use_rel_reward": True,
    "reward_coef": 1.0,
    "init_params": {"camera_heights": 256, "camera_widths": 256},
}
NET = {"model_type": "openpi", "precision": "bf16", "num_steps": 4, "openpi": {"config_name": "pi0_libero"}}


class Folder:
    """A folder as RLinf's examples/embodiment/config is."""

    def __init__(self, path: Path) -> None:
        self.path, self.main = path, copy.deepcopy(MAIN)
        self.parts = {"env/suite": copy.deepcopy(ENV), "model/net": copy.deepcopy(NET)}

    def write(self) -> Path:
        for name, data in {**self.parts, "main": self.main}.items():
            file = self.path / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(data).replace("'1e-5'", "1e-5"))
        return self.path / "main.yaml"

    def convert(self) -> Migration:
        return convert(read_rlinf(self.write()))

    def load(self) -> Any:
        (self.path / "mine.yaml").write_text(to_yaml(self.convert()))
        return load_config(self.path / "mine.yaml", use=ConfigUse.elsewhere).config


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_ppo_has_the_numbers_of_rlinf(folder: Folder) -> None:
    config = folder.load()
    assert (config.seed, config.run.name, config.run.iterations, config.run.eval_every) == (7, "mine", 30, 0)
    assert (config.env.name, config.env.num_envs, config.env.max_episode_steps) == ("libero", 16, 60)
    assert config.env.image_size == [256, 256] and config.env.end_at_success
    rollout = config.rollout
    assert (rollout.chunk_size, rollout.num_chunks, rollout.episodes_per_slot, rollout.schedule) == (
        5,
        12,
        2,
        "pipeline",
    )
    algorithm = config.algorithm
    assert (algorithm.gamma, algorithm.advantage.gae_lambda, algorithm.epochs) == (0.97, 0.9, 3)
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high, algorithm.value_clip) == (0.1, 0.3, 0.2)
    assert algorithm.minibatches == 16 * 2 * 12 / 64 and algorithm.kl_coef == 0.0 and algorithm.reward.name == "success"
    optimizer = config.engine.optimizer
    assert (optimizer.lr, optimizer.critic_lr, optimizer.betas, optimizer.max_grad_norm) == (
        1e-5,
        1e-4,
        [0.9, 0.95],
        1.0,
    )
    assert (config.model.name, config.model.denoising_steps, config.model.dtype) == ("pi0", 4, "bfloat16")
    assert config.eval.episodes == 200 and config.tracking.video.episodes == 4


def test_grpo_filters_by_success_whatever_the_reward_is_multiplied_with(folder: Folder) -> None:
    bounds = {"filter_rewards": True, "rewards_lower_bound": 0.5, "rewards_upper_bound": 4.5}
    folder.main["algorithm"] |= {"adv_type": "grpo", "loss_type": "actor", "group_size": 8, **bounds}
    folder.main["env"]["train"]["reward_coef"] = 5.0
    folder.parts["model/net"] = {"model_type": "openvla_oft", "unnorm_key": "mine", "num_action_chunks": 5}
    config = folder.load()
    filtered = config.algorithm.filter
    assert (filtered.name, filtered.accuracy_low, filtered.accuracy_high) == ("accuracy", 0.1, 0.9)
    assert config.rollout.group_size == 8 and config.algorithm.value_coef == 0.0
    assert "a group of 8 has 8 start states there" in folder.convert().differs.get("env.train.group_size", "") or (
        "env.train.group_size" not in read_rlinf(folder.path / "main.yaml").values
    )


def test_a_group_that_is_none_there_is_said(folder: Folder) -> None:
    folder.main["algorithm"] |= {"adv_type": "grpo", "loss_type": "actor", "group_size": 8}
    folder.main["env"]["train"]["group_size"] = 1
    assert folder.convert().differs["env.train.group_size"].startswith("a group of 8 has 8 start states there")


def test_envs_that_reset_themselves_make_continuous_rollouts(folder: Folder) -> None:
    folder.parts["env/suite"]["auto_reset"] = True
    rollout = folder.load().rollout
    assert (rollout.episodes, rollout.num_chunks, rollout.episodes_per_slot) == ("continuous", 24, 1)


def test_every_key_is_accounted_for(folder: Folder) -> None:
    found = folder.convert()
    kinds = [set(found.converted), set(found.dead), set(found.needless), set(found.without_counterpart)]
    assert set.union(*kinds) >= set(found.source.values)
    assert not kinds[1] & kinds[2] and not kinds[1] & kinds[3] and not kinds[2] & kinds[3]
    assert {"algorithm.kl_beta", "algorithm.loss_agg_func"} == kinds[1]
    assert "algorithm.gama" in kinds[3] and "abacus" in found.differs["runner.logger.logger_backends"]
    assert {"cluster.num_nodes", "rollout.model.precision"} <= kinds[2]
    assert max(map(len, account(found))) <= 80


def test_a_minibatch_that_does_not_fit_is_the_nearest_one_that_does(folder: Folder) -> None:
    folder.main["actor"]["global_batch_size"] = 100
    found = folder.convert()
    assert found.lines["algorithm.minibatches"].value == 4
    assert found.differs["actor.global_batch_size"] == "384 chunks are split into 4 minibatches of 96"


def test_references_are_followed_and_nothing_else_is(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    folder.main["runner"]["logger"]["log_path"] = "${oc.env:SECRET}"
    folder.main["runner"]["logger"]["experiment_name"] = "${.log_path}"
    folder.main["algorithm"]["gamma"] = "${algorithm.gae_lambda}"
    folder.main["algorithm"]["gae_lambda"] = "${algorithm.gamma}"  # a cycle ends
    found = read_rlinf(folder.write()).values
    assert found["env.train.max_episode_steps"] == found["env.train.max_steps_per_rollout_epoch"] == 60
    assert found["rollout.model.precision"] == "bf16" and "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"loss_type": "embodied_sac"}}, "algorithm: sac comes near"),
        ({"env": {"train": {"env_type": "robotwin"}}}, "env.train.env_type = robotwin libero_spatial of RLinf has no"),
        ({"actor": {"model": {"model_type": "evo1"}}}, "these have one: mlp_policy"),
        ({"defaults": ["env/nowhere@env.train"]}, "env/nowhere.yaml is missing"),
    ],
)
def test_what_cannot_be_converted_says_so(folder: Folder, change: dict[str, Any], message: str) -> None:
    def merge(into: dict[str, Any], part: dict[str, Any]) -> None:
        for key, value in part.items():
            merge(into[key], value) if isinstance(value, dict) else into.__setitem__(key, value)

    merge(folder.main, change)
    with pytest.raises(RLinfError, match=message):
        folder.convert()


def test_the_command_as_a_user_sees_it(folder: Folder) -> None:
    folder.write()

    def migrate(*words: str) -> Any:
        return programs.run(["-m", "embodyrl", "migrate", *words], cwd=folder.path)

    done = migrate("main.yaml", "--out", "my.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "my.yaml: OK," in done.stdout and "next: embodyrl plan my.yaml --elsewhere" in done.stdout
    again = migrate("main.yaml")
    assert again.returncode == 0 and again.stdout == (folder.path / "my.yaml").read_text()
    assert "without effect in RLinf: 2 keys" in again.stderr
    taken = migrate("main.yaml", "--out", "my.yaml")
    assert (taken.returncode, taken.stderr) == (2, "error: my.yaml exists: give a name that is free to --out\n")
    ours = migrate("my.yaml")
    assert ours.returncode == 2 and "is no config of RLinf" in ours.stderr
    (folder.path / "evil.yaml").write_text("actor: !!python/object/apply:os.system [touch pwned]\nenv: {}\n")
    evil = migrate("evil.yaml")
    assert evil.returncode == 2 and "evil.yaml:1:8" in evil.stderr and not (folder.path / "pwned").exists()


def test_faults_of_the_result_are_shown_and_the_file_is_written(folder: Folder) -> None:
    folder.main["algorithm"]["gamma"] = 7
    folder.write()
    done = programs.run(["-m", "embodyrl", "migrate", "main.yaml", "--out", "my.yaml"], cwd=folder.path)
    assert done.returncode == 2 and "algorithm.gamma = 7 is too large" in done.stderr
    assert "faults that the conversion could not decide" in done.stdout and (folder.path / "my.yaml").exists()
