"""Rules between settings: each is a function that yields what is wrong with a whole config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from embodyrl.config.compose import Composed
from embodyrl.config.faults import COMMAND_LINE, Fault, KeyPath, Location
from embodyrl.config.schema import LEFT_OPEN, Config, Episodes, ParallelBackend
from embodyrl.config.values import show
from embodyrl.registry import SIMULATORS, Registry, SupportedModel, load_target, near_match

LONGEST_NAME = 100
"""Bytes of a run's name."""


@dataclass(frozen=True)
class Finding:
    """What a rule objects to."""

    paths: tuple[str, ...]
    """The settings that do not fit together, the one to change first in front."""
    message: str
    remedy: str


class Use(Enum):
    """What a config is loaded for."""

    run = "run"
    """To run it now: nothing may be left open (`<weights>`)."""
    check = "check"
    """To look at it on the machine where it will run."""
    elsewhere = "elsewhere"
    """To look at it, although it will run on another machine: what this one lacks is no fault."""
    show = "show"
    """To write it down: its settings need not go together."""


Rule = Callable[[Config], Iterator[Finding]]

RULES: list[Rule] = []
"""Every rule, in the order in which they are tried."""


def rule(function: Rule) -> Rule:
    """Add a function to `RULES`."""
    RULES.append(function)
    return function


def check_rules(config: Config, composed: Composed, doubtful: set[KeyPath], use: Use) -> list[Fault]:
    """Apply every rule, except to settings that have a fault of their own.

    Args:
        config: the config.
        composed: what it was built from, for the places of the settings.
        doubtful: settings of which `config` has stand-ins, because they are wrong or missing.
        use: what the config is for.
    """
    faults = []
    for check in _rules_for(use):
        for finding in check(config):
            paths = [_key_path(text) for text in finding.paths]
            if not any(_overlap(path, bad) for path in paths for bad in doubtful):
                path, location = _place(composed, paths)
                faults.append(Fault(path, finding.message, finding.remedy, location))
    return faults


def _rules_for(use: Use) -> list[Rule]:
    if use is Use.run:
        return [*RULES, simulator_runs_here, nothing_is_left_open]
    if use is Use.check:
        return [*RULES, simulator_runs_here]
    if use is Use.show:
        return []
    return [check for check in RULES if check is not checkpoint_exists]


def _key_path(text: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in text.split("."))


def _overlap(path: KeyPath, bad: KeyPath) -> bool:
    return bool(bad) and (path[: len(bad)] == bad or bad[: len(path)] == path)


def _place(composed: Composed, paths: list[KeyPath]) -> tuple[KeyPath, Location]:
    """Where to point: at the command line, else at the user's file, there at the first setting it has.

    For a setting from a group file that is the entry of the defaults list that chose the group.
    """
    origins = composed.settings.origins
    written = [(path, origins[path].value) for path in paths if path in origins]
    written += [(path, composed.entries[place.file]) for path, place in written if place.file in composed.entries]
    for wanted in (COMMAND_LINE, composed.files[0]):
        for path, location in written:
            if location.file == wanted:
                return path, location
    return written[0] if written else (paths[0], composed.whole)


def fact(registry: Registry[Any], name: str, key: str) -> Any:
    """A field of a component's registry entry; None for a component that is unknown."""
    return getattr(registry.entry(name), key) if name in registry else None


def state_dim(config: Config) -> int | None:
    """Numbers in the simulator's state; None where nobody knows before it runs."""
    return _size_told(config, "state_dim")


def action_dim(config: Config) -> int | None:
    """Numbers in an action of the simulator; None where nobody knows before it runs."""
    return _size_told(config, "action_dim")


def sentences(config: Config) -> dict[str, str]:
    """What a policy is told about each task, as far as that is known before the simulator runs."""
    env, told, listing = config.env, *(fact(SIMULATORS, config.env.name, key) for key in ("sentence", "tasks"))
    if told is None or listing is None or SIMULATORS.entry(env.name).missing():
        return dict(env.instructions)
    tell, known = load_target(told), load_target(listing)()
    return {task: tell(task) for task in env.tasks if task in known} | env.instructions


def _size_told(config: Config, key: str) -> int | None:
    told = fact(SIMULATORS, config.env.name, key)
    known: int | None = None if told is None else load_target(told)(config.env)
    return known


