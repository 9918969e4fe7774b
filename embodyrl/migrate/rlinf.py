"""Converts a config of RLinf for robots into one of embodyrl, and accounts for every key of it."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodyrl.config.rules import known_tasks
from embodyrl.config.schema import EvalConfig, RunConfig
from embodyrl.envs.libero.tasks import OFFICIAL_STATES
from embodyrl.migrate.files import RLinfConfig, RLinfError
from embodyrl.migrate.migration import LONGEST, MOST, Migration, shown
from embodyrl.registry import SINKS

ON_POLICY = {"gae": "ppo", "grpo": "grpo", "reinpp": "reinforce_pp"}
"""Advantages of RLinf, and the algorithm group that has the same."""
LOSSES = ("actor", "actor_critic", "decoupled_actor_critic")
INSTEAD = {"embodied_dagger": "dagger", "offline_iql": "iql", "embodied_sac": "sac", "rlt_ac": "sac", "rlt_td3": "sac"}
"""Losses with a counterpart whose settings differ too much to be converted."""
MODELS = {
    "mlp_policy": "mlp",
    "cnn_policy": "cnn",
    "openvla": "openvla",
    "openvla_oft": "openvla_oft",
    "openpi": "pi0",
    "openpi_rlinf": "pi0",
    "pi0_fast": "pi0_fast",
    "gr00t": "gr00t",
    "gr00t_n1d6": "gr00t_n16",
    "gr00t_n1d7": "gr00t_n17",
}
EARLIER = {
    "algorithm.rollout_epoch": "env.train.rollout_epoch",
    "algorithm.sampling_params.": "rollout.sampling_params.",
}
"""Keys, or beginnings of keys, that RLinf's earlier releases had in another place, and where they are now."""
LIBERO = {
    "libero_spatial": ("libero/spatial", 10),
    "libero_object": ("libero/object", 10),
    "libero_goal": ("libero/goal", 10),
    "libero_90": ("libero/spatial", 90),
    "libero_10": ("libero/long", 10),
}
"""Suites, the group whose settings fit (not its tasks, with 90 of them), and the number of tasks."""
EVERY_SUITE = "libero_130"
NO_WEIGHTS = ("mlp", "cnn")
"""Models that begin with random weights."""


def convert(source: RLinfConfig) -> Migration:
    """Convert a config.

    Raises:
        RLinfError: its algorithm, model or simulator has no counterpart.
    """
    found = _in_todays_places(source)
    for convert_part in (_algorithm, _simulator, _model, _rollout, _update, _optimizer, _evaluation, _run):
        convert_part(found)
    return found


def _in_todays_places(source: RLinfConfig) -> Migration:
    """Return a migration whose keys are where today's RLinf has them."""
    written: dict[str, str] = {}
    for key in source.values:
        moved = next((now + key.removeprefix(then) for then, now in EARLIER.items() if key.startswith(then)), key)
        written[key if moved in source.values else moved] = key
    values = {now: source.values[key] for now, key in written.items()}
    return Migration(replace(source, values=values), written=written)


def _refuse(key: str, value: Any, hint: str) -> RLinfError:
    return RLinfError(f"{key} = {value if isinstance(value, str) else shown(value)} of RLinf has no counterpart", hint)


