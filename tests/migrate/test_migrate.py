"""`embodyrl migrate`: configs as RLinf writes them become configs that load, and no key is lost without a word."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml

from embodyrl.config import ConfigUse, load_config
from embodyrl.config.issues import ConfigError
from embodyrl.migrate.files import RLinfError, read_rlinf
from embodyrl.migrate.migration import Migration, account, to_yaml
from embodyrl.migrate.rlinf import convert

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
    assert (config.env.start_states, config.env.settle_steps) == (50, 15)


@pytest.mark.parametrize(("kind", "name"), [("gr00t_n1d7", "gr00t_n17"), ("gr00t_n1d6", "gr00t_n16")])
def test_newer_gr00t_is_clipped_twice(folder: Folder, kind: str, name: str) -> None:
    head = {"noise_method": "flow_sde", "noise_level": 0.3, "joint_logprob": False, "disable_dropout": True}
    head |= {"value_vlm_mode": "mean_token", "padding_value": 570}
    folder.parts["model/net"] = {"model_type": kind, "precision": "bf16", "denoising_steps": 4} | {
        "embodiment_tag": "libero_sim",
        "rl_head_config": head,
        "backbone_model_path": "/nowhere/Cosmos-Reason2-2B",
    }
    folder.main["algorithm"]["clip_ratio_c"] = 2.5
    lost = folder.convert().without_counterpart
    assert "name the folder with model.vlm" in lost["actor.model.backbone_model_path"]
    assert {each for each in lost if "rl_head" in each} == {"actor.model.rl_head_config.padding_value"}
    config = folder.load()
    model = config.model
    assert (model.name, model.embodiment_tag, model.denoising_steps, model.noise_level) == (name, "libero_sim", 4, 0.3)
    assert model.count_clipped and model.freeze_vision and model.freeze_language and model.gripper == "one_opens"
    assert config.algorithm.loss.dual_clip == 2.5


@pytest.mark.parametrize("named", [{"model_type": "pi0_fast"}, {"openpi": {"config_name": "pi0_fast_libero"}}])
def test_pi0_fast_draws_tokens_of_whole_chunks(folder: Folder, named: dict[str, Any]) -> None:
    merge(folder.parts["model/net"], named)
    folder.main["algorithm"]["logprob_type"] = "action_level"
    folder.main["rollout"]["sampling_params"] = {"temperature_train": 0.6, "temperature_eval": 0.0}
    converted = folder.convert()
    assert "a token belongs to no single action" in converted.without_counterpart["algorithm.logprob_type"]
    assert "no noise to remove" in converted.without_counterpart["actor.model.num_steps"]
    config = folder.load()
    assert (config.model.name, config.model.temperature, config.eval.sample) == ("pi0_fast", 0.6, False)
    assert config.model.cameras == ["agentview", "wrist", "absent"]
    assert config.algorithm.logprob_level == "chunk"


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


SAID: list[tuple[str, Any, Any, str]] = [
    ("reward.use_reward_model", False, True, "a learned reward takes the place"),
    ("critic.use_critic_model", False, True, "no separate critic model"),
    ("runner.only_eval", False, True, "evaluate with"),
    ("runner.resume_dir", None, "/a/run", "embodyrl resume"),
    ("env.train.video_cfg.save_video", False, True, "videos show evaluations"),
    ("env.train.use_ordered_reset_state_ids", False, True, "there each occurs once"),
    ("env.eval.data_collection.enabled", False, True, "embodyrl collect"),
    ("rollout.sampling_params.repetition_penalty", 1.0, 1.2, "no penalty"),
    ("rollout.sampling_params.do_sample", True, False, "rollouts always draw actions"),
    ("actor.training_backend", "fsdp", "megatron", "torch's own"),
    ("actor.fsdp_config.amp_autocast.enabled", False, True, "engine.precision"),
    ("actor.model.openpi.use_dsrl", False, True, "algorithm: dsrl"),
    ("actor.model.openpi.num_steps", 4, 10, "and actor.model.num_steps = 4"),
    ("env.eval.max_episode_steps", 60, 80, "and env.train.max_episode_steps = 60"),
    ("env.eval.task_suite_name", "libero_spatial", "libero_goal", "and env.train.task_suite_name = libero_spatial"),
    ("rollout.model.precision", "bf16", "fp16", "and actor.model.precision = bf16"),
    ("env.train.something_new", False, 0, "no setting here is known to mean it"),
]
"""Key, a value for which there is nothing to set, another one that has no counterpart, and what is said of that."""


def test_what_is_said_of_a_key_depends_on_its_value(folder: Folder) -> None:
    wrong = []
    for key, nothing, other, text in SAID:
        for value, listed in ((nothing, False), (other, True)):
            source = read_rlinf(folder.write())
            source.values[key] = value
            found = convert(source)
            said = found.without_counterpart.get(key)
            if (said is not None) != listed or (key in found.needless) == listed or text not in (said or text):
                wrong.append(f"{key} = {value}: {said}, {found.needless.get(key)}")
    assert not wrong, "\n".join(wrong)


def test_temperatures_of_evaluation_and_rollouts_are_kept_apart(folder: Folder) -> None:
    folder.parts["model/net"] = {"model_type": "openvla_oft", "unnorm_key": "mine"}
    for train, evaluation, sample, said in ((1.6, 1.6, True, False), (1.6, 0.6, True, True), (1.0, -1, False, False)):
        params = {"temperature_train": train, "temperature_eval": evaluation, "top_k": -1, "top_p": 1.0}
        folder.main["rollout"]["sampling_params"] = params
        config, found = folder.load(), folder.convert()
        assert (config.model.temperature, config.model.top_k, config.eval.sample) == (train, 0, sample)
        assert ("rollout.sampling_params.temperature_eval" in found.without_counterpart) == said


def test_keys_are_read_where_earlier_releases_had_them(folder: Folder) -> None:
    folder.parts["model/net"] = {"model_type": "openvla_oft", "unnorm_key": "mine"}
    now = folder.load()
    del folder.main["env"]["train"]["rollout_epoch"]
    params = {"temperature_train": 1.6, "temperature_eval": 0.6, "top_k": -1, "do_sample": True}
    folder.main["algorithm"] |= {"rollout_epoch": 4, "sampling_params": params}
    config, found = folder.load(), folder.convert()
    assert config.rollout.episodes_per_slot == 2 * now.rollout.episodes_per_slot
    assert (config.model.temperature, config.eval.sample) == (1.6, True)
    text = " ".join(" ".join(account(found)).split())
    assert "# algorithm.rollout_epoch" in to_yaml(found) and "env.train.rollout_epoch" not in to_yaml(found) + text
    assert "algorithm.sampling_params.temperature_eval = 0.6; evaluation draws as rollouts do" in text


def test_a_learned_reward_that_is_off_has_no_parts(folder: Folder) -> None:
    for on in (False, True):
        folder.main["reward"] = {"use_reward_model": on, "model": {"model_type": "resnet"}}
        left = folder.convert().without_counterpart
        assert ("reward.model.model_type" in left, "reward.use_reward_model" in left) == (on, on)


def test_states_and_tasks_that_are_chosen_stay_chosen(folder: Folder) -> None:
    train, wrong = folder.main["env"]["train"], []
    spatial = [f"libero_spatial/{number}" for number in range(10)]
    cases: list[tuple[dict[str, Any], list[str], int]] = [
        ({"specific_reset_id": 0}, spatial[:1], 1),
        ({"specific_reset_id": 150, "task_id_filter": [7]}, spatial[3:4], 1),
        ({"specific_reset_id": 151}, spatial[3:4], 50),
        ({"task_id_filter": [4, 1, 4]}, [spatial[1], spatial[4]], 50),
        ({"task_suite_name": "libero_90"}, [f"libero_90/{number}" for number in range(90)], 50),
        ({}, spatial, 50),
    ]
    for change, tasks, states in cases:
        folder.main["env"]["train"] = {**train, **change}
        config = folder.load()
        said = "start state 1 of libero_spatial/3 alone" in folder.convert().differs.get(
            "env.train.specific_reset_id", ""
        )
        same = (config.env.tasks, config.env.start_states, said) == (
            tasks,
            states,
            change.get("specific_reset_id") == 151,
        )
        if not same or config.eval.episodes > 50 * len(tasks):
            wrong.append(f"{change}: {config.env.tasks}, {config.env.start_states}, {config.eval.episodes}")
    folder.main["env"]["train"] = {**train, "task_suite_name": "libero_130"}
    assert len(set(folder.load().env.tasks)) == 130
    assert not wrong, "\n".join(wrong)


def test_what_a_resolver_computes_is_left_as_it_is_written(folder: Folder) -> None:
    changes = {
        ("actor", "seed"): "${oc.select:runner.seed,1234}",
        ("runner", "logger", "experiment_name"): "pi0_${now:%Y}",
        ("env", "train", "total_num_envs"): "${multiply:2,8}",
        ("algorithm", "filter_rewards"): "${oc.env:FILTER,true}",
        ("env", "eval", "video_cfg", "video_base_dir"): "${runner.logger.log_path}/video",
        ("env", "train", "limit"): "${env.eval}",  # a section
    }
    for path, text in changes.items():
        section = folder.main
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = text
    config, found = folder.load(), folder.convert()
    assert {found.source.values[".".join(path)] for path in changes} == set(changes.values())
    left = {key for key, why in found.without_counterpart.items() if "OmegaConf" in why}
    assert left >= {".".join(path) for path in [*changes][:4]} and "actor.seed" not in found.converted
    assert (config.seed, config.run.name, config.env.num_envs) == (1, "run", 8)  # as if they were not there


def test_what_is_written_has_no_fault_of_its_own(folder: Folder) -> None:
    grpo = {"adv_type": "grpo", "loss_type": "actor", "group_size": 8}
    wrong = []
    for changes in (
        {"env": {"eval": {"total_num_envs": 1, "rollout_epoch": 2}}},  # fewer episodes than videos
        {"env": {"eval": {"total_num_envs": 1000}}},  # more than LIBERO has start states
        {"algorithm": {"filter_rewards": True}},  # of an advantage that compares no groups
        {"algorithm": {"group_size": 4}},
        {"algorithm": {**grpo, "filter_rewards": True, "rewards_upper_bound": 4.5}},  # a rate above 1
        {"algorithm": grpo, "env": {"train": {"auto_reset": True, "max_episode_steps": 45}}},
        {"algorithm": {"entropy_bonus": 0.01}},  # of noise that is not learned
        {"actor": {"model": {"is_lora": True, "openpi": {"train_expert_only": True}}}},  # adapters on what is frozen
        {"actor": {"model": {"model_type": "mlp_policy"}, "fsdp_config": {"gradient_checkpointing": True}}},
        {
            "runner": {
                "logger": {
                    "experiment_name": "pi0/first try",
                    "logger_backends": ["tensorboard", "console", "tensorboard"],
                }
            }
        },
        {"env": {"train": {"max_episode_steps": 90}}},  # longer than a rollout
    ):
        folder.main, folder.parts["model/net"] = copy.deepcopy(MAIN), copy.deepcopy(NET)
        merge(folder.main, changes)
        try:
            folder.load()
        except ConfigError as error:
            wrong.append(f"{changes}: {error}")
    assert not wrong, "\n".join(wrong)


def test_numbers_that_nothing_can_be_counted_by_are_refused(folder: Folder) -> None:
    answered = []
    for value in (0, -3, 10**30, 1e300, float("inf"), [8], "many"):
        for path in (
            ("env", "train", "total_num_envs"),
            ("env", "train", "max_episode_steps"),
            ("actor", "global_batch_size"),
        ):
            folder.main = copy.deepcopy(MAIN)
            section = folder.main
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = value
            try:
                folder.convert()
            except RLinfError as error:
                answered.append(".".join(path) in str(error))
    assert sum(answered) == len(answered) == 21
    folder.main = copy.deepcopy(MAIN)
    folder.main["defaults"] = ["env/suite@env.train"] * 200
    with pytest.raises(RLinfError, match="more than 100 files"):
        folder.convert()
    for entry, answer in (
        ("../secrets@env.train", "below the config's own folder"),
        ({"a": 1, "b": 2}, "write `- group"),
    ):
        folder.main["defaults"] = [entry]
        with pytest.raises(RLinfError) as caught:
            folder.convert()
        assert "`defaults` of" in str(caught.value) and answer in f"{caught.value} {caught.value.remedy}"


def test_tasks_that_rlinf_adds_to_maniskill_are_no_others(folder: Folder) -> None:
    params = {"obs_mode": "rgb", "control_mode": None}
    folder.parts["env/suite"] |= {"env_type": "maniskill", "wrap_obs_mode": "simple", "use_full_state": True}
    folder.parts["model/net"] = {"model_type": "mlp_policy"}
    refused = []
    for task in ("PutOnPlateInScene25Main-v3", "PutCarrotOnPlateInScene-v2", "PickCube3View-v1", "PickCube-v1"):
        folder.parts["env/suite"]["init_params"] = {"id": task, **params}
        try:
            config = folder.load()
        except RLinfError as error:
            assert f"init_params.id = {task} of RLinf has no counterpart" in str(error) and "did you mean" not in str(
                error
            )
            refused.append(task)
    assert len(refused) == 3 and config.env.tasks == ["PickCube-v1"]
    assert (config.env.cameras, config.env.proprio) == ([], "full")  # the MLP sees the state, whatever is rendered


def test_the_controller_is_the_one_of_policy_setup(folder: Folder) -> None:
    modes: dict[str | None, str] = {
        "panda-qpos": "pd_joint_delta_pos",
        "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    }
    modes |= {"widowx_bridge": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos", None: "pd_ee_delta_pos"}
    params = {"id": "PutCarrotOnPlateInScene-v1", "obs_mode": "rgb+segmentation", "control_mode": "pd_ee_delta_pos"}
    folder.parts["env/suite"] |= {"env_type": "maniskill", "init_params": params}
    for setup, mode in modes.items():
        folder.parts["model/net"] = {"model_type": "openvla", "policy_setup": setup, "center_crop": True}
        found = folder.convert()
        assert found.lines["env.control_mode"].value == mode
        assert ("env.train.init_params.control_mode" in found.differs) == (setup is not None)
        assert found.lines["model.center_crop"].value is False and "actor.model.center_crop" in found.dead


def merge(into: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        merge(into.setdefault(key, {}), value) if isinstance(value, dict) else into.__setitem__(key, value)


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
    nowhere = migrate("main.yaml", "--out", "/proc/my.yaml")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert nowhere.stderr.startswith("error: /proc/my.yaml cannot be made, because /proc ")
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