def _multiples(number: int, of: int) -> str:
    """The multiples of `of` next to `number`, in words."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def _divisors(number: int, of: int) -> str:
    """The divisors of `of` next to `number`, in words."""
    below = max((n for n in range(1, min(number, of) + 1) if of % n == 0), default=1)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above is not None and above != below else str(below)


@rule
def envs_form_whole_groups(config: Config) -> Iterator[Finding]:
    """Every group of slots is complete."""
    envs, size = config.env.num_envs, config.rollout.group_size
    if envs % size:
        yield Finding(
            ("env.num_envs", "rollout.group_size"),
            f"env.num_envs = {envs} cannot be split into groups of rollout.group_size = {size}",
            f"set env.num_envs to {_multiples(envs, size)}",
        )


@rule
def films_show_evaluation_episodes(config: Config) -> Iterator[Finding]:
    """No more episodes are filmed than an evaluation plays."""
    filmed, played = config.tracking.video.episodes, config.eval.episodes
    if filmed > played:
        yield Finding(
            ("tracking.video.episodes", "eval.episodes"),
            f"tracking.video.episodes = {filmed}, but an evaluation plays eval.episodes = {played}",
            f"set tracking.video.episodes to {played} or less",
        )


@rule
def envs_fill_workers_evenly(config: Config) -> Iterator[Finding]:
    """Every simulator process has as many slots as the others."""
    envs, workers = config.env.num_envs, config.env.workers
    if isinstance(workers, int) and envs % workers:
        yield Finding(
            ("env.workers", "env.num_envs"),
            f"env.num_envs = {envs} cannot be spread over env.workers = {workers}",
            f"set env.workers to {_divisors(workers, envs)}, or env.num_envs to {_multiples(envs, workers)}",
        )


@rule
def slots_fit_ranks(config: Config) -> Iterator[Finding]:
    """Every rank has as many whole groups and simulator processes as the others."""
    ranks = config.engine.parallel.ranks
    if isinstance(ranks, int):
        yield from shares_of_ranks(config, ranks)


def shares_of_ranks(config: Config, ranks: int) -> Iterator[Finding]:
    """What cannot be shared evenly among so many ranks."""
    envs, size, workers = config.env.num_envs, config.rollout.group_size, config.env.workers
    if envs % (ranks * size):
        groups = f" in whole groups of rollout.group_size = {size}" if size > 1 else ""
        yield Finding(
            ("env.num_envs", "engine.parallel.ranks"),
            f"env.num_envs = {envs} cannot be shared by {ranks} ranks{groups}",
            f"set env.num_envs to {_multiples(envs, ranks * size)}",
        )
    if isinstance(workers, int) and workers % ranks:
        yield Finding(
            ("env.workers", "engine.parallel.ranks"),
            f"env.workers = {workers} cannot be shared by {ranks} ranks",
            f"set env.workers to {_multiples(workers, ranks)}, or auto",
        )
    name, backend = config.engine.optimizer.name, config.engine.parallel.backend
    if ranks > 1 and name == "adamw_8bit" and backend is not ParallelBackend.none:
        yield Finding(
            ("engine.optimizer.name", "engine.parallel.backend"),
            f"optimiser {name!r} cannot step weights of which {ranks} ranks hold a part each",
            "set engine.optimizer.name to adamw (its moments are spread over the ranks as well), or "
            "engine.parallel.backend to none",
        )


@rule
def only_whole_episodes_are_counted(config: Config) -> Iterator[Finding]:
    """Continuous slots play as many episodes as fit."""
    count = config.rollout.episodes_per_slot
    if count > 1 and config.rollout.episodes is Episodes.continuous:
        yield Finding(
            ("rollout.episodes_per_slot", "rollout.episodes"),
            f"rollout.episodes_per_slot = {count} has no use: rollout.episodes is 'continuous'",
            "set rollout.episodes to whole, or rollout.episodes_per_slot to 1",
        )


@rule
def ready_slots_exist(config: Config) -> Iterator[Finding]:
    """Nobody waits for more slots than there are."""
    ready, envs = config.rollout.ready_slots, config.env.num_envs
    if isinstance(ready, int) and ready > envs:
        yield Finding(
            ("rollout.ready_slots", "env.num_envs"),
            f"rollout.ready_slots = {ready}, but there are env.num_envs = {envs} slots",
            f"set rollout.ready_slots to less than {envs} (as many is lockstep)",
        )


@rule
def batch_splits_into_minibatches(config: Config) -> Iterator[Finding]:
    """Every optimiser step sees as many decisions as the others."""
    envs, rollout, parts = config.env.num_envs, config.rollout, config.algorithm.minibatches
    batch = envs * rollout.episodes_per_slot * rollout.chunks
    episodes = f" x rollout.episodes_per_slot = {rollout.episodes_per_slot}" if rollout.episodes_per_slot > 1 else ""
    if batch % parts:
        yield Finding(
            ("algorithm.minibatches", "rollout.chunks", "env.num_envs"),
            f"a batch of env.num_envs = {envs}{episodes} x rollout.chunks = {rollout.chunks} cannot be split into "
            f"algorithm.minibatches = {parts}",
            f"set algorithm.minibatches to {_divisors(parts, batch)}",
        )


@rule
def chunk_fits_model(config: Config) -> Iterator[Finding]:
    """The model can give as many actions at once as are asked of it."""
    size, name = config.rollout.chunk_size, config.model.name
    most = fact(SupportedModel, name, "max_chunk")
    if most is not None and size > most:
        yield Finding(
            ("rollout.chunk_size", "model.name"),
            f"rollout.chunk_size = {size} is more than model {name!r} can give at once",
            f"set rollout.chunk_size to {most} or less",
        )


@rule
def chunk_fits_episode(config: Config) -> Iterator[Finding]:
    """A chunk does not outlast an episode."""
    size, steps = config.rollout.chunk_size, config.env.max_episode_steps
    if size > steps:
        yield Finding(
            ("rollout.chunk_size", "env.max_episode_steps"),
            f"rollout.chunk_size = {size} is longer than an episode of env.max_episode_steps = {steps}",
            f"set rollout.chunk_size to {steps} or less",
        )


@rule
def whole_episodes_fit_rollout(config: Config) -> Iterator[Finding]:
    """With whole episodes, a rollout is long enough for one."""
    chunks, size, steps = config.rollout.chunks, config.rollout.chunk_size, config.env.max_episode_steps
    if config.rollout.episodes is Episodes.whole and chunks * size < steps:
        yield Finding(
            ("rollout.chunks", "rollout.episodes", "rollout.chunk_size", "env.max_episode_steps"),
            f"rollout.chunks = {chunks} x rollout.chunk_size = {size} steps are too few for a whole episode of "
            f"env.max_episode_steps = {steps}",
            f"set rollout.chunks to {math.ceil(steps / size)}",
        )


@rule
def evaluation_is_held_out(config: Config) -> Iterator[Finding]:
    """No start state of training occurs in evaluation."""
    first, states = config.eval.seed, config.env.start_states
    if first < states:
        yield Finding(
            ("eval.seed", "env.start_states"),
            f"evaluation starts at start state eval.seed = {first}, but training uses 0 .. {states - 1} "
            f"(env.start_states = {states})",
            f"set eval.seed to {states} or more" + (f", or env.start_states to {first} or less" if first else ""),
        )


@rule
def checkpoint_exists(config: Config) -> Iterator[Finding]:
    """The policy to start from is there."""
    checkpoint = config.model.checkpoint
    if checkpoint not in (None, LEFT_OPEN) and not Path(checkpoint).is_dir():
        what = "is a file" if Path(checkpoint).exists() else "does not exist"
        yield Finding(
            ("model.checkpoint",),
            f"model.checkpoint = {checkpoint!r} {what}",
            "name the folder of a saved policy, as in runs/<name>/<time>/checkpoints/last/policy",
        )


def nothing_is_left_open(config: Config) -> Iterator[Finding]:
    """What is to be given when the config runs was given."""
    if config.model.checkpoint == LEFT_OPEN:
        yield Finding(
            ("model.checkpoint",),
            f"model.checkpoint is left open ({LEFT_OPEN})",
            "name the folder of the weights to start from, as in model.checkpoint=/weights/openvla-7b",
        )


@rule
def run_is_named_like_a_folder(config: Config) -> Iterator[Finding]:
    """The run's folder is below runs/ and can be typed."""
    name = config.run.name
    if "/" in name or not name.isprintable() or name.strip(" .") == "" or len(name.encode()) > LONGEST_NAME:
        yield Finding(
            ("run.name",),
            f"run.name = {show(name)} cannot be the name of a folder",
            f"use up to {LONGEST_NAME} printable characters without /, and set run.dir for a folder elsewhere",
        )