def _algorithm(m: Migration) -> None:
    advantage, loss = (str(m.get(f"algorithm.{key}", "none")) for key in ("adv_type", "loss_type"))
    if loss not in LOSSES or advantage not in ON_POLICY:
        key, value = ("algorithm.loss_type", loss) if loss not in LOSSES else ("algorithm.adv_type", advantage)
        instead = f"algorithm: {INSTEAD[loss]} comes near; " if loss in INSTEAD else ""
        raise _refuse(key, value, f"{instead}gae, grpo and reinpp with {', '.join(LOSSES)} can be converted")
    m.groups["algorithm"] = ON_POLICY[advantage]
    m.converted |= {"algorithm.adv_type", "algorithm.loss_type"}
    if loss == "decoupled_actor_critic":
        _decoupled(m)
    m.copy("algorithm.loss.clip_low", "algorithm.clip_ratio_low")
    m.copy("algorithm.loss.clip_high", "algorithm.clip_ratio_high")
    m.copy("algorithm.gamma", "algorithm.gamma")
    m.copy("algorithm.entropy_coef", "algorithm.entropy_bonus", float)
    level = str(m.get("algorithm.logprob_type", "action_level")).removesuffix("_level")
    m.write("algorithm.logprob_level", level, "algorithm.logprob_type", "algorithm.entropy_type")
    if advantage == "gae":
        m.copy("algorithm.advantage.gae_lambda", "algorithm.gae_lambda")
        m.copy("algorithm.value_clip", "algorithm.value_clip")
        m.copy("algorithm.value_huber", "algorithm.huber_delta")
        m.write("algorithm.value_coef", 1.0, why="RLinf adds the value loss unweighted")
        if str(m.get("algorithm.reward_type", "")).startswith("action"):
            why = "a critic predicts values of chunks here, and a chunk's rewards are summed"
            m.differ("algorithm.reward_type", why)
        if m.get("algorithm.bootstrap_type") == "always":
            m.differ("algorithm.bootstrap_type", "only episodes that the time limit cuts off are bootstrapped here")
    else:
        for key in ("gae_lambda", "value_clip", "huber_delta", "bootstrap_type"):
            m.differ(f"algorithm.{key}", "there is no critic")
        m.differ("algorithm.reward_type", "episodes are compared by their return")
    m.converted |= {"algorithm.reward_type", "algorithm.bootstrap_type"} - m.differs.keys()
    if m.get("algorithm.entropy_type", level) not in (level, f"{level}_level"):
        m.differ("algorithm.entropy_type", "log-probs and entropy have one level here, algorithm.logprob_level")
    _filter(m, compares=advantage == "grpo")


def _filter(m: Migration, compares: bool) -> None:
    """Write the filter of groups by their success rate, if there is one and the advantage `compares` the episodes of a
    group."""
    keys = [f"algorithm.{name}" for name in ("filter_rewards", "rewards_lower_bound", "rewards_upper_bound")]
    if not m.get(keys[0]) or not compares:
        m.converted |= {*keys}
        if m.get(keys[0]):
            m.differ(keys[0], "groups are filtered here where the advantage compares their episodes: adv_type grpo")
        return
    coef = m.number("env.train.reward_coef", 1.0)
    if coef <= 0.0:
        raise RLinfError(f"env.train.reward_coef = {coef} makes every return alike", "write a factor above 0")
    bounds = (m.number(keys[1], 0.1) / coef, m.number(keys[2], 0.9) / coef)  # where none are given: RLinf's
    low, high = (min(max(bound, 0.0), 1.0) for bound in bounds)  # success rates are within 0 .. 1
    m.groups["algorithm"] = "dapo"  # whose iteration has a stage that filters
    m.write("algorithm.max_collections", 1, why="RLinf learns from the groups that are left")
    m.write("algorithm.filter.name", "accuracy", keys[0])
    m.write("algorithm.filter.accuracy_low", low, keys[1], why="divided by reward_coef")
    m.write("algorithm.filter.accuracy_high", high, keys[2], why="divided by reward_coef")


def _decoupled(m: Migration) -> None:
    """Write the loss of asynchronous PPO, which also clips where the advantage is negative."""
    capped = "algorithm.behave_weight_threshold"
    m.write("algorithm.loss.name", "decoupled_ppo", "algorithm.loss_type")
    m.differ("algorithm.loss_type", "asynchronous there; here: placement.rollout.workers=N rollout.mode=async")
    m.differ("algorithm.staleness_threshold", "here: rollout.max_staleness, with rollout.mode=async")
    m.write("algorithm.loss.dual_clip", m.number("algorithm.clip_ratio_c", 3.0), "algorithm.clip_ratio_c")
    cap = None if m.get(capped) is None else m.number(capped, 0.0)
    m.write("algorithm.loss.behaviour_cap", cap, capped, why="" if cap else "RLinf has none")


