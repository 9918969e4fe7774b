"""Converts a config of RLinf for robots into one of embodyrl, and accounts for every key of it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.config.rlinf_files import RLinfConfig, RLinfError
from embodyrl.config.rlinf_notes import DEAD, NEEDLESS
from embodyrl.config.rules import known_tasks
from embodyrl.registry import SINKS

MISSING = object()
OFF = (None, False, -1, "", "None")
"""Values that ask for nothing (and 0, which equals False)."""
ON_POLICY = {"gae": "ppo", "grpo": "grpo", "reinpp": "reinforce_pp"}
"""Advantages of RLinf, and the algorithm group that has the same."""
LOSSES = ("actor", "actor_critic", "decoupled_actor_critic")
INSTEAD = {
    "embodied_dagger": "algorithm: dagger",
    "offline_iql": "algorithm: iql",
    "embodied_sac": "algorithm: sac",
    "rlt_ac": "algorithm: sac",
    "rlt_td3": "algorithm: sac",
}
"""Losses with a counterpart whose settings differ too much to be converted."""
MODELS = {
    "mlp_policy": "mlp",
    "cnn_policy": "cnn",
    "openvla": "openvla",
    "openvla_oft": "openvla_oft",
    "openpi": "pi0",
    "openpi_rlinf": "pi0",
    "gr00t": "gr00t",
}
SUITES = {
    "libero_spatial": "libero/spatial",
    "libero_object": "libero/object",
    "libero_goal": "libero/goal",
    "libero_10": "libero/long",
    "metaworld_50": "metaworld/mt50",
}
NO_WEIGHTS = ("mlp", "cnn")
"""Models that begin with random weights."""


@dataclass(frozen=True)
class Line:
    """A setting to write, and the keys it comes from."""

    value: Any
    note: str


@dataclass
class Migration:
    """A converted config.

    Args:
        source: the values to convert.
    """

    source: RLinfConfig
    groups: dict[str, str] = field(default_factory=dict)
    """Choices of `defaults`."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Settings by full name."""
    converted: dict[str, str] = field(default_factory=dict)
    """Keys of RLinf, and the setting that has their value."""
    differs: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, or with one that is not quite the same, and the reason."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent."""
        value = self.source.values.get(key)
        return default if value is None or value == "None" else value

    def number(self, key: str, default: float) -> float:
        """Return a value as a number.

        Raises:
            RLinfError: it is none.
        """
        value = self.get(key, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RLinfError(f"{key} = {value!r} is no number", "write the number that it stands for") from None

    def whole(self, key: str, default: int) -> int:
        """Return a value as a whole number."""
        return int(self.number(key, default))

    def write(self, setting: str, value: Any, *keys: str, why: str = "") -> None:
        """Write a setting whose value follows from `keys`; those that are absent are left out."""
        present = [key for key in keys if key in self.source.values]
        self.converted |= dict.fromkeys(present, setting)
        note = " and ".join(present)
        self.lines[setting] = Line(value, f"{note}: {why}" if note and why else note or why)

    def copy(self, setting: str, key: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> None:
        """Write a setting that has the value of one key, if that is there."""
        if (value := self.get(key, MISSING)) is not MISSING:
            self.write(setting, self.number(key, 0.0) if convert is float else convert(value), key, why=why)

    def differ(self, key: str, why: str) -> None:
        """Account for a key that cannot be converted, if it is there."""
        if key in self.source.values:
            self.differs[key] = why

    @property
    def dead(self) -> dict[str, str]:
        """Keys without effect in RLinf, and the reason."""
        return {key: why for key, why in DEAD.items() if key in self._left and key not in self.differs}

    @property
    def needless(self) -> dict[str, str]:
        """Keys for which there is nothing to set here, and the reason."""
        found = {}
        for key in self._left:
            if key not in self.differs and key not in DEAD:
                pattern = next((pattern for pattern in NEEDLESS if fnmatch.fnmatchcase(key, pattern)), None)
                if pattern is not None:
                    found[key] = NEEDLESS[pattern]
                elif self.source.values[key] in OFF:
                    found[key] = "off, or not given"
        return found

    @property
    def without_counterpart(self) -> dict[str, str]:
        """Keys that have none here, or one that is not quite the same, and the reason if it is known."""
        known = {**self.dead, **self.needless}
        return {key: self.differs.get(key, "") for key in self._left if key not in known} | self.differs

    @property
    def _left(self) -> list[str]:
        return [key for key in self.source.values if key not in self.converted]


def convert(source: RLinfConfig) -> Migration:
    """Convert a config.

    Raises:
        RLinfError: its algorithm, model or simulator has no counterpart.
    """
    found = Migration(source)
    for convert_part in (_algorithm, _simulator, _model, _rollout, _update, _optimizer, _evaluation, _run):
        convert_part(found)
    return found


def _refuse(key: str, value: Any, hint: str) -> RLinfError:
    return RLinfError(f"{key} = {value} of RLinf has no counterpart", hint)


def _algorithm(m: Migration) -> None:
    advantage, loss = m.get("algorithm.adv_type", "none"), m.get("algorithm.loss_type", "none")
    if loss not in LOSSES or advantage not in ON_POLICY:
        key, value = ("algorithm.loss_type", loss) if loss not in LOSSES else ("algorithm.adv_type", advantage)
        instead = f"{INSTEAD[loss]} comes near; " if loss in INSTEAD else ""
        raise _refuse(key, value, f"{instead}gae, grpo and reinpp with {', '.join(LOSSES)} can be converted")
    m.groups["algorithm"] = ON_POLICY[advantage]
    m.converted |= {"algorithm.adv_type": "defaults: algorithm", "algorithm.loss_type": "algorithm.loss"}
    if loss == "decoupled_actor_critic":
        m.write("algorithm.loss.name", "decoupled_ppo", "algorithm.loss_type")
        m.differ("algorithm.loss_type", "asynchronous there; here: placement.rollout.workers=N rollout.mode=async")
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
            m.differ(
                "algorithm.reward_type", "a critic predicts values of chunks here, and a chunk's rewards are summed"
            )
        if m.get("algorithm.bootstrap_type") == "always":
            m.differ("algorithm.bootstrap_type", "only episodes that the time limit cuts off are bootstrapped here")
    else:
        for key in ("gae_lambda", "value_clip", "huber_delta", "bootstrap_type"):
            m.differ(f"algorithm.{key}", "there is no critic")
        m.differ("algorithm.reward_type", "episodes are compared by their return")
    for key in ("reward_type", "bootstrap_type"):
        if f"algorithm.{key}" not in m.differs and f"algorithm.{key}" in m.source.values:
            m.converted[f"algorithm.{key}"] = "the same by default"
    if m.get("algorithm.filter_rewards"):
        coef = m.number("env.train.reward_coef", 1.0)
        bounds = [m.number(f"algorithm.rewards_{end}_bound", default) / coef for end, default in BOUNDS]
        keys = ["algorithm.filter_rewards", "algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound"]
        m.groups["algorithm"] = "dapo"  # whose iteration has a stage that filters
        m.write("algorithm.max_collections", 1, why="RLinf learns from the groups that are left")
        m.write("algorithm.filter.name", "accuracy", keys[0])
        m.write("algorithm.filter.accuracy_low", bounds[0], keys[1], why="divided by reward_coef")
        m.write("algorithm.filter.accuracy_high", bounds[1], keys[2], why="divided by reward_coef")
    else:
        for key in ("filter_rewards", "rewards_lower_bound", "rewards_upper_bound"):
            m.converted[f"algorithm.{key}"] = "off"


BOUNDS = (("lower", 0.1), ("upper", 0.9))


def _simulator(m: Migration) -> None:
    kind, suite = m.get("env.train.env_type"), m.get("env.train.task_suite_name")
    if kind is None:
        files = ", ".join(m.source.missing) or "env.train.env_type"
        raise RLinfError(
            f"{m.source.path} does not say its simulator: {files} is missing",
            "keep the folders env/ and model/ beside it, as in examples/embodiment/config",
        )
    m.converted |= {"env.train.env_type": "defaults: env", "env.train.task_suite_name": "defaults: env"}
    if kind == "maniskill":
        _maniskill(m)
    elif kind in ("libero", "metaworld") and suite in SUITES:
        m.groups["env"] = SUITES[suite]
    elif kind == "libero" and suite in ("libero_90", "libero_130"):
        m.groups["env"] = "libero/spatial"
        chosen = [task for task in known_tasks(kind) or () if suite == "libero_130" or task.startswith("libero_90/")]
        m.write("env.tasks", chosen, "env.train.task_suite_name")
    else:
        known = "libero (spatial, object, goal, 10, 90, 130), maniskill and metaworld_50 can be converted"
        what = f"{kind} {suite or ''}".strip()
        raise _refuse("env.train.env_type", what, f"{known}; to add a simulator, see docs/simulators.md")
    if kind in ("libero", "metaworld"):
        m.write("algorithm.reward", "success", "env.train.use_rel_reward", why="the success of a step counts once")
        if m.get("env.train.use_step_penalty"):
            m.write("algorithm.time_penalty", 1.0, "env.train.use_step_penalty")
    if kind == "libero":
        m.write("env.share_start_states", True, why="RLinf evaluates on the start states of training, too")
    m.write("env.num_envs", m.whole("env.train.total_num_envs", 8), "env.train.total_num_envs")
    m.copy("env.max_episode_steps", "env.train.max_episode_steps")
    m.write("env.end_at_success", not m.get("env.train.ignore_terminations", False), "env.train.ignore_terminations")
    m.copy("algorithm.reward_scale", "env.train.reward_coef", float)
    height, width = (m.get(f"env.train.init_params.camera_{side}s") for side in ("height", "width"))
    if height and width:
        sides = ("env.train.init_params.camera_heights", "env.train.init_params.camera_widths")
        m.write("env.image_size", [height, width], *sides)
    if m.get("env.train.enable_offload"):
        m.write("env.offload", True, "env.train.enable_offload")


def _maniskill(m: Migration) -> None:
    task = m.get("env.train.init_params.id", "")
    images = m.get("env.train.init_params.obs_mode", "state") != "state"
    m.groups["env"] = "maniskill/put_carrot" if images else "maniskill/push_cube"
    m.write("env.tasks", [task], "env.train.init_params.id", "env.train.init_params.obs_mode")
    m.copy("env.control_mode", "env.train.init_params.control_mode")
    if m.get("env.train.init_params.sim_backend") == "gpu":
        m.write("env.sim", "gpu", "env.train.init_params.sim_backend", why="cpu needs no GPU")
    modes = {"raw": ("dense", "dense"), "normalized_dense": ("normalized_dense", "dense")}
    mode, reward = modes.get(m.get("env.train.reward_mode", "raw"), ("sparse", "success"))
    m.write("env.reward_mode", mode, "env.train.reward_mode")
    if m.get("env.train.use_rel_reward") and reward == "dense":
        reward = "difference"
    m.write("algorithm.reward", reward, "env.train.reward_mode", "env.train.use_rel_reward")


def _model(m: Migration) -> None:
    kind = m.get("actor.model.model_type") or m.get("actor.model.model_name")
    if kind not in MODELS:
        raise _refuse("actor.model.model_type", kind, f"these have one: {', '.join(MODELS)}")
    name = MODELS[kind]
    if str(m.get("actor.model.openpi.config_name", "")).startswith("pi05"):
        name = "pi05"
    m.groups["model"] = name
    for key in ("model_type", "model_name", "openpi.config_name"):
        if f"actor.model.{key}" in m.source.values:
            m.converted[f"actor.model.{key}"] = "defaults: model"
    if name in NO_WEIGHTS:
        m.converted["actor.model.model_path"] = "model.checkpoint"
        if name == "mlp":
            m.write("model.hidden_sizes", [256, 256, 256], why="RLinf's are fixed")
        return
    path = str(m.get("actor.model.model_path", ""))
    is_here = path and Path(path).is_dir()
    m.write("model.checkpoint", path if is_here else "<weights>", "actor.model.model_path", why="" if is_here else path)
    m.write(
        "model.dtype",
        "float32" if str(m.get("actor.model.precision")) in ("32", "fp32") else "bfloat16",
        "actor.model.precision",
    )
    if m.get("actor.model.is_lora"):
        m.write("engine.lora.rank", m.get("actor.model.lora_rank", 32), "actor.model.is_lora", "actor.model.lora_rank")
    else:
        m.converted |= {"actor.model.is_lora": "engine.lora.rank 0", "actor.model.lora_rank": "engine.lora.rank 0"}
    {"gr00t": _gr00t, "pi0": _pi, "pi05": _pi}.get(name, _openvla)(m)


def _cameras(m: Migration, count: int) -> list[str]:
    """Write the cameras that the model sees, by the names of their simulator."""
    kind = m.get("env.train.env_type")
    known = {"libero": ["agentview", "wrist"], "metaworld": ["corner4"], "maniskill": ["3rd_view_camera"]}[kind]
    keys = ("actor.model.num_images_in_input", "actor.model.openpi.num_images_in_input")
    m.write("env.cameras", known[:count], *keys)
    return known[:count]


def _openvla(m: Migration) -> None:
    is_oft = m.groups["model"] == "openvla_oft"
    cameras = _cameras(m, m.whole("actor.model.num_images_in_input", 1))
    m.copy("model.unnorm_key", "actor.model.unnorm_key")
    m.copy("model.center_crop", "actor.model.center_crop")
    m.copy("model.temperature", "rollout.sampling_params.temperature_train", float)
    if m.whole("rollout.sampling_params.top_k", -1) > 0:
        m.copy("model.top_k", "rollout.sampling_params.top_k")
    m.copy("model.top_p", "rollout.sampling_params.top_p", float)
    if m.number("rollout.sampling_params.temperature_eval", 0.0) > 0:
        m.write("eval.sample", True, "rollout.sampling_params.temperature_eval", "rollout.sampling_params.do_sample")
    if is_oft:
        m.write("model.num_images", len(cameras), "actor.model.num_images_in_input")
        m.copy("model.use_proprio", "actor.model.use_proprio")
        m.write(
            "model.append_stop_token",
            m.get("actor.model.implement_version", "rlinf") != "rlinf",
            "actor.model.implement_version",
            why="RLinf's own checkpoints have none",
        )
    if m.get("env.train.env_type") == "maniskill":
        m.write("model.action_units", "metric", "actor.model.policy_setup")


def _pi(m: Migration) -> None:
    kind, is_05 = m.get("env.train.env_type"), m.groups["model"] == "pi05"
    cameras = _cameras(m, m.whole("actor.model.openpi.num_images_in_input", 2))
    m.write("model.cameras", (cameras + ["absent"] * 3)[:3], why="openpi's images: base, left wrist, right wrist")
    m.write("model.denoising_steps", m.whole("actor.model.num_steps", 10), "actor.model.num_steps")
    if m.get("actor.model.openpi.train_expert_only", False):
        m.write("model.frozen", "language", "actor.model.openpi.train_expert_only")
    m.copy("model.noise_method", "actor.model.openpi.noise_method")
    m.copy("model.noise_level", "actor.model.openpi.noise_level")
    m.copy("model.joint_logprob", "actor.model.openpi.joint_logprob")
    m.copy("model.detach_critic", "actor.model.openpi.detach_critic_input")
    if m.get("actor.model.openpi.value_after_vlm"):
        m.write("model.value_from", "prefix", "actor.model.openpi.value_after_vlm")
    if is_05 and kind == "libero":
        m.write("model.state", "none", why="openpi's pi05_libero does not see the state")
    if kind == "metaworld":
        m.write("env.proprio", "robot", "actor.model.use_proprio")


def _gr00t(m: Migration) -> None:
    _cameras(m, 2)
    m.copy("model.embodiment_tag", "actor.model.embodiment_tag")
    m.copy("model.denoising_steps", "actor.model.denoising_steps")
    m.copy("model.noise_method", "actor.model.rl_head_config.noise_method")
    m.copy("model.noise_level", "actor.model.rl_head_config.noise_level")
    m.copy("model.joint_logprob", "actor.model.rl_head_config.joint_logprob")
    m.copy("model.detach_critic", "actor.model.rl_head_config.detach_critic_input")
    m.copy("model.prompt_length", "actor.model.rl_head_config.padding_value")
    m.write("model.padding", "right", why="as RLinf pads")
    m.write("model.center_crop", True, why="as RLinf")
    m.write("model.gripper", "one_opens", why="of the data converted from LIBERO")
    m.write("model.freeze_vision", True, why="RLinf: tune_visual is off")
    m.write("model.freeze_language", True, why="RLinf: tune_llm is off")


def _rollout(m: Migration) -> None:
    chunk = m.whole("actor.model.num_action_chunks", 1)
    steps = m.whole("env.train.max_steps_per_rollout_epoch", 0) or m.whole("env.train.max_episode_steps", 100)
    repeats, limit = m.whole("env.train.rollout_epoch", 1), m.whole("env.train.max_episode_steps", steps)
    m.write("rollout.chunk_size", chunk, "actor.model.num_action_chunks")
    keys = ("env.train.max_steps_per_rollout_epoch", "env.train.rollout_epoch", "env.train.auto_reset")
    reward, is_libero = m.lines["algorithm.reward"].value, m.get("env.train.env_type") == "libero"
    of_episodes = reward == "difference" or (reward == "success" and not is_libero)
    always_whole = steps % limit == 0 and (of_episodes or m.get("env.train.ignore_terminations", False))
    if m.get("env.train.auto_reset") and not always_whole:
        m.write("rollout.num_chunks", repeats * (steps // chunk), *keys, why="divided by the chunk")
        if reward == "success" and is_libero:
            m.write("algorithm.reward", "dense", "env.train.use_rel_reward", why="LIBERO's own is 1 at success")
    else:
        m.write("rollout.episodes", "whole", "env.train.auto_reset")
        m.write("rollout.num_chunks", math.ceil(min(steps, limit) / chunk), keys[0], why="divided by the chunk")
        repeats *= max(steps // limit, 1)
        m.write("rollout.episodes_per_slot", repeats, "env.train.rollout_epoch")
    size, own = m.whole("algorithm.group_size", 1), m.whole("env.train.group_size", 1)
    m.write("rollout.group_size", size, "algorithm.group_size", "env.train.group_size")
    if size > 1 and own != size:
        m.differ("env.train.group_size", f"a group of {size} has {size // own} start states there, and one here")
    if m.whole("rollout.pipeline_stage_num", 1) > 1:
        m.write("rollout.schedule", "pipeline", "rollout.pipeline_stage_num")
    else:
        m.converted["rollout.pipeline_stage_num"] = "rollout.schedule lockstep"


def _update(m: Migration) -> None:
    rollout = [m.lines[name].value if name in m.lines else 1 for name in ROWS]
    rows, size = math.prod(rollout), m.whole("actor.global_batch_size", 0)
    default = "" if "algorithm.update_epoch" in m.source.values else "RLinf's default"
    m.write("algorithm.epochs", m.whole("algorithm.update_epoch", 1), "algorithm.update_epoch", why=default)
    if size:
        wanted = max(round(rows / size), 1)
        count = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: abs(n - wanted))
        m.write("algorithm.minibatches", count, "actor.global_batch_size", why=f"{size} of {rows} chunks")
        if count * size != rows:
            m.differ("actor.global_batch_size", f"{rows} chunks are split into {count} minibatches of {rows // count}")
    m.copy("engine.micro_batch_size", "actor.micro_batch_size")
    m.copy("seed", "actor.seed")
    if m.get("actor.fsdp_config.gradient_checkpointing"):
        m.write("engine.gradient_checkpointing", True, "actor.fsdp_config.gradient_checkpointing")
    if m.get("actor.enable_offload"):
        m.write("engine.offload", "all", "actor.enable_offload")
    else:
        m.converted["actor.enable_offload"] = "engine.offload none"


ROWS = ("env.num_envs", "rollout.episodes_per_slot", "rollout.num_chunks")


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
        m.converted["actor.optim.critic_warmup_steps"] = "none"


def _evaluation(m: Migration) -> None:
    envs, repeats = m.whole("env.eval.total_num_envs", 0), m.whole("env.eval.rollout_epoch", 1)
    if envs:
        m.write("eval.episodes", envs * repeats, "env.eval.total_num_envs", "env.eval.rollout_epoch")
    if m.get("env.eval.video_cfg.save_video"):
        m.write("tracking.video.episodes", 4, "env.eval.video_cfg.save_video", why="RLinf records all")


def _run(m: Migration) -> None:
    m.copy("run.name", "runner.logger.experiment_name", str)
    limits = [m.whole(f"runner.{key}", -1) for key in ("max_epochs", "max_steps")]
    if any(limit > 0 for limit in limits):
        m.write("run.iterations", min(limit for limit in limits if limit > 0), "runner.max_epochs", "runner.max_steps")
    m.copy("run.eval_every", "runner.val_check_interval", _no_less_than_0)
    m.copy("run.save_every", "runner.save_interval", _no_less_than_0)
    backends = m.get("runner.logger.logger_backends", [])
    m.write("tracking.sinks", ["console", "jsonl", *known_sinks(backends)], "runner.logger.logger_backends")
    unknown = [name for name in backends if name not in known_sinks(backends)]
    if unknown:
        m.differ("runner.logger.logger_backends", f"no sink {', '.join(unknown)}")


def _no_less_than_0(every: Any) -> Any:
    """Return how often something is done; RLinf writes -1 for never."""
    return max(every, 0) if isinstance(every, int) else every


def known_sinks(names: Sequence[str]) -> list[str]:
    """Return those of RLinf's loggers that exist here."""
    return [name for name in names if name in SINKS]