@rule
def tasks_are_named_once(config: Config) -> Iterator[Finding]:
    """There is a task, and none twice."""
    if not config.env.tasks:
        yield Finding(("env.tasks",), "env.tasks is empty", "name at least one task of the simulator")
    yield from _repeated("env.tasks", config.env.tasks)


@rule
def tasks_are_known(config: Config) -> Iterator[Finding]:
    """The simulator has the tasks, as far as that can be said without importing it."""
    yield from _unknown(config, "task", config.env.tasks)


@rule
def instructions_are_for_tasks(config: Config) -> Iterator[Finding]:
    """Every sentence belongs to a task that is played."""
    tasks = config.env.tasks
    for task in config.env.instructions:
        if task not in tasks:
            near = near_match(task, tasks)
            remedy = f"did you mean {near!r}?" if near else f"one of {', '.join(tasks)}"
            yield Finding(
                (f"env.instructions.{task}",),
                f"env.instructions has a sentence for {task!r}, no task of env.tasks",
                remedy,
            )


@rule
def cameras_are_known(config: Config) -> Iterator[Finding]:
    """The simulator has the cameras, as far as that can be said without importing it."""
    yield from _unknown(config, "camera", config.env.cameras)


_SHORT_LIST = 12
"""A near match is followed by all names where there are no more than these."""