def _simulator(m: Migration) -> None:
    kind, suite = (str(m.get(f"env.train.{key}", "")) for key in ("env_type", "task_suite_name"))
    if not kind:
        files = ", ".join(m.source.missing) or "env.train.env_type"
        remedy = "keep the folders env/ and model/ beside it, as in examples/embodiment/config"
        raise RLinfError(f"{m.source.path} does not say its simulator: {files} is missing", remedy)
    m.converted |= {"env.train.env_type", "env.train.task_suite_name"}
    if kind == "maniskill":
        _maniskill(m)
    elif kind == "libero" and suite in (*LIBERO, EVERY_SUITE):
        _libero(m, suite)
    elif kind == "metaworld" and suite == "metaworld_50":
        m.groups["env"] = "metaworld/mt50"
    else:
        known = "libero (spatial, object, goal, 10, 90, 130), maniskill and metaworld_50 can be converted"
        hint = f"{known}; to add a simulator, see docs/simulators.md"
        raise _refuse("env.train.env_type", f"{kind} {suite}".strip(), hint)
    if kind in ("libero", "metaworld"):
        m.write("algorithm.reward", "success", "env.train.use_rel_reward", why="the success of a step counts once")
        m.switch("algorithm.time_penalty", 1.0, "env.train.use_step_penalty")
    m.write("env.num_envs", m.count("env.train.total_num_envs", 8), "env.train.total_num_envs")
    m.write("env.end_at_success", not m.get("env.train.ignore_terminations", False), "env.train.ignore_terminations")
    m.copy("algorithm.reward_scale", "env.train.reward_coef", float)
    for sides in (("camera_heights", "camera_widths"), ("sensor_configs.height", "sensor_configs.width")):
        keys = [f"env.train.init_params.{side}" for side in sides]
        if all(m.get(key) for key in keys):
            m.write("env.image_size", [m.count(key, 0) for key in keys], *keys)
    m.switch("env.offload", True, "env.train.enable_offload")


def _libero(m: Migration, suite: str) -> None:
    """Write the tasks and the start states of LIBERO."""
    variant = m.get("env.train.libero_variant", "standard")
    if variant != "standard":
        raise _refuse("env.train.libero_variant", variant, "env.task_files names folders with further suites of tasks")
    suites = [*LIBERO] if suite == EVERY_SUITE else [suite]
    m.groups["env"] = LIBERO[suites[0]][0]
    tasks = [f"{part}/{number}" for part in suites for number in range(LIBERO[part][1])]
    filtered, first = m.get("env.train.task_id_filter"), m.get("env.train.specific_reset_id")
    if first is not None:  # which RLinf asks for first
        _one_start_state(m, tasks)
    elif filtered is not None:
        numbers = filtered if isinstance(filtered, list) else []
        if not numbers or not all(isinstance(number, int) and 0 <= number < len(tasks) for number in numbers):
            what = f"env.train.task_id_filter = {shown(filtered)} is no list of tasks of {suite}"
            raise RLinfError(what, f"write numbers within 0 .. {len(tasks) - 1}")
        m.write("env.tasks", [tasks[number] for number in sorted(set(numbers))], "env.train.task_id_filter")
    elif len(tasks) > 10:  # those of the group are other ones
        m.write("env.tasks", tasks, "env.train.task_suite_name")
    if "env.start_states" not in m.lines:
        m.write("env.start_states", OFFICIAL_STATES, why="RLinf trains on all of them")
    m.write("env.share_start_states", True, why="RLinf evaluates on the start states of training, too")
    m.write("env.settle_steps", 15, why="as RLinf")
    if "env.train.reset_gripper_open" in m.source.values:
        settle = "open" if m.get("env.train.reset_gripper_open") else "still"
        m.write("env.settle_gripper", settle, "env.train.reset_gripper_open")


def _one_start_state(m: Migration, tasks: list[str]) -> None:
    """Write the task of the one start state that RLinf plays, and that state if it is the first one."""
    key = "env.train.specific_reset_id"
    number = int(m.number(key, 0))
    if not 0 <= number < len(tasks) * OFFICIAL_STATES:
        most = len(tasks) * OFFICIAL_STATES - 1
        raise RLinfError(f"{key} = {number} is no start state of the suite", f"write one within 0 .. {most}")
    task, state = divmod(number, OFFICIAL_STATES)
    m.write("env.tasks", [tasks[task]], key, why=f"start state {state} of task {task}")
    m.converted.add("env.train.use_ordered_reset_state_ids")
    if state == 0:
        m.write("env.start_states", 1, key, why="start state 0 alone")
    else:
        m.differ(key, f"start state {state} of {tasks[task]} alone; here its {OFFICIAL_STATES} start states are drawn")
    if m.get("env.eval.specific_reset_id") is not None:
        m.differ("env.eval.specific_reset_id", f"evaluation plays all {OFFICIAL_STATES} start states of the task")


