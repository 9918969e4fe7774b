"""Rules between settings: each is a function that checks a whole config and yields an issue per fault."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.config.compose import Composed
from embodyrl.config.files import EXPERIMENTS, builtin_folder
from embodyrl.config.infos import MOST_EPISODE_STEPS, InfoError, model_info, simulator_info
from embodyrl.config.issues import (
    COMMAND_LINE,
    LEAVE_OUT,
    ConfigIssue,
    KeyPath,
    Location,
    NeededToLearn,
    dotted,
)
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.schema import (
    BROUGHT,
    LEFT_OPEN,
    AlgorithmConfig,
    Config,
    Episodes,
    Observe,
    Offload,
    ParallelBackend,
    RolloutMode,
    Schedule,
)
from embodyrl.config.values import show
from embodyrl.errors import did_you_mean
from embodyrl.files import NO_FOREIGN_ENTRIES, foreign_entry
from embodyrl.hub import HubError, HubName, Kind, is_hub_name, parse
from embodyrl.registry import ALGORITHMS, SIMULATORS, PublicCheckpoint, Registry, SupportedModel, load_target

if TYPE_CHECKING:
    from embodyrl.config.replay import ReplayConfig

LONGEST_NAME = 100
"""Bytes of a run's name."""


class ConfigUse(Enum):
    """Purpose for which a config is loaded."""

    run = "run"
    """Run it now: nothing may be left open (`<weights>`)."""
    play = "play"
    """Let its policy act now, and learn nothing."""
    check = "check"
    """Check it on the machine where it will run."""
    elsewhere = "elsewhere"
    """Check it on another machine than that of the run: missing packages and files are no fault."""
    show = "show"
    """Print it: rules between settings are not checked."""


Rule = Callable[[Config], Iterator[ConfigIssue]]

RULES: list[Rule] = []
"""Every rule, in the order in which they are tried."""


OF_LEARNING: set[str] = set()
"""Names of rules about how a policy learns, which one that cannot learn need not follow."""


def rule(function: Rule) -> Rule:
    """Add a function to `RULES`."""
    RULES.append(function)
    return function


def learning_rule(function: Rule) -> Rule:
    """Add a function to `RULES` that checks how the policy learns."""
    OF_LEARNING.add(function.__name__)
    return rule(function)


SIMULATOR_RULES: set[str] = set()
"""Names of rules about one simulator's own settings, which each simulator of a mix has to follow."""


def simulator_rule(function: Rule) -> Rule:
    """Add a function to `RULES` that checks a simulator's own settings."""
    SIMULATOR_RULES.add(function.__name__)
    return rule(function)


def check_rules(
    config: Config, composed: Composed, doubtful: set[KeyPath], use: ConfigUse, also: Sequence[Rule] = ()
) -> list[ConfigIssue]:
    """Apply every rule. Issues about settings with a fault of their own are left out.

    Args:
        config: the config.
        composed: the composed settings it was built from, for their locations.
        doubtful: settings for which `config` has stand-ins, because they are wrong or missing.
        use: purpose of the config.
        also: rules besides those of its purpose.
    """
    found: list[ConfigIssue] = []
    left_out = set() if can_learn(config) else OF_LEARNING
    for check in (*(each for each in _rules_for(use) if each.__name__ not in left_out), *also):
        found += [issue for issue in _issues_of(check, config) if issue not in found]  # several rules ask one plug-in
    if use is ConfigUse.play:
        found = [issue for issue in found if not isinstance(issue, NeededToLearn)]
    return [
        placed(issue, composed)
        for issue in found
        if not any(_overlap(path, bad) for path in issue.paths for bad in doubtful)
    ]


def _issues_of(check: Rule, config: Config) -> Iterator[ConfigIssue]:
    """Yield what a rule finds; that it could not ask a plug-in, or may not look at a path, is such a fault, too."""
    try:
        yield from check(config)
    except InfoError as error:
        yield ConfigIssue((error.setting,), str(error))
    except PermissionError as error:
        place = Path(error.filename or "").absolute()
        around = {dotted(path): Path(text).absolute() for path, text in _texts(config) if text}
        around = {name: folder for name, folder in around.items() if place.is_relative_to(folder)}
        if not error.filename or not around:
            raise
        # The innermost one: a folder that another setting names may lie around it.
        depth = max(len(folder.parts) for folder in around.values())
        named = [name for name, folder in around.items() if len(folder.parts) == depth]
        yield ConfigIssue(
            tuple(named),
            f"{', '.join(named)}: {error.filename} cannot be looked at ({error.strerror})",
            "name another path, or ask its owner for permission",
        )