def _unknown(config: Config, kind: str, names: list[str]) -> Iterator[Finding]:
    """Those of `names` that are not among the simulator's tasks or cameras."""
    listing = fact(SIMULATORS, config.env.name, f"{kind}s")
    if listing is None or SIMULATORS.entry(config.env.name).missing():
        return
    known: list[str] = load_target(listing)()
    for index, name in enumerate(names):
        if name not in known:
            near = near_match(name, known)
            remedy = f"did you mean {near!r}?" if near else f"one of {', '.join(known)}"
            if near and len(known) <= _SHORT_LIST:
                remedy += f" ({kind}s: {', '.join(known)})"
            yield Finding((f"env.{kind}s.{index}",), f"{config.env.name} has no {kind} {name!r}", remedy)


@rule
def cameras_are_named_once(config: Config) -> Iterator[Finding]:
    """No picture is drawn twice."""
    yield from _repeated("env.cameras", config.env.cameras)


@rule
def image_size_is_two(config: Config) -> Iterator[Finding]:
    """A picture has a height and a width."""
    size = config.env.image_size
    if len(size) != 2:
        yield Finding(
            ("env.image_size",),
            f"env.image_size must have 2 entries, got {len(size)}",
            "write height and width [pixels], as in [224, 224]",
        )


@rule
def simulator_can_run_so(config: Config) -> Iterator[Finding]:
    """What the simulator itself can say about the config without being imported."""
    check = fact(SIMULATORS, config.env.name, "check")
    if check is None or SIMULATORS.entry(config.env.name).missing():
        return
    for path, message, remedy in load_target(check)(config):
        yield Finding((path,), message, remedy)


def simulator_runs_here(config: Config) -> Iterator[Finding]:
    """What the simulator finds missing on this machine."""
    check = fact(SIMULATORS, config.env.name, "check_here")
    if check is None or SIMULATORS.entry(config.env.name).missing():
        return
    for path, message, remedy in load_target(check)(config):
        yield Finding((path,), message, remedy)


@rule
def model_can_run_so(config: Config) -> Iterator[Finding]:
    """What the model itself can say about the config without being imported."""
    check = fact(SupportedModel, config.model.name, "check")
    if check is None or SupportedModel.entry(config.model.name).missing():
        return
    for path, message, remedy in load_target(check)(config):
        yield Finding((path,), message, remedy)


def checkpoint_notes(config: Config) -> list[str]:
    """Return what the model has to say about a checkpoint that is no fault: what it takes from its files."""
    told = fact(SupportedModel, config.model.name, "notes")
    if told is None or SupportedModel.entry(config.model.name).missing():
        return []
    return list(load_target(told)(config))


@rule
def sinks_are_named_once(config: Config) -> Iterator[Finding]:
    """No metric is written twice."""
    yield from _repeated("tracking.sinks", config.tracking.sinks)


def _repeated(path: str, names: list[str]) -> Iterator[Finding]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding((f"{path}.{index}",), f"{path} names {name!r} twice", "remove one of them")


@rule
def betas_are_two(config: Config) -> Iterator[Finding]:
    """AdamW has two moment averages."""
    betas = config.engine.optimizer.betas
    if len(betas) != 2:
        yield Finding(
            ("engine.optimizer.betas",),
            f"engine.optimizer.betas must have 2 entries, got {len(betas)}",
            "write one rate for each moment, as in [0.9, 0.999]",
        )