def _maniskill(m: Migration) -> None:
    task, known = str(m.get("env.train.init_params.id", "")), known_tasks("maniskill")
    if any(fnmatch.fnmatchcase(task, pattern) for pattern in RLINFS_TASKS) or (known and task not in known):
        hint = "it is no task of ManiSkill's: RLinf or another package registers it; docs/simulators.md shows how to"
        raise _refuse("env.train.init_params.id", task, hint)
    simple = m.get("env.train.wrap_obs_mode") == "simple"
    images = "rgb" in str(m.get("env.train.init_params.obs_mode", "state"))
    m.groups["env"] = f"maniskill/{'push_cube' if not images else 'pick_cube_rgb' if simple else 'put_carrot'}"
    m.write("env.tasks", [task], "env.train.init_params.id", "env.train.init_params.obs_mode")
    _control_mode(m)
    if m.get("env.train.init_params.sim_backend") == "gpu":
        m.write("env.sim", "gpu", "env.train.init_params.sim_backend", why="cpu needs no GPU")
    if simple:
        proprio = "full" if not images or m.get("env.train.use_full_state") else "robot"
        m.write("env.proprio", proprio, "env.train.use_full_state", "env.train.wrap_obs_mode")
    _maniskill_reward(m)


def _control_mode(m: Migration) -> None:
    """Write the controller: RLinf derives it from `policy_setup`, and overwrites what `control_mode` says."""
    setup, key = "actor.model.policy_setup", "env.train.init_params.control_mode"
    robot = m.get(setup)
    if robot is None:
        m.copy("env.control_mode", key)
        return
    mode = next((mode for pattern, mode in CONTROL_MODES.items() if fnmatch.fnmatchcase(str(robot), pattern)), None)
    if mode is None:
        raise _refuse(setup, robot, f"RLinf knows {', '.join(CONTROL_MODES)}")
    m.write("env.control_mode", mode, setup)
    if m.get(key, mode) == mode:
        m.converted.add(key)
    else:
        m.differ(key, f"RLinf overwrites it by that of {setup}, {mode}")


_GOOGLE = "arm_pd_ee_delta_pose_align_interpolate_by_planner_gripper_pd_joint_target_delta_pos_interpolate_by_planner"
CONTROL_MODES = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    "*google_robot_static*": _GOOGLE,
    "*widowx*": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
    "*panda*": "pd_ee_body_target_delta_pose_real_root_frame",
}
"""Patterns of `policy_setup`, and the controller that each means; the first that fits counts."""


def _maniskill_reward(m: Migration) -> None:
    """Write the reward of ManiSkill that RLinf learns from, or its increase."""
    key, difference = "env.train.reward_mode", m.get("env.train.use_rel_reward")
    kind, reward = m.get(key, "default"), "difference" if difference else "dense"
    mode = m.get("env.train.init_params.reward_mode", "normalized_dense")
    if kind == "raw":
        why = "" if "env.train.init_params.reward_mode" in m.source.values else "ManiSkill's own default"
        m.write("env.reward_mode", mode, key, "env.train.init_params.reward_mode", why=why)
    else:
        m.write("env.reward_mode", "sparse", key)
        reward = "success" if difference or not m.get("env.train.ignore_terminations") else "dense"
    why = "" if kind in ("raw", "only_success") else "there, grasping the object is rewarded, too; here: success alone"
    m.write("algorithm.reward", reward, key, "env.train.use_rel_reward", why=why)
    if why:
        m.differ(key, why)


RLINFS_TASKS = (
    *("PutOnPlateInScene25*", "PandaPutOnPlateInScene25*", "PutCarrotOnPlateInScene-v2", "PickCube3View-*"),
    *("PegInsertionSideWideClearance*", "PegInsertionSideHardClearance*"),
)
"""Tasks that RLinf adds to ManiSkill's."""