def _texts(section: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the paths and values of all settings that are texts."""
    if isinstance(section, str) and not isinstance(section, Enum):
        yield path, section
    elif is_dataclass(section):
        for each in fields(section):
            yield from _texts(getattr(section, each.name), (*path, each.name))


def placed(issue: ConfigIssue, composed: Composed) -> ConfigIssue:
    """Return an issue with the place in the user's files that it is about."""
    path, location = _place(composed, issue.paths)
    return replace(issue, where=(path,), location=location)


def _rules_for(use: ConfigUse) -> list[Rule]:
    if use is ConfigUse.run:
        return [*RULES, simulator_runs_here, nothing_is_left_open]
    if use is ConfigUse.play:
        rules = [check for check in RULES if check not in (learning_executes_whole_chunks, model_can_be_trained)]
        return [*rules, simulator_runs_here, nothing_is_left_open]
    if use is ConfigUse.check:
        return [*RULES, simulator_runs_here]
    if use is ConfigUse.show:
        return []
    return [check for check in RULES if check is not checkpoint_exists]


def _overlap(path: KeyPath, bad: KeyPath) -> bool:
    return bool(bad) and (path[: len(bad)] == bad or bad[: len(path)] == path)


def _place(composed: Composed, paths: list[KeyPath]) -> tuple[KeyPath, Location]:
    """Return the location to report: the command line, else the user's file, there the first setting it has.

    For a setting from a group file, that is the entry of the defaults list that chose the group.
    """
    origins = composed.settings.origins
    written = [(path, origins[path].value) for path in paths if path in origins]
    written += [(path, composed.entries[place.file]) for path, place in written if place.file in composed.entries]
    for wanted in (COMMAND_LINE, composed.files[0]):
        for path, location in written:
            if location.file == wanted:
                return path, location
    if written:
        return written[0]
    # What stands nowhere may be in an entry of a list, such as a simulator of a mix.
    depth = composed.settings.depth_of(paths[0]) if any(isinstance(key, int) for key in paths[0]) else 0
    return paths[0], origins[paths[0][:depth]].value if depth else composed.whole


def fact(registry: Registry[Any], name: str, key: str) -> Any:
    """Return a field of a component's registry entry; None for an unknown component."""
    return getattr(registry.entry(name), key) if name in registry else None


def needs_of_all(config: Config) -> Mapping[str, Needs]:
    """Return what each registered method would need in a run with this config, with its own settings by default."""
    found = {}
    for entry in ALGORITHMS.entries():
        algorithm = config.algorithm
        if entry.name != algorithm.name:
            algorithm = (entry.load_options() or AlgorithmConfig)(name=entry.name)
        found[entry.name] = algorithm.needs(replace(config, algorithm=algorithm))
    return found


def on_policy_algorithms(config: Config) -> str:
    """Return the on-policy algorithms as text: first the one with a critic, which needs neither groups nor whole
    episodes."""
    able = [name for name, needs in needs_of_all(config).items() if needs.learns is Learns.likelihood]
    entries = [ALGORITHMS.entry(name) for name in able if not ALGORITHMS.entry(name).demonstrations]
    first, *others = [each.name for each in sorted(entries, key=lambda each: not each.critic)]
    return f"{first} or another one that learns from its newest rollout ({', '.join(others)})"


def is_supervised(config: Config) -> bool:
    """Return whether the run learns from demonstrations alone."""
    return bool(fact(ALGORITHMS, config.algorithm.name, "demonstrations")) and replay_of(config) is None


def replay_of(config: Config) -> ReplayConfig | None:
    """Return the settings of the replay that the run learns from; None if it learns from none."""
    return config.algorithm.needs(config).replay


def state_dim(config: Config) -> int | None:
    """Return the size of the simulator's state (S); None if it is unknown before the simulator runs."""
    return simulator_info(config.env.name).state_dim(config.env)


def environment_state(config: Config) -> tuple[int, int] | None:
    """Return which numbers of the simulator's state are the environment's, (0, 0) if none are; None if it is unknown
    before the simulator runs."""
    return simulator_info(config.env.name).environment_state(config.env)


def action_dim(config: Config) -> int | None:
    """Return the size of the simulator's actions (D); None if it is unknown before the simulator runs."""
    return simulator_info(config.env.name).action_dim(config.env)


def acts_by_choice(config: Config) -> bool | None:
    """Return whether the simulator's actions are discrete; None if it is unknown before the simulator runs."""
    return simulator_info(config.env.name).discrete(config.env) if config.env.name in SIMULATORS else None


def can_learn(config: Config) -> bool:
    """Return whether the policy has weights that a run can train."""
    try:
        return model_info(config.model.name, installed=True).untrainable() is None
    except InfoError:  # which a rule reports
        return True


def task_descriptions(config: Config) -> dict[str, str]:
    """Return the task description of each task, as far as it is known before the simulator runs."""
    further = further_tasks(config) or {}
    described = described_tasks(config.env.name, config.env.tasks)
    described |= {task: further[task] for task in config.env.tasks if task in further}
    return described | config.env.task_descriptions


PARAPHRASES = "embodyrl.envs.perturb.words"
"""Module that knows of which task descriptions there are paraphrases; above this package, so asked by its name."""


def shown_descriptions(config: Config) -> list[str]:
    """Return all task descriptions that a policy may get, as far as they are known before the simulator runs: also the
    paraphrases, where episodes are perturbed so."""
    own = list(task_descriptions(config).values())
    if not (config.env.paraphrases or (config.eval.perturb is not None and config.eval.perturb.words)):
        return own
    texts: list[str] = load_target(f"{PARAPHRASES}:with_paraphrases")(own)
    return texts


def further_tasks(config: Config) -> dict[str, str] | None:
    """Return the tasks that options of the simulator add to its own, with their task descriptions; None if that is
    unknown here."""
    return simulator_info(config.env.name, installed=True).further_tasks(config.env)


def described_tasks(simulator: str, tasks: Collection[str] | None = None) -> dict[str, str]:
    """Return the task descriptions that a simulator itself gives, of these tasks or of all that it lists."""
    info = simulator_info(simulator, installed=True)
    named = [task for task in (info.tasks() or tasks or ()) if tasks is None or task in tasks]
    return {task: description for task in named if (description := info.task_description(task))}


def known_tasks(simulator: str) -> Sequence[str] | None:
    """Return all tasks of a simulator; None if they are unknown before it runs."""
    return simulator_info(simulator, installed=True).tasks()


def _multiples(number: int, of: int) -> str:
    """Return the multiples of `of` next to `number`, as text."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def _nearest_multiple(number: int, of: int) -> int:
    """Return the largest multiple of `of` up to `number`, at least one."""
    return max(of, number // of * of)


def divisors(number: int, of: int) -> str:
    """Return the divisors of `of` next to `number`, as text."""
    below = max((n for n in range(1, min(number, of) + 1) if of % n == 0), default=1)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above is not None and above != below else str(below)


@rule
def settings_do_something(config: Config) -> Iterator[ConfigIssue]:
    """Check `only_with` of every setting: that another one lets it do something."""
    yield from _idle(config, config, "")


def _idle(config: Config, section: Any, path: str) -> Iterator[ConfigIssue]:
    for each in fields(section):
        value, name = getattr(section, each.name), f"{path}{each.name}"
        if is_dataclass(value):
            yield from _idle(config, value, f"{name}.")
        needed = each.metadata.get("only_with")
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if not needed or value == usual:
            continue
        for key, able in needed.items():
            other = key if "." in key else f"{path}{key}"
            found: Any = reduce(getattr, other.split("."), config)
            if found not in able and (able or not found):
                some = "true" if found is False else "1 or more" if isinstance(found, int) else ""
                to = f" to {' or '.join(able) or some}" if able or some else ""
                yield ConfigIssue(
                    (name, other),
                    f"{name} = {show(value)} does nothing while {other} is {show(found)}",
                    # Not "leave it out": where a file that is not the user's sets it, only another value can.
                    f"set {other}{to}, or {name} to {show(usual)}",
                    fix={name: LEAVE_OUT},
                )


@rule
def envs_form_whole_groups(config: Config) -> Iterator[ConfigIssue]:
    """Check that every group of envs is complete."""
    envs, size = config.env.num_envs, config.rollout.group_size
    if envs % size:
        yield ConfigIssue(
            ("env.num_envs", "rollout.group_size"),
            f"env.num_envs = {envs} cannot be split into groups of rollout.group_size = {size}",
            f"set env.num_envs to {_multiples(envs, size)}",
            fix={"env.num_envs": _nearest_multiple(envs, size)},
        )


@rule
def videos_show_evaluation_episodes(config: Config) -> Iterator[ConfigIssue]:
    """Check that no more episodes are recorded than an evaluation plays."""
    recorded, played = config.tracking.video.episodes, config.eval.episodes
    if recorded > played:
        yield ConfigIssue(
            ("tracking.video.episodes", "eval.episodes"),
            f"tracking.video.episodes = {recorded}, but an evaluation plays eval.episodes = {played}",
            f"set tracking.video.episodes to {played} or less",
            fix={"tracking.video.episodes": played},
        )


@rule
def envs_fill_workers_evenly(config: Config) -> Iterator[ConfigIssue]:
    """Check that every simulator process has the same number of envs."""
    envs, workers = config.env.num_envs, config.env.workers
    if isinstance(workers, int) and envs % workers:
        yield ConfigIssue(
            ("env.workers", "env.num_envs"),
            f"env.num_envs = {envs} cannot be spread over env.workers = {workers}",
            f"set env.workers to {divisors(workers, envs)}, or env.num_envs to {_multiples(envs, workers)}",
            fix={"env.workers": "auto"},
        )


@rule
def slots_fit_ranks(config: Config) -> Iterator[ConfigIssue]:
    """Check that every rank has the same number of whole groups and simulator processes."""
    ranks = config.engine.parallel.world_size
    if isinstance(ranks, int):
        yield from shares_of_ranks(config, ranks)


def shares_of_ranks(config: Config, ranks: int) -> Iterator[ConfigIssue]:
    """Check that envs, simulator processes and optimizer state can be shared evenly by this many ranks."""
    if not config.placement.rollout.workers:
        yield from _even_shares(config, ranks, "ranks", "engine.parallel.world_size")
    elif config.algorithm.needs(config).replay is not None:  # each rank keeps the decisions of its share
        yield from _even_envs(config, ranks, "ranks", "engine.parallel.world_size")
    name, backend = config.engine.optimizer.name, config.engine.parallel.backend
    if ranks > 1 and name == "adamw_8bit" and backend not in (ParallelBackend.none, ParallelBackend.auto):
        yield ConfigIssue(
            ("engine.optimizer.name", "engine.parallel.backend"),
            f"optimizer {name!r} cannot step weights that are sharded over {ranks} ranks",
            "set engine.optimizer.name to adamw (its moments are sharded as well), or engine.parallel.backend to none",
        )


@rule
def slots_fit_rollout_workers(config: Config) -> Iterator[ConfigIssue]:
    """Check that every rollout worker has the same number of whole groups, simulator processes and blocks."""
    workers = config.placement.rollout.workers
    if workers:
        yield from _even_shares(config, workers, "rollout workers", "placement.rollout.workers")


@rule
def async_rollouts_can_be(config: Config) -> Iterator[ConfigIssue]:
    """Check that asynchronous rollouts have workers, and that nothing is offloaded meanwhile."""
    if config.rollout.mode is not RolloutMode.async_:
        return
    if not config.placement.rollout.workers:
        yield ConfigIssue(
            ("rollout.mode", "placement.rollout.workers"),
            "rollout.mode is async, which needs rollout workers, and there are none: the ranks roll out themselves",
            "set placement.rollout.workers to 1 or more, or rollout.mode to sync",
        )
    offloads = {"env.offload": config.env.offload, "engine.offload": config.engine.offload is not Offload.none}
    for name in (name for name, used in offloads.items() if used):
        yield ConfigIssue(
            ("rollout.mode", name),
            f"rollout.mode is async, but {name} makes room for learning while nothing is rolled out, which is never",
            f"leave {name} out, or set rollout.mode to sync",
            fix={name: LEAVE_OUT},
        )


def rollout_notes(config: Config) -> list[str]:
    """Return a note if no rollout is ahead of learning and the numbers are still not those of `sync`."""
    rollout, ranks = config.rollout, config.engine.parallel.world_size
    workers, ranks = config.placement.rollout.workers, ranks if isinstance(ranks, int) else 1
    numbers_differ = rollout.blocks == "auto" and workers != ranks
    if rollout.mode is not RolloutMode.async_ or rollout.max_staleness or not numbers_differ:
        return []
    return [
        f"rollout.max_staleness = 0 gives the numbers of rollout.mode=sync only with as many blocks of envs, and "
        f"rollout.blocks is auto: {workers} here, one for each rollout worker, and {ranks} without workers, one for "
        f"each rank. To compare the two, set rollout.blocks={workers} in both"
    ]


def _even_shares(config: Config, count: int, processes: str, setting: str) -> Iterator[ConfigIssue]:
    """Check that envs, simulator processes and blocks can be shared evenly by the processes that roll out.

    Args:
        config: the config.
        count: number of these processes.
        processes: what they are called.
        setting: the setting that says how many there are.
    """
    yield from _even_envs(config, count, processes, setting)
    for name, number in (("env.workers", config.env.workers), ("rollout.blocks", config.rollout.blocks)):
        if isinstance(number, int) and number % count:
            yield ConfigIssue(
                (name, setting),
                f"{name} = {number} cannot be shared by {count} {processes}",
                f"set {name} to {_multiples(number, count)}, or auto",
            )


def _even_envs(config: Config, count: int, processes: str, setting: str) -> Iterator[ConfigIssue]:
    """Check that each of some processes gets the same number of whole groups of envs; see `_even_shares`."""
    envs, size = config.env.num_envs, config.rollout.group_size
    if envs % (count * size):
        groups = f" in whole groups of rollout.group_size = {size}" if size > 1 else ""
        yield ConfigIssue(
            ("env.num_envs", setting),
            f"env.num_envs = {envs} cannot be shared by {count} {processes}{groups}",
            f"set env.num_envs to {_multiples(envs, count * size)}",
        )


@rule
def envs_form_blocks(config: Config) -> Iterator[ConfigIssue]:
    """Check that the envs can be divided into blocks."""
    blocks, envs, size = config.rollout.blocks, config.env.num_envs, config.rollout.group_size
    if not isinstance(blocks, int) or config.rollout.schedule is Schedule.ready_batch:  # see `only_with` of blocks
        return
    if envs % (blocks * size):
        groups = f" of whole groups of rollout.group_size = {size}" if size > 1 else ""
        yield ConfigIssue(
            ("rollout.blocks", "env.num_envs"),
            f"env.num_envs = {envs} cannot be divided into rollout.blocks = {blocks} equal blocks{groups}",
            f"set rollout.blocks to {divisors(blocks, max(1, envs // size))}, or env.num_envs to "
            f"{_multiples(envs, blocks * size)}",
        )


@rule
def ready_slots_exist(config: Config) -> Iterator[ConfigIssue]:
    """Check that no more ready envs are waited for than there are."""
    ready, envs = config.rollout.ready_slots, config.env.num_envs
    if isinstance(ready, int) and ready > envs:
        yield ConfigIssue(
            ("rollout.ready_slots", "env.num_envs"),
            f"rollout.ready_slots = {ready}, but there are env.num_envs = {envs} envs",
            f"set rollout.ready_slots to less than {envs} (as many is lockstep)",
        )


@rule
def chunk_fits_model(config: Config) -> Iterator[ConfigIssue]:
    """Check that the model can predict chunks of this size."""
    size, name = config.rollout.chunk_size, config.model.name
    most = fact(SupportedModel, name, "max_chunk")
    if most is not None and size > most:
        yield ConfigIssue(
            ("rollout.chunk_size", "model.name"),
            f"rollout.chunk_size = {size} is more than model {name!r} can predict at once",
            f"set rollout.chunk_size to {most} or less",
            fix={"rollout.chunk_size": most},
        )


@rule
def chunk_fits_episode(config: Config) -> Iterator[ConfigIssue]:
    """Check that a chunk is not longer than an episode."""
    size = config.rollout.chunk_size
    steps = config.env.known_time_limit if size > 1 else None  # to know it may take an import
    if steps is not None and size > steps:
        yield ConfigIssue(
            ("rollout.chunk_size", "env.max_episode_steps"),
            f"rollout.chunk_size = {size} is longer than an episode of env.max_episode_steps = {steps}",
            f"set rollout.chunk_size to {steps} or less",
            fix={"rollout.chunk_size": steps},
        )


@rule
def whole_episodes_fit_rollout(config: Config) -> Iterator[ConfigIssue]:
    """Check that a rollout of whole episodes is long enough for one, if it may be of whole episodes at all."""
    needs = config.algorithm.needs(config)
    if needs.replay is not None and not needs.imitates:
        return  # another rule asks for continuous ones
    if config.rollout.episodes is not Episodes.whole:
        return
    rollout, steps = config.rollout, config.env.known_time_limit
    chunks, size = rollout.num_chunks, max(1, rollout.chunk_size - rollout.delay)
    executed = "(rollout.chunk_size - rollout.delay)" if rollout.delay else "rollout.chunk_size"
    if steps == MOST_EPISODE_STEPS:
        yield ConfigIssue(
            ("rollout.episodes", "env.max_episode_steps"),
            f"rollout.episodes is whole, but episodes have no time limit (env.max_episode_steps = "
            f"{config.env.max_episode_steps or 'null'}), so that a rollout might never end",
            "set env.max_episode_steps to a number",
        )
    elif steps is not None and chunks * size < steps:
        yield ConfigIssue(
            ("rollout.num_chunks", "rollout.episodes", "rollout.chunk_size", "env.max_episode_steps"),
            f"rollout.num_chunks = {chunks} x {executed} = {size} steps are too few for a whole episode of "
            f"env.max_episode_steps = {steps}",
            f"set rollout.num_chunks to {math.ceil(steps / size)}",
            fix={"rollout.num_chunks": math.ceil(steps / size)},
        )


@learning_rule
def learning_executes_whole_chunks(config: Config) -> Iterator[ConfigIssue]:
    """Check that rollouts that are learned from execute the chunks that were sampled."""
    if is_supervised(config):
        return
    for name in ("actions", "ensemble", "delay"):
        value = getattr(config.eval, name)
        if value is not None and (name != "delay" or value != config.rollout.delay):
            yield ConfigIssue(
                (f"eval.{name}", "algorithm.name"),
                f"eval.{name} = {value}: reinforcement learning has to execute the chunks whose probability it knows, "
                "and evaluates in the same simulators",
                f"set it to null, and evaluate the run afterwards with embodyrl eval RUN eval.{name}={value}",
                fix={f"eval.{name}": LEAVE_OUT},
            )


@rule
def evaluation_executes_part_of_a_chunk(config: Config) -> Iterator[ConfigIssue]:
    """Check that an evaluation executes no more actions than a chunk has, and that chunks overlap if averaged."""
    actions, chunk = config.eval.actions, config.rollout.chunk_size
    if actions is not None and actions > chunk:
        yield ConfigIssue(
            ("eval.actions", "rollout.chunk_size"),
            f"eval.actions = {actions} is more than rollout.chunk_size = {chunk}",
            f"set eval.actions to {chunk} or less",
            fix={"eval.actions": chunk},
        )
    if config.eval.ensemble is None:
        return
    if config.executed_actions + config.delay >= chunk > 1:
        late = f", {config.delay} of which are late" if config.delay else ""
        yield ConfigIssue(
            ("eval.actions", "eval.ensemble", "eval.delay"),
            f"eval.ensemble = {config.eval.ensemble} has nothing to average: {config.executed_actions} of {chunk} "
            f"actions are executed before the next chunk is asked for{late}",
            "set eval.actions or eval.delay to less, or eval.ensemble to null",
        )
    if chunk == 1:
        yield ConfigIssue(
            ("eval.ensemble", "rollout.chunk_size"),
            f"eval.ensemble = {config.eval.ensemble} has nothing to average: rollout.chunk_size = 1",
            "set rollout.chunk_size to what the policy has learned to predict, or eval.ensemble to null",
        )


@rule
def a_late_chunk_is_there_in_time(config: Config) -> Iterator[ConfigIssue]:
    """Check that a chunk lasts until the next one is there, and that one is asked for at a time."""
    delay, executed, chunk = config.delay, config.executed_actions, config.rollout.chunk_size
    name = "rollout.delay" if config.eval.delay is None else "eval.delay"
    if not delay:
        return
    most = chunk // 2 if config.eval.actions is None else min(executed, chunk - executed)
    if delay > min(executed, chunk - executed):
        lower = name if config.eval.actions is None else "eval.delay"
        longer = f"rollout.chunk_size of {2 * delay} or more, which the policy has to learn"
        span = str(delay) if 2 * delay == chunk else f"{delay} .. {chunk - delay}"
        fewer = f", eval.actions to {span}" if 2 * delay <= chunk else ""
        yield ConfigIssue(
            (name, "eval.actions", "rollout.chunk_size"),
            f"{name} = {delay} is too late for chunks of rollout.chunk_size = {chunk}, {max(executed, 0)} of which are "
            "executed before the next is asked for: a chunk must begin before that, and last until that one is there",
            f"set {lower} to {most} or less{fewer}, or choose a {longer}" if most else f"choose a {longer}",
            fix={name: most} if most else {},
        )


@rule
def learning_knows_late_chunks(config: Config) -> Iterator[ConfigIssue]:
    """Check that a method that is given late chunks can learn from them."""
    needs = config.algorithm.needs(config)
    if config.rollout.delay and needs.rollouts and needs.learns is not Learns.likelihood:
        yield ConfigIssue(
            ("rollout.delay", "algorithm.name"),
            f"rollout.delay = {config.rollout.delay}, but algorithm {config.algorithm.name!r} learns what an "
            "observation and a chunk lead to, and with a delay that depends on the chunk before, too",
            "set rollout.delay to 0, and evaluate with eval.delay; or learn by PPO, GRPO, ...",
            fix={"rollout.delay": LEAVE_OUT},
        )


@rule
def evaluation_is_held_out(config: Config) -> Iterator[ConfigIssue]:
    """Check that no start state of training occurs in evaluation."""
    first, states = config.eval.first_start_state, config.env.start_states
    if first < states:
        yield ConfigIssue(
            ("eval.first_start_state", "env.start_states"),
            f"evaluation starts at start state eval.first_start_state = {first}, but training uses 0 .. {states - 1} "
            f"(env.start_states = {states})",
            f"set eval.first_start_state to {states} or more"
            + (f", or env.start_states to {first} or less" if first else ""),
            fix={"eval.first_start_state": states},
        )


@rule
def checkpoint_exists(config: Config) -> Iterator[ConfigIssue]:
    """Check that the policy to start from exists."""
    checkpoint = config.model.checkpoint
    if checkpoint in (None, LEFT_OPEN) or is_hub_name(checkpoint):
        return
    if not Path(checkpoint).is_dir():
        what = "is a file" if Path(checkpoint).exists() else "does not exist"
        yield ConfigIssue(
            ("model.checkpoint",),
            f"model.checkpoint = {checkpoint!r} {what}",
            "".join(f"make it with `embodyrl run {name}`, or " for name in _makers(Path(checkpoint)))
            + "name the folder of a saved policy, as in runs/<name>/<time>/checkpoints/last/policy"
            + "".join(f", or public weights: {name}" for name in public_checkpoints(config)[:1]),
        )


def _makers(checkpoint: Path) -> list[str]:
    """Return the shipped experiment whose run has this folder, if there is one."""
    top, name = (*checkpoint.parts, "", "")[:2]
    named = re.compile(rf"^  name: {re.escape(name)}$", re.MULTILINE)
    folder = builtin_folder() / EXPERIMENTS
    files = sorted(folder.glob("*.yaml")) if top == "runs" else []
    return [each.stem for each in files if named.search(each.read_text())][:1]


def public_checkpoints(config: Config) -> list[str]:
    """Return the public checkpoints that a config can start from, the closest first: those that its model has for its
    tasks, and for supervised fine-tuning the bases."""
    known: Sequence[PublicCheckpoint] = fact(SupportedModel, config.model.name, "checkpoints") or ()
    tasks = [f"{config.env.name}/{task}" for task in config.env.tasks]
    trained = [
        each.name
        for each in known
        if all(map(each.is_for, tasks))
        and all(getattr(config.model, name, None) == value for name, value in each.options.items())
    ]
    if fact(ALGORITHMS, config.algorithm.name, "demonstrations"):
        trained += [each.name for each in known if not each.tasks]
    return trained


def weights_to_name(config: Config) -> str:
    """Return what to write where a config leaves its weights open."""
    names = public_checkpoints(config)
    if not names:
        return (
            f"name the weights of {config.model.name} for these tasks, model.checkpoint=DIR or hf://owner/name (none "
            f"are known that are public)"
        )
    others = f" (also {', '.join(names[1:])})" if names[1:] else ""
    return f"name the weights, as in model.checkpoint={names[0]}{others}, or their folder"


HUB_SETTINGS: dict[KeyPath, Kind] = {("model", "checkpoint"): Kind.model, ("data", "path"): Kind.dataset}
"""Settings that take a name on the hub in place of a folder."""


def hub_texts(config: Config) -> dict[KeyPath, str]:
    """Return the settings that name something on the hub."""
    texts = {("model", "checkpoint"): config.model.checkpoint, ("data", "path"): config.data.path}
    return {path: str(text) for path, text in texts.items() if is_hub_name(text)}


def hub_names(config: Config) -> dict[KeyPath, HubName]:
    """Return the names on the hub in a config by setting, except those that are malformed."""
    names = {}
    for path, text in hub_texts(config).items():
        with suppress(HubError):  # which a rule reports
            names[path] = parse(text, HUB_SETTINGS[path])
    return names


@rule
def hub_names_are_legal(config: Config) -> Iterator[ConfigIssue]:
    """Check that names on the hub have the right form; the hub is not asked."""
    for path, text in hub_texts(config).items():
        try:
            parse(text, HUB_SETTINGS[path])
        except HubError as error:
            yield ConfigIssue((path,), f"{dotted(path)} = {error.message}", error.remedy)


@rule
def files_beside_the_weights_are_there(config: Config) -> Iterator[ConfigIssue]:
    """Check that options of the model that name other files name those of this machine, also while the weights, beside
    which the model itself looks at them, are still on the hub or not yet named. Statistics may be of demonstrations
    that are yet to be recorded."""
    waits = config.model.checkpoint == LEFT_OPEN or is_hub_name(config.model.checkpoint)
    for name in BROUGHT[1:]:
        text = str(getattr(config.model, name, None) or "")
        if text and waits and name != "statistics" and not is_hub_name(text) and not Path(text).exists():
            yield ConfigIssue(
                (f"model.{name}",), f"model.{name} = {text!r} does not exist", "name a file or folder of this machine"
            )
        if is_hub_name(text):
            repo = text.removeprefix("hf://").partition("@")[0]
            yield ConfigIssue(
                (f"model.{name}",),
                f"model.{name} = {text} is on the hub, from where only {' and '.join(map(dotted, HUB_SETTINGS))} come",
                f"run: hf download {repo} --local-dir DIR, and name what is needed there",
            )


def nothing_is_left_open(config: Config) -> Iterator[ConfigIssue]:
    """Check that no value is left open."""
    if config.model.checkpoint == LEFT_OPEN:
        yield ConfigIssue(
            ("model.checkpoint",),
            f"model.checkpoint is left open ({LEFT_OPEN})",
            weights_to_name(config),
        )


@rule
def run_is_named_like_a_folder(config: Config) -> Iterator[ConfigIssue]:
    """Check that the run's name is legal as a folder name."""
    name = config.run.name
    if "/" in name or not name.isprintable() or name.strip(" .") == "" or len(name.encode()) > LONGEST_NAME:
        yield ConfigIssue(
            ("run.name",),
            f"run.name = {show(name)} cannot be the name of a folder",
            f"use up to {LONGEST_NAME} printable characters without /, and set run.dir for a folder elsewhere",
        )


@simulator_rule
def there_is_a_task(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is a task."""
    if not config.env.tasks:
        yield ConfigIssue(("env.tasks",), "env.tasks is empty", "name at least one task of the simulator")


@simulator_rule
def tasks_are_known(config: Config) -> Iterator[ConfigIssue]:
    """Check that the simulator has the tasks, as far as this is known without importing it."""
    further = further_tasks(config)
    known = known_tasks(config.env.name)
    if further is not None and known is not None:
        yield from _unknown(config, "task", config.env.tasks, [*known, *further])


@simulator_rule
def task_descriptions_are_of_tasks(config: Config) -> Iterator[ConfigIssue]:
    """Check that every task description belongs to a task of env.tasks."""
    tasks = config.env.tasks
    for task in config.env.task_descriptions:
        if task not in tasks:
            remedy = did_you_mean(task, tasks, otherwise=f"one of {', '.join(tasks)}")
            yield ConfigIssue(
                (("env", "task_descriptions", task),),
                f"env.task_descriptions has a task description for {task!r}, no task of env.tasks",
                remedy,
            )


@simulator_rule
def cameras_are_known(config: Config) -> Iterator[ConfigIssue]:
    """Check that the simulator has the cameras, as far as this is known without importing it."""
    known = simulator_info(config.env.name, installed=True).cameras()
    if known is not None:
        yield from _unknown(config, "camera", config.env.cameras, known)


_SHORT_LIST = 12
"""Longest list of names that follows a near match."""


def _unknown(config: Config, kind: str, names: list[str], known: Sequence[str]) -> Iterator[ConfigIssue]:
    """Yield an issue for each of `names` that is not among the `known` tasks or cameras."""
    for index, name in enumerate(names):
        if name not in known:
            near, listed = did_you_mean(name, known), f"{kind}s: {', '.join(known) or 'none'}"
            if kind == "task" and len(known) > _SHORT_LIST:
                listed = f"`embodyrl list tasks {config.env.name}` shows all {len(known)}"
            message = f"{config.env.name} has no {kind} {name!r}"
            yield ConfigIssue(f"env.{kind}s.{index}", message, f"{near} ({listed})" if near else listed)


@rule
def frames_are_read(config: Config) -> Iterator[ConfigIssue]:
    """Check that earlier frames are there, and that the model reads them."""
    frames, name = config.env.frames, config.model.name
    if frames == 1:
        return
    if not config.env.cameras:
        yield ConfigIssue("env.frames", f"env.frames = {frames}, but env.cameras is empty", "name a camera")
    elif fact(SupportedModel, name, "frames") is False:
        reading = [each for each in SupportedModel.names() if fact(SupportedModel, each, "frames")]
        yield ConfigIssue(
            ("env.frames", "model.name"),
            f"env.frames = {frames}, but model {name!r} reads one image of each camera",
            f"set env.frames to 1, or model.name to one that reads several ({', '.join(reading)})",
            fix={"env.frames": LEAVE_OUT},
        )
    if config.rollout.observe is Observe.every_step:
        yield ConfigIssue(
            ("env.frames", "rollout.observe"),
            f"env.frames = {frames} are those of decisions, but rollout.observe = every_step shows all in between",
            "set env.frames to 1, or rollout.observe to chunk_end",
        )
    if config.executed_actions != config.rollout.chunk_size:
        set_here = {f"eval.{each}": getattr(config.eval, each) for each in ("actions", "ensemble", "delay")}
        named = {name: value for name, value in set_here.items() if value} or {"rollout.delay": config.delay}
        yield ConfigIssue(
            ("env.frames", *named),
            f"env.frames = {frames} are one chunk from each other when the policy learns, but with "
            f"{' and '.join(f'{name} = {value}' for name, value in named.items())} it decides within chunks",
            f"leave out {' and '.join(named)}",
        )


@simulator_rule
def simulator_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the simulator that do not import it."""
    yield from simulator_info(config.env.name, installed=True).check(config)


def simulator_runs_here(config: Config) -> Iterator[ConfigIssue]:
    """Check that this machine has what the simulator needs."""
    yield from simulator_info(config.env.name, installed=True).check_here(config)


@rule
def model_can_be_trained(config: Config) -> Iterator[ConfigIssue]:
    """Check that the policy has weights that a run can train, and options with which it can."""
    info = model_info(config.model.name, installed=True)
    refusal = info.untrainable()
    if refusal is not None:
        why, remedy = refusal
        yield ConfigIssue("model.name", f"model {config.model.name!r} cannot be trained: {why}", remedy)
    if not is_supervised(config):
        yield from info.check_learning(config)


@rule
def model_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the model that do not import it."""
    foreign = list(_foreign_entries(config))
    yield from foreign
    if not foreign:
        yield from model_info(config.model.name, installed=True).check(config)


def _foreign_entries(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each folder that the model's options name, and that has links out of it, or pipes."""
    for name, text in vars(config.model).items():
        if isinstance(text, str) and text and Path(text).is_dir() and (found := foreign_entry(Path(text))) is not None:
            yield ConfigIssue((f"model.{name}",), f"model.{name}: {found}", NO_FOREIGN_ENTRIES)


def checkpoint_notes(config: Config) -> list[str]:
    """Return the model's notes about its checkpoint that are no faults, such as options read from its files."""
    return list(model_info(config.model.name, installed=True).notes(config))
