"""A config of RLinf while it is converted: settings to write, and what becomes of each key."""

from __future__ import annotations

import fnmatch
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.config.build import inline
from embodyrl.migrate.files import RLinfConfig, RLinfError, is_open
from embodyrl.screen import counted

MISSING = object()
OPEN = "what OmegaConf would compute is not known here: write the value that it stands for"
"""What is said of a value that is left as it is written."""
UNKNOWN = "no setting here is known to mean it"
LONGEST = 80
"""Characters of a value that a message shows."""
MOST = 10**9
"""Largest number of envs, steps, episodes that is read."""


@dataclass(frozen=True)
class Line:
    """A setting to write, and the keys it comes from."""

    value: Any
    note: str


@dataclass
class Migration:
    """A converted config."""

    source: RLinfConfig
    groups: dict[str, str] = field(default_factory=dict)
    """Choices of `defaults`."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Settings by full name."""
    converted: set[str] = field(default_factory=set)
    """Keys whose meaning the result has."""
    differs: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, or with one that is not quite the same, and the reason."""
    written: dict[str, str] = field(default_factory=dict)
    """Keys as the file writes them; RLinf may have them in another place now."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent, and so does a text that a resolver would replace, which is noted."""
        value = self.source.values.get(key)
        if is_open(value):
            self.differs[key] = OPEN
            return default
        return default if value is None or value == "None" else value

    def number(self, key: str, default: float) -> float:
        """Return a value as a number.

        Raises:
            RLinfError: it is none.
        """
        value = self.get(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RLinfError(f"{key} = {shown(value)} is no number", "write the number that it stands for")
        return number

    def count(self, key: str, default: int) -> int:
        """Return how many there are of something.

        Raises:
            RLinfError: it is no number, or none that something can be counted by.
        """
        value = int(self.number(key, default))
        if not 1 <= value <= MOST:
            raise RLinfError(f"{key} = {value} is not within 1 .. {MOST}", "write how many there are")
        return value

    def write(self, setting: str, value: Any, *keys: str, why: str = "") -> None:
        """Write a setting whose value follows from `keys`; those that are absent are left out."""
        present = [key for key in keys if key in self.source.values]
        self.converted |= {key for key in present if not is_open(self.source.values[key])}
        note = " and ".join(self.written[key] for key in present)
        self.lines[setting] = Line(value, ": ".join(filter(None, (note, why))))

    def copy(self, setting: str, key: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Write a setting that has the value of one key, if that is there."""
        if (value := self.get(key, MISSING)) is not MISSING:
            self.write(setting, self.number(key, 0.0) if convert is float else convert(value), key)

    def switch(self, setting: str, value: Any, key: str, why: str = "") -> bool:
        """Write a setting that a key asks for, if it does; returns whether it does."""
        if asks := bool(self.get(key)):
            self.write(setting, value, key, why=why)
        return asks

    def differ(self, key: str, why: str) -> None:
        """Account for a key that cannot be converted, if it is there."""
        if key in self.source.values:
            self.differs[key] = why

    @property
    def dead(self) -> dict[str, str]:
        """Keys without effect in RLinf, and the reason."""
        left = self.source.values.keys() - self.converted - self.differs.keys()
        return {key: why for key, why in DEAD.items() if key in left}

    @property
    def needless(self) -> dict[str, str]:
        """Keys for which there is nothing to set here, and the reason."""
        return {key: why for key, (needless, why) in self._explained() if needless}

    @property
    def without_counterpart(self) -> dict[str, str]:
        """Keys that have none here, or one that is not quite the same, and the reason if it is known."""
        return {key: why for key, (needless, why) in self._explained() if not needless} | self.differs

    def _explained(self) -> list[tuple[str, tuple[bool, str]]]:
        """Return keys that are left, whether there is nothing to set for each, and the reason: both depend on its
        value."""
        known = {*self.converted, *self.differs, *DEAD}
        return [(key, self._explain(key, value)) for key, value in self.source.values.items() if key not in known]

    def _explain(self, key: str, value: Any) -> tuple[bool, str]:
        for patterns, note in NOTES.items():
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns.split()):
                return note.of(value)
        for theirs, (ours, why) in TWINS.items():
            twin = ours + key.removeprefix(theirs)
            if key.startswith(theirs) and value not in ABSENT:
                there = self.source.values.get(twin)
                return (True, why) if value == there else (False, f"{why}, and {twin} = {there}")
        if is_open(value):
            return False, OPEN
        asks_for_nothing = value is False or value in ABSENT or value == -1
        return asks_for_nothing, "off, or not given" if asks_for_nothing else UNKNOWN


def shown(value: Any) -> str:
    """Return a value of a stranger's file as short text for a message."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


# -------------------------------------------------------------------------------------------------- what each key means

DEAD = {
    "algorithm.kl_beta": "robots have no reference policy there (here: algorithm.kl_coef)",
    "algorithm.kl_penalty": "read for language models only",
    "algorithm.normalize_advantages": "not read: advantages are always normalised there, per rank",
    "algorithm.loss_agg_func": "not read: the loss is always a mean over valid tokens",
    "algorithm.clip_ratio_c": "dual clipping is passed on for GR00T N1.6, N1.7 and asynchronous PPO only",
    "algorithm.reward_coef": "not read: the factor is env.train.reward_coef",
    "algorithm.use_fixed_reset_state_ids": "not read: env.train has the setting",
    "rollout.backend": "not read for robots: training always infers with Hugging Face's models",
    "rollout.generation_backend": "not read for robots: training always infers with Hugging Face's models",
    "rollout.rollout_backend": "read by RLinf's evaluation only, which can infer with SGLang",
    "rollout.recompute_logprobs": "not read for robots (here: algorithm.old_logprobs)",
    "rollout.unnorm_key": "not read: actor.model has the setting",
    "algorithm.staleness_threshold": "read by asynchronous PPO only",
    "algorithm.behave_weight_threshold": "read by asynchronous PPO only",
    "env.enable_offload": "not read: env.train and env.eval have the setting",
    "runner.eval_policy_path": "not read",
    "runner.num_updates_per_step": "not read",
    "actor.model.hidden_dim": "not read: the layers of the MLP are fixed to 256, 256, 256",
    "actor.model.vh_mode": "not read",
    "actor.model.center_crop": "put into the model's config, where nothing reads it: images are resized as a whole",
}
"""Without effect in RLinf, for robots on FSDP: documented or shipped keys that no code
reads. Each counts as such only if it is not converted."""

ANY = ("any",)
"""Stands for every value."""


@dataclass(frozen=True)
class Note:
    """What a key means here that no setting takes over."""

    why: str
    """Reason why there is nothing to set, for `values`."""
    values: tuple[Any, ...] = ANY
    """Values that mean what is done here anyway; a key without a value, or with null, always does."""
    otherwise: str = ""
    """What is said of other values, which have no exact counterpart; empty: the same."""

    def of(self, value: Any) -> tuple[bool, str]:
        """Return whether there is nothing to set for this value, and the reason."""
        if self.values is ANY or any(value == known and type(value) is type(known) for known in self.values):
            return True, self.why
        return (True, NOT_GIVEN) if value in ABSENT else (False, self.otherwise or self.why)


ABSENT = (None, "", "None")
"""Values that give none."""
NOT_GIVEN = "not given"


def never(otherwise: str) -> Note:
    """Return the note of keys that have no exact counterpart, whatever their value."""
    return Note("", (), otherwise)


def only_if(value: Any, why: str, otherwise: str = "") -> Note:
    """Return the note of a key that asks for nothing with this value."""
    return Note(why, (value,), otherwise)


_FSDP = "engine.parallel.backend chooses between replicas, fsdp and hsdp by memory"
_REWARD_MODEL = "part of the learned reward"
_STARTS = "start states follow from seed, env and episode"
_SUCCESS = "an evaluation counts the episodes that succeed at any time"
_RECORDED = "episodes are recorded with `embodyrl collect`"

NOTES: dict[str, Note] = {
    "*.group_name": Note("processes have no names to choose"),
    "runner.task_type": Note("the task follows from the other settings"),
    "runner.logger.log_path runner.logger.project_name": Note("a run's folder is runs/<name>/<time>, or run.dir"),
    "runner.only_eval": only_if(False, "off", "what is written here trains; evaluate with `embodyrl eval CHECKPOINT`"),
    "runner.resume_dir": never("a run continues with `embodyrl resume RUN`"),
    "runner.ckpt_path": never("weights to start from are model.checkpoint; evaluate with `embodyrl eval CHECKPOINT`"),
    "runner.max_steps": Note("iterations are the only limit, run.iterations"),
    "runner.weight_sync_interval": only_if(1, "rollouts act with the newest weights"),
    "actor.optim.critic_warmup_steps": never("the policy learns from the first step here, as the critic does"),
    "cluster.*": Note("processes are placed by `placement` and engine.parallel.world_size; `embodyrl plan` shows how"),
    "actor.model.precision": Note("small models compute in float32", ("32", "fp32", 32)),
    "actor.model.is_lora": only_if(False, "off", "small models learn with all weights"),
    "actor.model.lora_rank": Note("small models learn with all weights"),
    "actor.model.lora_path": Note("not read without is_lora"),
    "weight_syncer.*": Note("rollout and training share one set of weights: nothing is synchronised"),
    "rollout.enable_offload": Note("rollout and training share one set of weights: there is no second one to offload"),
    "rollout.enable_torch_compile": Note("engine.cuda_graphs decides about speed; results are the same"),
    "rollout.enable_cuda_graph": Note("engine.cuda_graphs decides about speed; results are the same"),
    "rollout.collect_*": Note("a rollout keeps what its update needs"),
    "rollout.sampling_params.repetition_penalty": Note(
        "none", (1.0, 1), "no penalty for repeated tokens here: action tokens are no prose"
    ),
    "rollout.sampling_params.do_sample": only_if(True, "rollouts always draw actions"),
    "rollout.sampling_params.max_new_tokens algorithm.length_params.*": Note("an action has as many tokens as it has"),
    "actor.model.proprio_dim": Note("the simulator's states have as many numbers as they have"),
    "actor.training_backend": only_if("fsdp", "there is one", "torch's own parallelism trains here"),
    "actor.fsdp_config.amp_autocast.enabled": only_if(False, "off", "engine.precision decides about autocasting"),
    "actor.fsdp_config.amp_autocast.precision": Note("engine.precision decides about autocasting"),
    "actor.fsdp_config.grad_scaler.enabled": only_if(False, "off", "gradients are not scaled here"),
    "actor.fsdp_config.mixed_precision.*": Note("engine.precision decides about number formats"),
    "actor.fsdp_config.*": Note(_FSDP),
    "actor.model.policy_setup": Note("env.control_mode and the simulator say it"),
    "actor.model.trust_remote_code": Note("no code of a checkpoint is run"),
    "actor.model.low_cpu_mem_usage": Note("always so"),
    "actor.model.attn_implementation": Note("torch chooses the kernel"),
    "actor.model.action_dim actor.model.obs_dim actor.model.openpi.action_env_dim": Note("the simulator says it"),
    "actor.model.value_type": only_if(
        "chunk_level",
        "the critic predicts values of chunks",
        "a critic, if there is one, predicts values of chunks here",
    ),
    "actor.model.add_value_head actor.model.*.add_value_head": Note("the advantage decides whether there is a critic"),
    "actor.model.image_size actor.model.vocab_size actor.model.hidden_size": Note("the checkpoint says it"),
    "actor.model.max_prompt_length": Note("prompts are as long as they are"),
    "actor.model.obs_converter_type": Note("the simulator names its cameras and states"),
    "actor.model.openpi.use_dsrl": only_if(
        False, "off", "this is PPO or GRPO here; DSRL is algorithm: dsrl (docs/off_policy.md)"
    ),
    "actor.model.openpi.dsrl_*": Note("only with use_dsrl; here: algorithm: dsrl (docs/off_policy.md)"),
    "reward.use_reward_model": only_if(
        False,
        "off",
        "there a learned reward takes the place of the simulator's; here the run learns from algorithm.reward as it is "
        "written (a learned one: algorithm.reward: classifier, see docs/algorithms.md)",
    ),
    "reward.use_output_step": only_if(False, "off", _REWARD_MODEL),
    "reward.*": never(_REWARD_MODEL),
    "router_server_args.*": never("part of the server of the learned reward"),
    "critic.use_critic_model": only_if(
        False, "off", "there is no separate critic model here: a critic is a part of the policy"
    ),
    "env.train.is_eval": only_if(False, "training draws start states at random"),
    "env.eval.is_eval": only_if(True, "evaluation plays start states in turn"),
    "env.train.video_cfg.save_video": only_if(False, "off", "videos show evaluations only (tracking.video)"),
    "env.*.video_cfg.*": Note("tracking.video decides about videos"),
    "env.*.data_collection.enabled": only_if(False, "off", _RECORDED),
    "env.*.data_collection.*": Note(_RECORDED),
    "env.train.use_ordered_reset_state_ids": only_if(
        False, _STARTS, "start states are drawn at random here; there each occurs once before any occurs again"
    ),
    "env.train.use_fixed_reset_state_ids": Note(_STARTS),
    "env.eval.use_ordered_reset_state_ids": Note("evaluation plays start states in turn"),
    "env.eval.use_fixed_reset_state_ids": Note("evaluation plays start states in turn"),
    "env.train.specific_reset_id": never("this simulator has no start state to choose"),
    "env.*.seed": Note("seed decides about everything random"),
    "env.*.wrap_obs_mode": Note("env.cameras and env.proprio say what is observed"),
    "env.*.init_params.num_envs": Note("env.num_envs decides this"),
    "env.*.init_params.max_episode_steps": Note("env.max_episode_steps decides this"),
    "env.*.init_params.sim_config.*": never("the task's own frequency is kept"),
    "env.*.init_params.sensor_configs.shader_pack": only_if(
        "default", "the simulator's own", "images are rendered with ManiSkill's default shaders"
    ),
    "env.*.init_params.human_render_camera_configs.*": Note("of videos only"),
    "env.*.init_params.render_mode": Note("the simulator's own"),
    "env.eval.auto_reset": Note("eval.episodes is the number of episodes"),
    "env.eval.ignore_terminations": Note(_SUCCESS),
    "env.eval.reward_coef": Note("returns are shown without the factor"),
    "env.eval.group_size": Note("an evaluation has no groups"),
    "env.eval.enable_offload": Note("env.offload decides this"),
}
"""Notes by patterns of keys, in one text; the first that fits counts. Keys that are converted need none."""

TWINS = {
    "env.eval.": ("env.train.", "evaluation has the simulator of training"),
    "rollout.model.": ("actor.model.", "the model that learns also acts"),
    "actor.model.openpi.num_steps": ("actor.model.num_steps", "model.denoising_steps decides this"),
    "actor.model.openpi.action_chunk": ("actor.model.num_action_chunks", "rollout.chunk_size decides this"),
}
"""Keys, or beginnings of keys, that here always have the value of another one, and what is said of it."""


# ---------------------------------------------------------------------------------------------------------------- texts

WIDTH = 80
NOTE = 44
"""Column at which comments begin, where there is room."""


SECTIONS = ("seed", "run", "env", "eval", "model", "rollout", "algorithm", "engine", "tracking")


def to_yaml(found: Migration) -> str:
    """Write the settings, each with the keys that it comes from."""
    tree: dict[str, Any] = {name: {} for name in SECTIONS}
    for name, line in found.lines.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = line
    title = f"# Converted by `embodyrl migrate` from {found.source.path.name} of RLinf; behind each setting its source."
    groups = [f"  - {group}: {found.groups[group]}" for group in ("env", "model", "algorithm")]
    return "\n".join([title, "defaults:", *groups, "  - _self_", *_section(tree, "")]) + "\n"


def _section(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if not isinstance(value, dict):
            setting = f"{indent}{key}: {inline(value.value)}"
            note = " ".join(value.note.split())
            yield f"{setting:<{NOTE}}  # {note}" if note else setting
        elif value:
            yield f"{indent}{key}:"
            yield from _section(value, f"{indent}  ")


def account(found: Migration) -> list[str]:
    """Return what became of the keys, for a terminal of 80 columns."""
    groups = ", ".join(f"{group}: {choice}" for group, choice in found.groups.items())
    lines = [f"converted: {counted(len(found.converted & found.source.values.keys()), 'key')}, and {groups}"]
    for name in found.source.missing:
        lines += _wrapped("", f"{name} is not beside it: what it says is unknown")
    for title, keys in (
        ("without effect in RLinf", found.dead),
        ("without an exact counterpart here", found.without_counterpart),
    ):
        lines += ["", f"{title}: {counted(len(keys), 'key')}"] if keys else []
        for key, why in keys.items():
            lines += _wrapped("  ", f"{found.written[key]} = {found.source.values[key]}; {why}")
    reasons: dict[str, list[str]] = {}
    for key, why in found.needless.items():
        reasons.setdefault(why, []).append(found.written[key])
    lines += ["", f"nothing to set here: {counted(len(found.needless), 'key')}"] if reasons else []
    for why, alike in reasons.items():
        shortened = ", ".join(alike) if len(alike) <= 3 else f"{alike[0]} and {len(alike) - 1} more"
        lines += _wrapped("  ", f"{shortened}: {why}")
    return lines


def _wrapped(indent: str, text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, indent, f"{indent}    ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False  # keys are copied from here
    return wrapper.wrap(text)