def _model(m: Migration) -> None:
    kind = str(m.get("actor.model.model_type") or m.get("actor.model.model_name"))
    if kind not in MODELS:
        raise _refuse("actor.model.model_type", kind, f"these have one: {', '.join(MODELS)}")
    name = MODELS[kind]
    configured = str(m.get("actor.model.openpi.config_name", ""))
    if name == "pi0":
        name = next((each for each in ("pi05", "pi0_fast") if configured.startswith(each)), name)
    m.groups["model"] = name
    m.converted |= {f"actor.model.{key}" for key in ("model_type", "model_name", "openpi.config_name")}
    if name in NO_WEIGHTS:
        m.converted.add("actor.model.model_path")
        if m.get("actor.model.model_path"):
            m.differ("actor.model.model_path", "this model begins with random weights here")
        if name == "mlp":
            m.write("model.hidden_sizes", [256, 256, 256], why="RLinf's are fixed")
            m.write("env.cameras", [], why="the MLP sees no images")
        return
    folder = m.source.values.get("actor.model.model_path")
    is_here = isinstance(folder, str) and folder != "" and "\0" not in folder and Path(folder).is_dir()
    why = "" if is_here else str(folder or "")
    m.write("model.checkpoint", folder if is_here else "<weights>", "actor.model.model_path", why=why)
    whole = str(m.get("actor.model.precision")) in ("32", "fp32")
    m.write("model.dtype", "float32" if whole else "bfloat16", "actor.model.precision")
    newer, pi = ("gr00t_n16", "gr00t_n17"), ("pi0", "pi05")
    parts = {"gr00t": _gr00t, "pi0_fast": _pi_fast} | dict.fromkeys(newer, _gr00t_n17) | dict.fromkeys(pi, _pi)
    parts.get(name, _openvla)(m)
    _lora(m)


def _lora(m: Migration) -> None:
    """Write the adapters, for models whose layers are not frozen."""
    keys = ("actor.model.is_lora", "actor.model.lora_rank", "actor.model.lora_path")
    if not m.get(keys[0]):
        m.converted |= {*keys}
        return
    if FROZEN & m.lines.keys():
        m.differ(keys[0], "the layers that would get adapters are frozen, as in the rest of this config")
        return
    rank = m.count(keys[1], 32)
    m.write("engine.lora.rank", rank, *keys[:2])
    m.write("engine.lora.alpha", rank, why="RLinf scales adapters by 1")
    if m.get(keys[2]):
        m.differ(keys[2], "an adapter that continues learning; here: model.adapter, for the models that have it")


FROZEN = {"model.frozen", "model.freeze_language"}
"""Settings that are written where the layers for adapters do not learn."""


def _flow(m: Migration, section: str) -> None:
    """Write the noise of a flow-matching policy, whose entropy can be learned with learned noise only."""
    for name in ("noise_method", "noise_level", "joint_logprob"):
        m.copy(f"model.{name}", f"{section}.{name}")
    m.copy("model.detach_critic", f"{section}.detach_critic_input")
    if m.get("algorithm.entropy_bonus") and m.get(f"{section}.noise_method", "flow_sde") != "flow_noise":
        m.lines.pop("algorithm.entropy_coef")
        m.differ("algorithm.entropy_bonus", "has no gradient: the noise of this noise_method is fixed")


def _cameras(m: Migration, count: int) -> list[str]:
    """Write the cameras that the model sees, by the names of their simulator."""
    kind = m.get("env.train.env_type")
    of_maniskill = "base_camera" if m.groups["env"] == "maniskill/pick_cube_rgb" else "3rd_view_camera"
    known = {"libero": ["agentview", "wrist"], "metaworld": ["corner4"], "maniskill": [of_maniskill]}[kind]
    keys = ("actor.model.num_images_in_input", "actor.model.openpi.num_images_in_input")
    if count > len(known) and any(map(m.get, keys)):
        m.differ(next(key for key in keys if m.get(key)), f"this simulator has {len(known)} of them here")
    m.write("env.cameras", known[:count], *keys)
    return known[:count]


def _openvla(m: Migration) -> None:
    is_oft = m.groups["model"] == "openvla_oft"
    cameras = _cameras(m, m.count("actor.model.num_images_in_input", 1) if is_oft else 1)
    m.copy("model.unnorm_key", "actor.model.unnorm_key")
    _sampling(m)
    if is_oft:
        m.write("model.num_images", len(cameras), "actor.model.num_images_in_input")
        m.copy("model.use_proprio", "actor.model.use_proprio")
        key = "actor.model.implement_version"
        stops = m.get(key, "rlinf") != "rlinf"
        m.write("model.append_stop_token", stops, key, why="RLinf's own checkpoints have none")
    if m.get("env.train.env_type") == "maniskill":
        m.write("model.action_units", "metric", "actor.model.policy_setup")
    m.write("model.center_crop", False, why="RLinf crops no image, whatever center_crop says")


