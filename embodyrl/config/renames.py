"""Names that have changed: settings, options, registered components, metrics, columns of batches; and the names that
other libraries have for settings and commands.

A row of a table is all that a renaming takes. An old name in a user's YAML or on the command line is answered with the
new one, and files that an earlier version wrote are read under the new names. A name of another library is answered
with what it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from embodyrl.config.fields import (
    choices_of,
    class_at,
    component_sections,
    find_setting,
    is_component,
    owners_of,
    settings_of,
)
from embodyrl.config.issues import KeyPath, dotted, key_path

if TYPE_CHECKING:
    from embodyrl.config.compose import Settings

SETTINGS: dict[str, str] = {
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.behaviour_cap": "algorithm.loss.behaviour_cap",
    "algorithm.behaviour_excess": "algorithm.loss.behaviour_excess",
    "algorithm.drift_coef": "algorithm.loss.drift_coef",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.norm.mean_level": "algorithm.advantage.mean_level",
    "algorithm.norm.std_level": "algorithm.advantage.std_level",
    "algorithm.norm.leave_one_out": "algorithm.advantage.leave_one_out",
    "algorithm.norm.unbiased": "algorithm.advantage.unbiased",
    "algorithm.norm.eps": "algorithm.advantage.eps",
    "algorithm.srpo.encoder": "algorithm.reward.encoder",
    "algorithm.srpo.frames": "algorithm.reward.frames",
    "algorithm.srpo.dim": "algorithm.reward.dim",
    "algorithm.srpo.compat": "algorithm.reward.compat",
    "algorithm.srpo.scale": "algorithm.reward.scale",
    "algorithm.srpo.steepness": "algorithm.reward.steepness",
    "algorithm.filter.max_collections": "algorithm.max_collections",
    "env.instructions": "env.task_descriptions",
    "eval.seed": "eval.first_start_state",
    "rollout.chunks": "rollout.num_chunks",
    "engine.parallel.ranks": "engine.parallel.world_size",
    "model.relative_entries": "model.relative_action_dims",
}
"""Old -> new name of a setting. A name that changed twice has two rows."""

OPTIONS: dict[str, str] = {
    "--pictures": "--images",
}
"""Old -> new name of an option of a command."""

REGISTERED: dict[str, dict[str, str]] = {
    "stage": {"imitate": "sft_step", "learn_corrections": "improve"},
}
"""Old -> new name of a registered component, by the kind of its registry."""

METRICS: dict[str, str] = {
    "time/node/": "time/stage/",
    "train/passes": "train/epochs",
}
"""Old -> new name of a metric. A name that ends in / stands for all names that begin with it."""

COLUMNS: dict[str, str] = {
    "task": "task_index",
    "sentences": "task_descriptions",
}
"""Old -> new name of a column of a saved batch, or of a key of its header."""

ONCE_OF_ALL_FILTERS = ("algorithm.filter.metric", "algorithm.filter.accuracy_low", "algorithm.filter.accuracy_high")
"""Settings that kept their place but now belong to one filter. A saved config of an earlier version has them whatever
filter it chose."""


_ROLLED_OUT = "env.num_envs * rollout.num_chunks"
_MINIBATCH = f"algorithm.minibatches = {_ROLLED_OUT} / batch size"
_SERVICE = "tracking.sinks, as in tracking.sinks=[console,jsonl,wandb]"
_MIGRATE = "`embodyrl migrate` converts a config of RLinf"
_WEIGHTS = "model.checkpoint, a folder or hf://owner/name"
_DATA = "data.path, a folder or hf://datasets/owner/name"
_STEPS = "run.iterations * data.steps when learning from demonstrations, else run.iterations"
_ONE_ITERATION = f"run.iterations; one iteration is {_ROLLED_OUT} * rollout.chunk_size steps"

PEERS: dict[str, str] = {
    # simulators and rollouts
    "n_envs": "env.num_envs",
    "total_num_envs": "env.num_envs",
    "env_id": "env.tasks=[ID], with env=gym/pendulum for an id of Gymnasium",
    "n_steps": "rollout.num_chunks",
    "num_steps": "rollout.num_chunks",
    "max_steps_per_rollout_epoch": "rollout.num_chunks * rollout.chunk_size",
    "rollout_epoch": "rollout.episodes_per_slot",
    "auto_reset": "rollout.episodes: continuous resets by itself, whole does not",
    "num_action_chunks": "rollout.chunk_size",
    "n_action_steps": "rollout.chunk_size, or eval.actions of a longer chunk",
    "specific_reset_id": "env.start_states",
    "task_id_filter": "env.tasks",
    # length of a run
    "total_timesteps": _ONE_ITERATION,
    "steps": _STEPS,
    "max_steps": "run.iterations, or env.max_episode_steps for the length of an episode",
    "max_epochs": "run.iterations",
    "num_train_steps": _STEPS,
    "save_freq": "run.save_every, in iterations",
    "save_interval": "run.save_every",
    "eval_freq": "run.eval_every, in iterations",
    "val_check_interval": "run.eval_every",
    "n_eval_episodes": "eval.episodes",
    "only_eval": "`embodyrl eval CHECKPOINT`",
    "resume_dir": "`embodyrl resume RUN`",
    # updates
    "batch_size": f"{_MINIBATCH}; with a replay algorithm.off_policy.batch_size, with demonstrations data.batch_size",
    "minibatch_size": _MINIBATCH,
    "global_batch_size": f"{_MINIBATCH}; with demonstrations data.batch_size",
    "num_minibatches": "algorithm.minibatches",
    "n_epochs": "algorithm.epochs",
    "update_epoch": "algorithm.epochs",
    "update_epochs": "algorithm.epochs",
    "learning_rate": "engine.optimizer.lr",
    "optimizer_lr": "engine.optimizer.lr",
    "value_lr": "engine.optimizer.critic_lr",
    "anneal_lr": "engine.optimizer.schedule, constant or linear",
    "lr_schedule": "engine.optimizer.schedule",
    "lr_scheduler": "engine.optimizer.schedule",
    "warmup_steps": "engine.optimizer.warmup, in iterations",
    "lr_warmup_steps": "engine.optimizer.warmup, in iterations",
    "adam_eps": "engine.optimizer.eps",
    "clip_grad": "engine.optimizer.max_grad_norm",
    "grad_clip_norm": "engine.optimizer.max_grad_norm",
    "clip_range": "algorithm.loss.clip_low and algorithm.loss.clip_high",
    "clip_coef": "algorithm.loss.clip_low and algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_range_vf": "algorithm.value_clip",
    "ent_coef": "algorithm.entropy_coef; with a replay algorithm.off_policy.temperature",
    "entropy_bonus": "algorithm.entropy_coef",
    "vf_coef": "algorithm.value_coef",
    "kl_beta": "algorithm.kl_coef",
    "kl_penalty": "algorithm.kl_estimator",
    "gae_lambda": "algorithm.advantage.gae_lambda",
    "norm_adv": "algorithm.normalize_advantages",
    "normalize_advantage": "algorithm.normalize_advantages",
    "reward_coef": "algorithm.reward_scale",
    "adv_type": "algorithm, as in algorithm=grpo, or algorithm.advantage alone",
    "loss_type": "algorithm.loss",
    "logprob_type": "algorithm.logprob_level",
    "loss_agg_func": "algorithm.aggregation",
    "filter_rewards": "algorithm=dapo and algorithm.filter",
    # replays
    "buffer_size": "algorithm.off_policy.replay.capacity",
    "learning_starts": "algorithm.off_policy.replay.start_after",
    "gradient_steps": "algorithm.off_policy.updates_per_step",
    "train_freq": "rollout.num_chunks, and algorithm.off_policy.updates_per_step",
    "tau": "algorithm.off_policy.critics.tau",
    # policies and demonstrations
    "algo": "algorithm, as in algorithm=ppo",
    "policy": "model, as in model=act, and model.checkpoint for its weights",
    "policy_kwargs": "model, as in model.hidden_sizes=[64,64]",
    "net_arch": "model.hidden_sizes",
    "model_path": _WEIGHTS,
    "policy_path": _WEIGHTS,
    "pretrained_path": _WEIGHTS,
    "dataset": _DATA,
    "repo_id": _DATA,
    "is_lora": "engine.lora.rank, 0 without adapters",
    "lora_rank": "engine.lora.rank",
    # machines, files, tracking
    "component_placement": "placement for several machines; on one there is nothing to set",
    "cuda": "engine.device",
    "num_gpus": "engine.parallel.world_size",
    "torch_deterministic": "engine.deterministic",
    "exp_name": "run.name",
    "experiment_name": "run.name",
    "job_name": "run.name",
    "output_dir": "run.dir",
    "log_path": "run.dir",
    "tensorboard_log": "tracking.sinks, which has tensorboard; its files are in the run directory",
    "logger_backends": _SERVICE,
    "track": _SERVICE,
    "logger": _SERVICE,
    "wandb": _SERVICE,
    "wandb_enabled": _SERVICE,
    "project_name": "tracking.service.project",
    "wandb_project_name": "tracking.service.project",
    "capture_video": "tracking.video.episodes",
    # sections of a whole config of RLinf
    "actor": _MIGRATE,
    "cluster": _MIGRATE,
    "runner": _MIGRATE,
}
"""Name of a setting in Stable-Baselines3, CleanRL, LeRobot, openpi or RLinf -> what it is here. Names that settings
here have as well need no row: `gamma` is answered with `algorithm.gamma` anyway."""

COMMANDS: dict[str, str] = {
    "train": "run",
    "learn": "run",
    "fit": "run",
    "finetune": "run",
    "evaluate": "eval",
    "test": "eval",
    "enjoy": "eval",
    "play": "eval",
    "new": "init",
    "create": "init",
    "info": "doctor",
    "rollout": "eval",
    "record": "collect",
    "convert": "migrate",
    "push": "export",
    "plot": "report",
}
"""Word for a command elsewhere -> the command here."""


def newest_name(name: str, table: dict[str, str]) -> str:
    """Return the present name of `name`, also where it changed more than once. Names without a row are unchanged."""
    for _ in table:  # a bound, in case rows lead in a circle
        if name not in table:
            break
        name = table[name]
    return name


def newest_metric(name: str) -> str:
    """Return the present name of a metric of an earlier version."""
    group, slash, rest = name.rpartition("/")
    return newest_name(name, METRICS) if name in METRICS else newest_name(group + slash, METRICS) + rest


def renamed_component(kind: str, name: str) -> str:
    """Return the hint for a name that the registry of this kind does not have; "" if it was not renamed."""
    now = newest_name(name, REGISTERED.get(kind, {}))
    return "" if now == name else f"renamed to {now!r}"


def renamed_below(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, KeyPath]]:
    """Find renamed settings in `data`, at a path or below; yields their old and new paths."""
    for name in SETTINGS:
        old = key_path(name)
        if old[: len(path)] == path and _is_in(data, old):
            yield old, key_path(newest_name(name, SETTINGS))


def new_name_of(root: type, data: Any, new: KeyPath) -> str:
    """Return the hint for a renamed setting. It names the components that have it if the chosen one does not.

    Args:
        root: dataclass of the whole config.
        data: the composed settings.
        new: present path of the setting.
    """
    section = component_sections(root).get(new[:-1])
    if section is None or find_setting(root, data, new)[0] is not None:
        return f"renamed to {dotted(new)!r}"
    if find_setting(root, data, new[:-1])[0] is None:
        return f"remove it: it is {dotted(new)!r} now, and the chosen {new[0]} has no {dotted(new[:-1])!r}"
    return f"renamed to {dotted(new)!r}, an option of {', '.join(map(repr, owners_of(section, str(new[-1]))))}"


def peers_words(data: Any, path: KeyPath) -> list[KeyPath]:
    """Return the words of another library in an unknown key: of a top-level section those below it, else `path` itself
    if it is one. Sections further down may be those of another component here."""
    below = [(*path, *each) for each in _words_in(data[path[0]])] if len(path) == 1 else []
    return below or ([path] if path[-1] in PEERS else [])


def _words_in(section: Any) -> Iterator[KeyPath]:
    for key, value in section.items() if isinstance(section, dict) else ():
        deeper = list(_words_in(value)) or ([()] if key in PEERS else [])
        yield from ((key, *each) for each in deeper)


def convert_saved(settings: Settings, root: type) -> None:
    """Move the settings that an earlier version saved to their new names. A saved config has every setting; those of
    components that the run did not use are dropped.

    Args:
        settings: the saved config, composed; changed in place.
        root: dataclass of the whole config.
    """
    for name in (*SETTINGS, *ONCE_OF_ALL_FILTERS):
        old, new = key_path(name), key_path(newest_name(name, SETTINGS))
        if _is_in(settings.data, old) and find_setting(root, settings.data, old)[0] is None:
            value, origin = settings.take(old)
            if find_setting(root, settings.data, new)[0] is not None and not _is_in(settings.data, new):
                settings.put(new, value, origin)
            _take_if_empty(settings, old[:-1], root)
    for path in of_other_methods(settings, root):
        settings.take(path)


def of_other_methods(settings: Settings, root: type) -> list[KeyPath]:
    """Return the settings in the section `algorithm` that the chosen method does not have, and others do."""
    section, given = settings_of(root)["algorithm"].section, settings.get(("algorithm",))
    if section is None or not isinstance(given, dict):
        return []
    return list(_only_elsewhere(class_at(section, given), choices_of(section), given, ("algorithm",)))


def _only_elsewhere(own: type, others: Sequence[type], given: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    """Yield the settings below a path that the dataclass `own` does not have, and one of `others` does."""
    for name, value in given.items():
        there = [settings_of(other)[name] for other in others if name in settings_of(other)]
        mine = settings_of(own).get(name)
        if mine is None:
            yield from [(*path, name)] if there else []
        elif mine.section is not None and not is_component(mine.section) and isinstance(value, dict):
            below = [each.section for each in there if each.section is not None]
            yield from _only_elsewhere(mine.section, below, value, (*path, name))


def convert_options(options: dict[str, Any], section: str, known: type) -> dict[str, Any]:
    """Return a component's saved options under their new names.

    Args:
        options: the options, without those of nested sections.
        section: their section of a config, such as `model`.
        known: dataclass of the options.
    """
    names = settings_of(known)
    newest = {name: newest_name(f"{section}.{name}", SETTINGS).removeprefix(f"{section}.") for name in options}
    return {name if name in names else newest[name]: value for name, value in options.items()}


def _take_if_empty(settings: Settings, path: KeyPath, root: type) -> None:
    """Remove a section that the schema no longer has, once it is empty."""
    if path and settings.get(path) == {} and find_setting(root, settings.data, path)[0] is None:
        settings.take(path)


def _is_in(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