def _sampling(m: Migration) -> None:
    """Write how tokens are drawn: in rollouts, and in evaluation if its temperature is above 0."""
    section, key = "rollout.sampling_params", "rollout.sampling_params.temperature_eval"
    training, evaluation = m.number(f"{section}.temperature_train", 0.0), m.number(key, 0.0)
    m.copy("model.temperature", f"{section}.temperature_train", float)
    m.copy("model.top_k", f"{section}.top_k", lambda _: max(int(m.number(f"{section}.top_k", 0)), 0))
    m.copy("model.top_p", f"{section}.top_p", float)
    if key in m.source.values:
        m.write("eval.sample", evaluation > 0, key)
    if evaluation > 0 and evaluation != training:
        draws = f"evaluation draws as rollouts do, at {training}"
        m.differ(key, f"{draws}; `embodyrl eval` takes model.temperature={evaluation}")


def _pi(m: Migration) -> None:
    kind, is_05 = m.get("env.train.env_type"), m.groups["model"] == "pi05"
    cameras = _cameras(m, m.count("actor.model.openpi.num_images_in_input", 2))
    m.write("model.cameras", (cameras + ["absent"] * 3)[:3], why="openpi's images: base, left wrist, right wrist")
    m.write("model.denoising_steps", int(m.number("actor.model.num_steps", 10)), "actor.model.num_steps")
    m.switch("model.frozen", "language", "actor.model.openpi.train_expert_only")
    _flow(m, "actor.model.openpi")
    m.switch("model.value_from", "prefix", "actor.model.openpi.value_after_vlm")
    if is_05 and kind == "libero":
        m.write("model.state", "none", why="openpi's pi05_libero does not see the state")
    if kind == "metaworld":
        m.write("env.proprio", "robot", "actor.model.use_proprio")


def _pi_fast(m: Migration) -> None:
    cameras = _cameras(m, m.count("actor.model.openpi.num_images_in_input", 2))
    m.write("model.cameras", (cameras + ["absent"] * 3)[:3], why="openpi's images: base, left wrist, right wrist")
    _sampling(m)
    m.copy("model.detach_critic", "actor.model.openpi.detach_critic_input")
    for key in ("num_steps", "openpi.num_steps", "openpi.noise_method", "openpi.noise_level", "openpi.joint_logprob"):
        m.differ(f"actor.model.{key}", "tokens are chosen one after the other: there is no noise to remove")
    m.differ("actor.model.openpi.train_expert_only", "there is no action expert: the language model learns")
    m.differ("actor.model.openpi.value_after_vlm", "the critic reads the language model (model.value_from)")
    if m.lines["algorithm.logprob_level"].value == "action":
        m.write("algorithm.logprob_level", "chunk", why="tokens belong to whole chunks")
        m.differ("algorithm.logprob_type", "a token belongs to no single action: those of a chunk are summed")


def _gr00t(m: Migration) -> None:
    _any_gr00t(m)
    m.copy("model.prompt_length", "actor.model.rl_head_config.padding_value")
    m.write("model.padding", "right", why="as RLinf pads")
    m.write("model.center_crop", True, why="as RLinf")


def _gr00t_n17(m: Migration) -> None:
    """Write the settings of N1.6 and N1.7, whose loss is clipped twice."""
    _any_gr00t(m)
    m.write("model.count_clipped", True, why="RLinf counts noise that decoding clips")
    _backbone(m, "actor.model.backbone_model_path")
    head = "actor.model.rl_head_config"
    m.converted.add(f"{head}.disable_dropout")  # there is none here, either
    if m.get(f"{head}.value_vlm_mode", "mean_token") == "mean_token":
        m.converted.add(f"{head}.value_vlm_mode")
    if m.get(f"{head}.padding_value"):
        m.differ(
            f"{head}.padding_value",
            "prompts are as long as that of the longest task, because padding changes actions; model.prompt_length "
            "pads them, on the left as NVIDIA's processor does",
        )
    m.write("algorithm.loss.dual_clip", m.number("algorithm.clip_ratio_c", 3.0), "algorithm.clip_ratio_c")


def _backbone(m: Migration, key: str) -> None:
    """Write the folder of the vision-language model, if it is there."""
    folder = m.get(key)
    if folder and Path(str(folder)).is_dir():
        m.write("model.vlm", folder, key)
    elif folder:
        m.differ(key, f"{folder} is not here: name the folder with model.vlm")


def _any_gr00t(m: Migration) -> None:
    _cameras(m, 2)
    m.copy("model.embodiment_tag", "actor.model.embodiment_tag")
    m.copy("model.denoising_steps", "actor.model.denoising_steps")
    _flow(m, "actor.model.rl_head_config")
    m.write("model.gripper", "one_opens", why="of the data converted from LIBERO")
    m.write("model.freeze_vision", True, why="RLinf: tune_visual is off")
    m.write("model.freeze_language", True, why="RLinf: tune_llm is off")


def _rollout(m: Migration) -> None:
    chunk = m.count("actor.model.num_action_chunks", 1)
    limit = m.count("env.train.max_episode_steps", m.count("env.train.max_steps_per_rollout_epoch", 100))
    steps, repeats = m.count("env.train.max_steps_per_rollout_epoch", limit), m.count("env.train.rollout_epoch", 1)
    m.write("env.max_episode_steps", limit, "env.train.max_episode_steps")
    m.write("rollout.chunk_size", chunk, "actor.model.num_action_chunks")
    keys = [f"env.train.{name}" for name in ("max_steps_per_rollout_epoch", "rollout_epoch", "auto_reset")]
    reward, is_libero = m.lines["algorithm.reward"].value, m.get("env.train.env_type") == "libero"
    of_episodes = reward == "difference" or (reward == "success" and not is_libero)
    always_whole = steps % limit == 0 and (of_episodes or m.get("env.train.ignore_terminations", False))
    cuts, compares = m.get(keys[2]) and not always_whole, m.groups["algorithm"] != "ppo"
    if cuts and compares:
        m.differ(keys[2], "this advantage is of whole episodes here: those that a rollout cuts are left out")
    if cuts and not compares:
        m.write("rollout.num_chunks", repeats * max(steps // chunk, 1), *keys, why="divided by the chunk")
        if reward == "success" and is_libero:
            m.write("algorithm.reward", "dense", "env.train.use_rel_reward", why="LIBERO's own is 1 at success")
    else:
        m.write("rollout.episodes", "whole", keys[2])
        m.write("rollout.num_chunks", math.ceil(limit / chunk), keys[0], why="divided by the chunk")
        if steps < limit:
            early = f"rollouts end before episodes do ({limit} steps) there"
            m.differ(keys[0], f"{early}; here episodes are played to their end")
        m.write("rollout.episodes_per_slot", repeats * max(steps // limit, 1), keys[1])
    _groups(m)
    if (stages := int(m.number("rollout.pipeline_stage_num", 1))) > 1:
        m.write("rollout.schedule", "pipeline", "rollout.pipeline_stage_num")
        if stages > 2:
            m.differ("rollout.pipeline_stage_num", "a pipeline has two stages here")
    else:
        m.converted.add("rollout.pipeline_stage_num")


def _groups(m: Migration) -> None:
    """Write how many episodes begin alike, for an advantage that compares them."""
    size, own = m.count("algorithm.group_size", 1), m.count("env.train.group_size", 1)
    if m.groups["algorithm"] not in ("grpo", "dapo"):
        for key, value in (("algorithm.group_size", size), ("env.train.group_size", own)):
            m.converted.add(key)
            if value > 1:
                m.differ(key, "this advantage does not compare the episodes of a group: each begins for itself here")
        return
    m.write("rollout.group_size", size, "algorithm.group_size", "env.train.group_size")
    if size > 1 and own != size:
        states = math.ceil(size / own)
        key = "env.train.group_size" if "env.train.group_size" in m.source.values else "algorithm.group_size"
        m.differ(key, f"a group of {size} has {states} start states there, and one here")
    elif size > 1 and not m.get("env.train.use_fixed_reset_state_ids", False):
        why = "the episodes of a group begin differently there; here they share a start state"
        m.differ("env.train.use_fixed_reset_state_ids", why)


def _update(m: Migration) -> None:
    factors = ("env.num_envs", "rollout.episodes_per_slot", "rollout.num_chunks")
    rows = math.prod(m.lines[name].value for name in factors if name in m.lines)
    size = m.count("actor.global_batch_size", rows)
    if rows > MOST:
        remedy = "check env.train and actor.model.num_action_chunks"
        raise RLinfError(f"a rollout has {rows} chunks, more than {MOST}", remedy)
    default = "" if "algorithm.update_epoch" in m.source.values else "RLinf's default"
    m.write("algorithm.epochs", int(m.number("algorithm.update_epoch", 1)), "algorithm.update_epoch", why=default)
    if "actor.global_batch_size" in m.source.values:
        wanted = max(round(rows / size), 1)
        small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
        count = min(sorted({*small, *(rows // n for n in small)}), key=lambda n: abs(n - wanted))
        m.write("algorithm.minibatches", count, "actor.global_batch_size", why=f"{size} of {rows} chunks")
        if count * size != rows:
            m.differ("actor.global_batch_size", f"{rows} chunks are split into {count} minibatches of {rows // count}")
    m.copy("engine.micro_batch_size", "actor.micro_batch_size")
    m.copy("seed", "actor.seed")
    recompute = "actor.fsdp_config.gradient_checkpointing"
    if m.groups["model"] not in NO_WEIGHTS:
        m.switch("engine.gradient_checkpointing", True, recompute)
    elif m.get(recompute):
        m.differ(recompute, "this model is small enough to do without")
    if not m.switch("engine.offload", "all", "actor.enable_offload"):
        m.converted.add("actor.enable_offload")


def _optimizer(m: Migration) -> None:
    m.copy("engine.optimizer.lr", "actor.optim.lr", float)
    if m.groups["algorithm"] == "ppo":
        m.copy("engine.optimizer.critic_lr", "actor.optim.value_lr", float)
    else:
        m.differ("actor.optim.value_lr", "there is no critic")
    betas = [m.number(f"actor.optim.adam_beta{n}", default) for n, default in ((1, 0.9), (2, 0.999))]
    m.write("engine.optimizer.betas", betas, "actor.optim.adam_beta1", "actor.optim.adam_beta2")
    for ours, theirs in (("eps", "adam_eps"), ("weight_decay", "weight_decay"), ("max_grad_norm", "clip_grad")):
        m.copy(f"engine.optimizer.{ours}", f"actor.optim.{theirs}", float)
    schedule = str(m.get("actor.optim.lr_scheduler", "constant")).removeprefix("torch_")
    if schedule in ("constant", "linear", "cosine"):
        m.copy("engine.optimizer.schedule", "actor.optim.lr_scheduler", lambda _: schedule)
    if not m.get("actor.optim.critic_warmup_steps"):
        m.converted.add("actor.optim.critic_warmup_steps")


def _evaluation(m: Migration) -> None:
    episodes = EvalConfig.episodes
    if "env.eval.total_num_envs" in m.source.values:
        keys = ("env.eval.total_num_envs", "env.eval.rollout_epoch", "env.eval.max_steps_per_rollout_epoch")
        episodes = m.count(keys[0], episodes) * m.count(keys[1], 1)
        if m.get("env.eval.auto_reset"):
            limit = m.count("env.eval.max_episode_steps", MOST)
            episodes *= max(m.count(keys[2], limit) // limit, 1)
        tasks = m.lines["env.tasks"].value if "env.tasks" in m.lines else range(10)
        states = OFFICIAL_STATES * len(tasks) if m.get("env.train.env_type") == "libero" else episodes
        why = f"there are {states} start states" if states < episodes else ""
        episodes = min(episodes, states)
        m.write("eval.episodes", episodes, *keys, why=why)
    videos = min(4, episodes)
    m.switch("tracking.video.episodes", videos, "env.eval.video_cfg.save_video", why="RLinf records all")


def _run(m: Migration) -> None:
    if not m.get("reward.use_reward_model"):
        m.converted |= {key for key in m.source.values if key.startswith("reward.")} - {"reward.use_reward_model"}
    m.copy("run.name", "runner.logger.experiment_name", _folder_name)
    keys = ("runner.max_epochs", "runner.max_steps")
    if limits := [limit for key in keys if (limit := int(m.number(key, -1))) > 0]:
        m.write("run.iterations", min(limits), *keys)
    for ours, theirs in (("run.eval_every", "val_check_interval"), ("run.save_every", "save_interval")):  # -1: never
        m.copy(ours, f"runner.{theirs}", lambda every: max(every, 0) if isinstance(every, int) else every)
    backends = m.get("runner.logger.logger_backends", [])
    backends = list(dict.fromkeys(map(str, backends if isinstance(backends, list) else [backends])))
    known = [name for name in backends if name in SINKS]
    m.write("tracking.sinks", [*dict.fromkeys(["console", "jsonl", *known])], "runner.logger.logger_backends")
    if unknown := [name for name in backends if name not in known]:
        m.differ("runner.logger.logger_backends", f"no sink {', '.join(unknown)}")


def _folder_name(text: Any) -> str:
    """Return a text that is legal as the name of a run."""
    name = "".join(letter if letter.isprintable() and letter != "/" else "-" for letter in str(text)).strip(" .")
    return name.encode()[:LONGEST].decode(errors="ignore") or RunConfig.name
