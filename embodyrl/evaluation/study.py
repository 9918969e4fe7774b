"""Plays evaluations that are compared: one policy under several protocols, or two policies on the same episodes."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from embodyrl.config import ConfigError, LoadedConfig, to_plain
from embodyrl.config.build import differences, flat, plain_value
from embodyrl.config.infos import model_info, simulator_info
from embodyrl.config.issues import COMMAND_LINE, Location, dotted
from embodyrl.config.rules import fact
from embodyrl.config.schema import Config
from embodyrl.envs.perturb.kinds import Perturbation
from embodyrl.errors import shell_command
from embodyrl.evaluation.journal import Command, Journal, digest_of, is_journal
from embodyrl.evaluation.protocols import OWN, Protocol, ProtocolError, as_overrides, find, parts_of
from embodyrl.evaluation.results import FILE, WIDE, Comparison, Differing, Row, table
from embodyrl.registry import SupportedModel
from embodyrl.runner.build import build_acting, open_simulators, settings_of_torch_kept
from embodyrl.runs import METRICS_FILE
from embodyrl.runs.metrics import read_rows
from embodyrl.screen import counted, rounded
from embodyrl.servers import is_url

if TYPE_CHECKING:  # these import torch
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.envs import EpisodeSpec
    from embodyrl.envs.manager import Simulators
    from embodyrl.runner.evaluation import EpisodeRecord, Evaluation, TileRecorder

Load = Callable[[Sequence[str]], tuple[LoadedConfig, Path | None]]
"""Loads a policy's config with overrides; returns it and the folder of the weights (None: the config names it)."""

SHARED = (
    "seed",
    "env.tasks",
    "env.max_episode_steps",
    "env.start_states",
    "env.share_start_states",
    "env.end_at_success",
    "env.settle_steps",
    "env.settle_gripper",
    "env.rebuild",
    "eval.episodes",
    "eval.first_start_state",
    "eval.sample",
)
"""Settings that decide on what is played and what counts. A second policy is given those of the first; how it sees and
acts is its own."""
OF_THE_MACHINE = ("num_envs", "workers", "numa", "start_method", "startup_timeout_s", "step_timeout_s", "offload")
"""Settings of the section `env` that change no result without --sample."""
RECORDED = 4
"""Episodes on a video of those that differ, if the config records none."""
PERTURBED = "eval.perturb"
"""Setting with the perturbations of evaluations."""
KEPT = ("seed", "env", "eval", "rollout", "model")
"""Sections of a config that results.json has."""
ONE_TABLE = "a video shows two policies under one protocol: name one, or leave out the video"
REMARKS = ("  note:", "  not the same,")
"""Beginnings of what an announcement remarks on a protocol."""
PHASES = ("time/simulate", "time/render", "time/infer", "time/preprocess", "time/record")
"""Times of an iteration that an evaluation needs as well."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tasks of an evaluation that have the same settings."""

    loaded: LoadedConfig
    weights: Path | None

    @property
    def config(self) -> Config:
        """Its config."""
        return self.loaded.config


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An evaluation to play."""

    label: str
    policy: str
    protocol: Protocol | None
    base: Config
    """The policy's config without the protocol."""
    parts: tuple[Part, ...]
    given: frozenset[str] = frozenset()
    """Settings that the user gave, which win over the protocol's."""
    alike: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that it takes from another policy's config, so that both play the same: its own value, and that."""
    table: str = ""
    """See `Row.table`."""
    perturb: Perturbation = ()
    """What its episodes are perturbed by, in place of `eval.perturb`; (): as that says."""

    @property
    def name(self) -> str:
        """Its name among all: the label, and the table if there are several."""
        return f"{self.label}, {self.table}" if self.table else self.label

    @property
    def episodes(self) -> int:
        """Number of its episodes."""
        return sum(part.config.eval.episodes for part in self.parts)

    @property
    def most_steps(self) -> int:
        """Control steps, if every episode lasts as long as it may."""
        return sum(part.config.eval.episodes * part.config.env.time_limit for part in self.parts)

    def same_as(self, other: Plan) -> bool:
        """Return whether another evaluation plays the same episodes with the same policy and settings."""
        own, others = ([part.config for part in each.parts] for each in (self, other))
        return (self.policy, self.perturb, own) == (other.policy, other.perturb, others)


# ------------------------------------------------------------------------------------------------------------- planning


def plan(load: Load, overrides: Sequence[str], policy: str, protocol: str, *, label: str | None = None) -> Plan:
    """Plan an evaluation.

    Args:
        load: loads the policy's config.
        overrides: settings that the user gave; they win over the protocol's.
        policy: place of its weights.
        protocol: name, path of a file, or `own` for the policy's own settings.
        label: name in tables; None: the protocol's.

    Raises:
        ProtocolError: there is no such protocol, it is for another simulator, or does not know a task.
        ConfigError: this policy cannot follow it.
    """
    base, weights = load(overrides)
    config = base.config
    given = frozenset(text.partition("=")[0] for text in overrides)
    if protocol == OWN:
        own = Part(loaded=base, weights=weights)
        return Plan(label=label or OWN, policy=policy, protocol=None, base=config, parts=(own,), given=given)
    found = find(protocol, config.env.name)
    parts = []
    # A published evaluation is not perturbed, whatever those of the run were.
    plain = {} if config.eval.perturb is None or perturbs(given) else {PERTURBED: None}
    tasks, executed = config.env.tasks, _executed(config, weights) if found.executes_as_checkpoint else {}
    for each in parts_of(found, tasks, config.model.name, sees_images=bool(config.env.cameras)):
        settings = {name: value for name, value in each.settings.items() if name not in given}
        settings |= plain | {name: value for name, value in executed.items() if name not in given}
        settings["eval.episodes"] = _episodes_of(each.tasks, config, found, given)
        if len(each.tasks) < len(tasks):
            settings["env.tasks"] = list(each.tasks)
        if settings["eval.episodes"]:
            loaded, weights = _following(load, overrides, settings, found)
            parts.append(Part(loaded=loaded, weights=weights))
    return Plan(
        label=label or found.short_name, policy=policy, protocol=found, base=config, parts=tuple(parts), given=given
    )


def perturbs(given: Iterable[str]) -> bool:
    """Return whether one of some settings is, or belongs to, `eval.perturb`."""
    return any(name == PERTURBED or name.startswith(f"{PERTURBED}.") for name in given)


def _variants(own: Plan, overrides: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what a protocol plays besides a policy's own tasks: its name in tables, and the user's overrides with its
    tasks."""
    if own.protocol is None:
        return
    others = [text for text in overrides if text.partition("=")[0] != "env.tasks"]
    for variant in own.protocol.variants:
        if tasks := own.protocol.tasks_of(variant, own.base.env.tasks):
            yield f"{own.label} {variant}", [*others, *as_overrides({"env.tasks": tasks})]


def _executed(config: Config, weights: Path | None) -> dict[str, Any]:
    """Return the settings that execute chunks as the checkpoint's own library does; chunks are long enough for it."""
    folder = weights or config.model.checkpoint
    if folder is None or not Path(folder).is_dir():
        return {}
    settings = model_info(config.model.name).executed(Path(folder))
    if (settings.get("eval.actions") or 1) > config.rollout.chunk_size:
        settings["rollout.chunk_size"] = settings["eval.actions"]
    return settings


def _episodes_of(tasks: Sequence[str], config: Config, protocol: Protocol, given: frozenset[str]) -> int:
    """Return the episodes of some of the tasks: the protocol's number, or their share of what the user asked for."""
    if "eval.episodes" not in given:
        return protocol.episodes_per_task * len(tasks)
    every, count = config.env.tasks, config.eval.episodes
    return sum(
        count // len(every) + (number < count % len(every)) for number, task in enumerate(every) if task in tasks
    )


def _following(
    load: Load, overrides: Sequence[str], settings: Mapping[str, Any], protocol: Protocol
) -> tuple[LoadedConfig, Path | None]:
    """Load the config with a protocol's settings; faults of these are the protocol's."""
    kept = [text for text in overrides if text.partition("=")[0] not in settings]
    try:
        return load([*kept, *as_overrides(settings)])
    except ConfigError as error:
        place = Location(f"protocol {protocol.name} (this checkpoint cannot follow it)")
        raise ConfigError(
            [
                dataclasses.replace(fault, location=place)
                if fault.location is None
                or (fault.location.file == COMMAND_LINE and any(dotted(path) in settings for path in fault.paths))
                else fault
                for fault in error.faults
            ]
        ) from None


def beside(first: Plan, load: Load, overrides: Sequence[str], policy: str, protocol: str) -> Plan:
    """Plan the same episodes for a second policy, which gets the settings of the first that decide on what is played.

    Args:
        first: evaluation of the first policy.
        load: loads the second policy's config.
        overrides: settings that the user gave, for both.
        policy: place of its weights.
        protocol: that of the first.

    Raises:
        ProtocolError: it plays another simulator, or is no other policy.
    """
    config, _ = load(())
    name = config.config.env.name
    if name != first.base.env.name:
        raise ProtocolError(
            f"{first.policy} plays {first.base.env.name} and {policy} plays {name}: compare policies of one simulator"
        )
    has, own = flat(to_plain(config.config)), flat(to_plain(first.base))
    given = {text.partition("=")[0] for text in overrides}
    shared = {
        key: value
        for key, value in own.items()
        if key in SHARED and key in has and key not in given and has[key] != value
    }
    alike = {key: (has[key], value) for key, value in shared.items()}
    before, perturb = config.config.eval.perturb, first.base.eval.perturb
    if before != perturb and PERTURBED not in given:
        shared[PERTURBED] = plain_value(perturb)  # every kind, since a section on the command line is merged
        alike[PERTURBED] = (before and str(before), perturb and str(perturb))

    def load_alike(texts: Sequence[str]) -> tuple[LoadedConfig, Path | None]:
        named = {text.partition("=")[0] for text in texts}
        return load([*as_overrides({key: value for key, value in shared.items() if key not in named}), *texts])

    second = plan(load_alike, overrides, policy, protocol, label=policy)
    return dataclasses.replace(second, alike=alike)


# ---------------------------------------------------------------------------------------------------------- announcing


def announcement(plan: Plan) -> str:
    """Return what an evaluation is about to play: the changes against the policy's own settings, what is not done as
    the protocol says, and how many episodes."""
    lines = []
    if plan.protocol is None:
        lines.append(f"{plan.name}: the policy's own settings")
    else:
        lines.append(f"{plan.name}: {_origin(plan.protocol)}")
        lines += _changes(plan)
        lines += _remarks(plan, plan.protocol)
    for name, (own, shared) in plan.alike.items():
        lines.append(f"  as for the first policy: {name} = {_written(shared)} (its own: {_written(own)})")
    tasks = [task for part in plan.parts for task in part.config.env.tasks]
    what = counted(len(tasks), "task") if len(tasks) > 1 else tasks[0]
    for perturb in dict.fromkeys(str(part.config.eval.perturb or "") for part in plan.parts):
        lines += [f"  perturbed: {perturb}"] if perturb else []
    steps, how = counted(plan.most_steps, "control step"), executed_so(plan.parts[0].config)
    lines.append(f"  {counted(plan.episodes, 'episode')} of {what}, {steps} at most{how}")
    return "\n".join(lines)


def executed_so(config: Config) -> str:
    """Return what follows the description of episodes on the screen where chunks overlap; empty where they do not."""
    late = f", chunks {counted(config.delay, 'step')} late" if config.delay else ""
    return late + ("" if config.eval.ensemble is None else f", ensembled ({config.eval.ensemble:g})")


def _origin(protocol: Protocol) -> str:
    where = f" ({protocol.repository} {protocol.commit[:7]})" if protocol.repository else f" ({protocol.name})"
    return f"{protocol.title or protocol.short_name}{where}"


def _changes(plan: Plan) -> list[str]:
    """Return the table of settings that the protocol changes."""
    changed: dict[str, tuple[Any, list[Any]]] = {}
    for part in plan.parts:
        for name, (own, new) in differences(plan.base, part.config).items():
            if name.startswith(PERTURBED):
                changed[PERTURBED] = (str(plan.base.eval.perturb), [None])
            elif name != "env.tasks":
                changed.setdefault(name, (own, []))[1].append(new)
    if not changed:
        return ["  changes nothing in this policy's settings"]
    rows = [("  setting", "own", "protocol")]
    for name, (own, values) in changed.items():
        rows.append((f"  {name}", _written(own), " or ".join(dict.fromkeys(map(_written, values)))))
    return table(rows).splitlines()


def _written(value: Any) -> str:
    """Return a value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _remarks(plan: Plan, protocol: Protocol) -> list[str]:
    model, sees_images = plan.base.model.name, bool(plan.base.env.cameras)
    lines = []
    if protocol.models and model not in protocol.models:
        lines.append(f"  note: published for {', '.join(protocol.models)}, this policy is {model}")
    if protocol.variants and fact(SupportedModel, model, "words") is False:
        lines.append("  note: this policy reads no task description: where words alone change, nothing changes for it")
    overruled = sorted(
        plan.given
        & {
            "eval.episodes",
            *(name for aspect in protocol.aspects for name in aspect.settings),
            *(name for aspect in protocol.aspects for each in aspect.by_task.values() for name in each),
        }
    )
    if overruled:
        lines.append(f"  note: your own instead of the protocol's: {', '.join(overruled)}")
    different = (each for each in protocol.aspects if each.differs and each.concerns(model, sees_images=sees_images))
    return [*lines, *(f"  not the same, {each.name}: {each.differs}" for each in different)]


def expected_seconds(plans: Sequence[Plan], checkpoint: Path) -> float | None:
    """Return roughly how long evaluations take if every episode lasts as long as it may, by the speed of the run that
    saved the checkpoint (`<run>/checkpoints/<iteration>`); None if it kept no times."""
    speeds: list[float] = []
    for row in read_rows(checkpoint.parent.parent / METRICS_FILE)[0]:
        busy = sum(row.get(phase) or 0.0 for phase in PHASES)
        if row.get("env/steps") and busy:
            speeds.append(busy / row["env/steps"])
    if not speeds:
        return None
    return float(median(speeds)) * sum(each.most_steps for each in plans)


def remaining_differences(first: Plan, second: Plan) -> list[str]:
    """Return the settings of the simulators in which two evaluations still differ, apart from those of the machine."""
    found = differences(first.parts[0].config, second.parts[0].config)
    of_no_evaluation = (*OF_THE_MACHINE, "perturb")
    names = (name for name in found if name.startswith("env.") and name.split(".")[1] not in of_no_evaluation)
    return [f"{name} ({_written(found[name][0])} and {_written(found[name][1])})" for name in names]


# -------------------------------------------------------------------------------------------------------------- playing


@contextmanager
def acting(part: Part, say: Callable[[str], object] = lambda text: None) -> Iterator[tuple[Simulators, HybridEngine]]:
    """Start the simulators of an evaluation and load its policy, and `say` what people should know of it."""
    with (
        tempfile.TemporaryDirectory() as logs,
        open_simulators(part.loaded, Path(logs)) as manager,
        settings_of_torch_kept(),
    ):
        engine = build_acting(part.config, manager, part.weights)
        with closing(engine.policy):
            for text in engine.policy.remarks:
                say(textwrap.fill(f"note: {text}", WIDE, subsequent_indent="  ", break_on_hyphens=False))
            yield manager, engine


Opens = Callable[[Part], AbstractContextManager[tuple["Simulators", "HybridEngine"]]]
"""Starts the simulators of a part and loads its policy, for the length of a block."""


def play_in(
    manager: Simulators,
    engine: HybridEngine,
    config: Config,
    episodes: Sequence[EpisodeSpec],
    on_episode: Callable[[int, EpisodeRecord], None] | None = None,
    video: TileRecorder | None = None,
) -> Evaluation:
    """Play episodes in simulators that run.

    Args:
        manager: the simulators.
        engine: the policy.
        config: says whether actions are drawn, and how chunks are averaged.
        episodes: to play.
        on_episode: called with each episode as soon as it ended, with its number among `episodes`.
        video: records the first episodes.
    """
    from embodyrl.rollout.action_queue import Overlap
    from embodyrl.runner.evaluation import evaluate, evaluation_noise

    noise = evaluation_noise(config, engine)
    return evaluate(manager, engine, episodes, video, noise, Overlap.of(config), on_episode)


@dataclass(kw_only=True)
class EvaluationRun:
    """An evaluation in progress; its row has the episodes that ended so far.

    Args:
        plan: of it.
        number: among the evaluations of its journal.
        journal: has the episodes that an earlier process played, and gets those of this one; None: nothing is kept.
        opens: starts simulators and policy of a part.
    """

    plan: Plan
    number: int = 0
    journal: Journal | None = None
    opens: Opens = acting
    _records: dict[tuple[int, int], EpisodeRecord] = field(default_factory=dict)
    """By the numbers of the part and of the episode in it."""
    _seconds: dict[int, float] = field(default_factory=dict)
    """Of each part."""
    _done: bool = False

    def __post_init__(self) -> None:
        from embodyrl.runner.evaluation import held_out_episodes

        self._episodes = [held_out_episodes(part.config) for part in self.plan.parts]
        if self.plan.perturb:
            perturb = self.plan.perturb
            self._episodes = [
                [dataclasses.replace(each, perturb=perturb) for each in every] for every in self._episodes
            ]
        for number in range(len(self.plan.parts)):
            self._take_over(number)

    def _take_over(self, number: int) -> None:
        """Take the episodes of a part that an earlier process played."""
        kept, seconds = ({}, 0.0) if self.journal is None else self.journal.kept(self.number, number)
        episodes = self._episodes[number]
        kept = {index: record for index, record in kept.items() if _is_of(record, episodes[index : index + 1])}
        is_whole = len(kept) == len(episodes)
        # Random streams of drawn actions run through all episodes of a part, so a rest of it would get other ones.
        if is_whole or not self.plan.parts[number].config.eval.sample:
            self._records |= {(number, index): record for index, record in kept.items()}
            self._seconds[number] = seconds

    @property
    def taken_over(self) -> int:
        """Number of episodes that need not be played again."""
        return len(self._records)

    def run(self) -> Row:
        """Play what is missing of all parts; returns the row."""
        for number, part in enumerate(self.plan.parts):
            missing = [index for index in range(len(self._episodes[number])) if (number, index) not in self._records]
            if missing:
                self._play(number, part, missing)
        self._done = True
        return self.row()

    def _play(self, number: int, part: Part, missing: Sequence[int]) -> None:
        with self.opens(part) as (manager, engine):
            begun, before = time.perf_counter(), self._seconds.get(number, 0.0)

            def hear(index: int, record: EpisodeRecord) -> None:
                self._seconds[number] = before + time.perf_counter() - begun
                self._hear(number, missing[index], record)

            episodes = [self._episodes[number][index] for index in missing]
            self._seconds[number] = before + play_in(manager, engine, part.config, episodes, hear).seconds

    def _hear(self, part: int, index: int, record: EpisodeRecord) -> None:
        self._records[part, index] = record
        if self.journal is not None:
            self.journal.add(self.number, part, index, record, self._seconds[part])

    @property
    def has_episodes(self) -> bool:
        """Whether an episode has ended."""
        return bool(self._records)

    def row(self) -> Row:
        """Return what there is, in the order of the plan: episodes end in any order."""
        played = [(self.plan.parts[part].config, self._records[part, index]) for part, index in sorted(self._records)]
        return Row(
            label=self.plan.label,
            table=self.plan.table,
            policy=self.plan.policy,
            protocol=self.plan.protocol,
            records=tuple(record for _, record in played),
            initial_states=tuple(
                simulator_info(config.env.name).initial_state(record.start_state, config.env)
                for config, record in played
            ),
            sampled=self.plan.parts[0].config.eval.sample,
            seconds=sum(self._seconds.values()),
            settings=tuple(self._settings(part) for part in self.plan.parts),
            complete=self._done,
        )

    def _settings(self, part: Part) -> dict[str, Any]:
        settings = kept_settings(part.loaded)
        if self.plan.perturb:
            settings["eval"] = settings["eval"] | {"perturb": {kind: [level] for kind, level in self.plan.perturb}}
        return settings


def _is_of(record: EpisodeRecord, planned: Sequence[EpisodeSpec]) -> bool:
    """Return whether a record is that of a planned episode."""
    return any((record.task, record.start_state, record.seed) == (it.task, it.start_state, it.seed) for it in planned)


def kept_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """Return what results.json has of a config, without the values of environment variables."""
    plain = to_plain(loaded.written)
    return {name: plain[name] for name in KEPT}


class Study:
    """Evaluations that are planned together, so that a fault of the last is found before the first begins.

    Args:
        command: what is to be evaluated, and how.
        load: loads the config of the policy.
        load_other: loads that of the second policy, if there is one.
        out: folder for results.json and the episodes as they end; None: nothing is kept.
        goes_on: keep the episodes that `out` holds, if it holds any, and play the others.
        say: prints a text for people.

    Raises:
        ProtocolError, ConfigError: see `plan`; nothing has started.
    """

    def __init__(
        self,
        command: Command,
        load: Load,
        load_other: Load | None,
        out: Path | None,
        *,
        goes_on: bool,
        say: Callable[[str], None],
    ) -> None:
        self._command, self._out, self._say = command, out, say
        _check(command)
        if out is not None:
            _check_folder(out, goes_on=goes_on)
        self._plans = self._planned(load, load_other)

    def _planned(self, load: Load, load_other: Load | None) -> list[Plan]:
        """Return the evaluations to play, those that others are compared with before them."""
        overrides, protocols, command = self._command.overrides, self._command.protocols, self._command
        asked: list[tuple[Plan, str, Sequence[str]]] = []
        for name in protocols:
            own = plan(load, overrides, command.policy, name)
            asked.append((own, name, overrides))
            for label, texts in _variants(own, overrides):
                asked.append((plan(load, texts, command.policy, name, label=label), name, texts))
        plans = [first for first, _, _ in asked]
        if command.other is not None and load_other is not None:
            if command.video is not None and len(asked) > 1:
                raise ProtocolError(ONE_TABLE)
            plans = [
                each
                for first, name, texts in asked
                for each in _pair(first, beside(first, load_other, texts, command.other, name))
            ]
        return [dataclasses.replace(each, table="") for each in plans] if len(asked) == 1 else plans

    def run(self) -> Comparison:
        """Play everything; returns what came of it. An interruption says what there is, and writes it, first.

        Raises:
            JournalError: what an earlier process kept is of another evaluation.
            RunDirError: another process plays it.
        """
        out = self._out
        with nullcontext() if out is None else Journal(out, self._command, _facts(self._plans)) as journal:
            self._announce()
            rows: list[Row] = []
            playing: EvaluationRun | None = None
            try:
                for number, each in enumerate(self._plans):
                    same = next(
                        (row for row, other in zip(rows, self._plans, strict=False) if each.same_as(other)), None
                    )
                    if same is not None:
                        self._say(f"{each.name}: the same settings as {same.name}, so its episodes count")
                        rows.append(
                            dataclasses.replace(same, label=each.label, protocol=each.protocol, table=each.table)
                        )
                        continue
                    playing = EvaluationRun(plan=each, number=number, journal=journal, opens=self._opened)
                    self._say(self._beginning(playing))
                    rows.append(playing.run())
                    playing = None
                    self._ended(rows)
                    self._write(rows)
            except BaseException:
                self._give_up([*rows, playing.row()] if playing is not None and playing.has_episodes else rows)
                raise
            found = Comparison(rows=tuple(rows))
            self._show(found)
            return found

    def _opened(self, part: Part) -> AbstractContextManager[tuple[Simulators, HybridEngine]]:
        """Start the simulators of a part and load its policy."""
        return acting(part, self._say)

    def _ended(self, rows: Sequence[Row]) -> None:
        """Say what came of the last of some evaluations, where that is not left to the end."""

    def _text(self, found: Comparison) -> str:
        """Return the tables."""
        return found.text()

    def _kept(self, found: Comparison) -> dict[str, Any]:
        """Return further entries of results.json."""
        return {}

    def _beginning(self, playing: EvaluationRun) -> str:
        kept = f": {playing.taken_over} of {playing.plan.episodes} episodes were played" if playing.taken_over else ""
        return f"playing {playing.plan.name} ({playing.number + 1} of {len(self._plans)}){kept}"

    def _pairs(self) -> list[tuple[Plan, Plan]]:
        """Return the evaluations of two policies under the same protocol."""
        return list(zip(self._plans[::2], self._plans[1::2], strict=True)) if self._command.other else []

    def _announce(self) -> None:
        said: set[str] = set()
        for each in self._plans:
            for line in announcement(each).splitlines():
                if line not in said or not line.startswith(REMARKS):  # those of a protocol concern all its variants
                    self._say(textwrap.fill(line, WIDE, subsequent_indent="    ") if line.startswith(REMARKS) else line)
                said.add(line)
        for first, second in self._pairs():
            if left := remaining_differences(first, second):
                text = f"note: they still differ in {', '.join(left)}"
                self._say(textwrap.fill(text, WIDE, subsequent_indent="  "))
        policies = {each.policy for each in self._plans}
        seconds = None if any(map(is_url, policies)) else expected_seconds(self._plans, Path(self._plans[0].policy))
        if seconds is not None:
            self._say(f"at most about {rounded(seconds)}, by the speed of the run that trained it")

    def _give_up(self, rows: Sequence[Row]) -> None:
        """Say and write what an interrupted study has."""
        if rows:
            self._say(f"interrupted; what there is:\n{self._text(Comparison(rows=tuple(rows)))}")
            self._write(rows)
        if self._out is not None:
            self._say(f"next: {shell_command('resume', self._out)}")

    def _write(self, rows: Sequence[Row]) -> Path | None:
        missing = len(rows) < len(self._plans)
        found = Comparison(rows=tuple(rows), complete=not missing)
        return None if self._out is None else found.write(self._out, self._kept(found))

    def _show(self, found: Comparison) -> None:
        self._say(found.text())
        if self._command.other:
            for table in found.tables():
                title = f"{table.rows[0].table}: " if table.rows[0].table else ""
                self._say(title + found.differing_text(table.rows[1]))
        if self._command.video is not None:
            self._record(found, Path(self._command.video))
        if self._out is not None:
            self._say(f"written to {self._write(found.rows)}")

    def _record(self, found: Comparison, video: Path) -> None:
        """Play episodes that only one policy solved again, and record both side by side."""
        chosen = found.differing(found.rows[1])[: self._plans[0].base.tracking.video.episodes or RECORDED]
        if not chosen:
            self._say(f"no video: no episode differs, so {video} was not written")
            return
        record_side_by_side(self._plans, chosen, video)
        self._say(f"recorded {len(chosen)} of the episodes that differ: {video}")


def _check(command: Command) -> None:
    """Refuse what cannot be played before anything is loaded."""
    repeated = [name for name in command.protocols if command.protocols.count(name) > 1]
    if repeated:
        raise ProtocolError(f"protocol {repeated[0]!r} is named twice")
    if not command.protocols:
        raise ProtocolError(f"no protocol: name one, or {OWN!r} for the checkpoint's own settings")
    if command.video is not None and len(command.protocols) > 1 and command.other is not None:
        raise ProtocolError(ONE_TABLE)
    if command.video is not None and command.other is None:
        raise ProtocolError("a video of protocols shows nothing new: give it without --protocol, or with --compare")
    if command.video is not None and any(text.replace(" ", "") == "eval.sample=true" for text in command.overrides):
        raise ProtocolError(
            "a video of the episodes that differ plays them again, and with sampled actions they would end otherwise: "
            "leave out the video or --sample"
        )


def _check_folder(out: Path, *, goes_on: bool) -> None:
    """Refuse a folder for results that holds some already, unless these are to be continued."""
    if not goes_on and is_journal(out):
        raise ProtocolError(
            f"{out} holds results, and they are never overwritten: name another folder with --out DIR, or continue "
            f"with what was interrupted there: {shell_command('resume', out)}"
        )
    if (out / FILE).exists() and not is_journal(out):
        raise ProtocolError(f"{out / FILE} exists, and results are never overwritten: name another folder")


def _facts(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return what decides the results of evaluations, as JSON values."""
    from embodyrl.runner.reproduction import versions_of

    digests = {place: digest_of(place) for place in dict.fromkeys(each.policy for each in plans)}
    evaluations = [
        {
            "protocol": None if each.protocol is None else each.protocol.name,
            "weights": digests[each.policy],
            "parts": [_decisive(part) for part in each.parts],
            **({"perturb": [list(pair) for pair in each.perturb]} if each.perturb else {}),
        }
        for each in plans
    ]
    return {"evaluations": evaluations, "versions": versions_of(plans[0].base)}


def _decisive(part: Part) -> dict[str, Any]:
    """Return the settings that decide results: not those of the machine, as long as no actions are drawn."""
    settings = kept_settings(part.loaded)
    left_out = () if part.config.eval.sample else OF_THE_MACHINE
    return settings | {"env": {name: value for name, value in settings["env"].items() if name not in left_out}}


def _pair(first: Plan, second: Plan) -> list[Plan]:
    """Return the evaluations of two policies under a protocol with its title, and short names that differ: the last
    parts of their paths that do."""
    plans = [dataclasses.replace(each, table=first.label) for each in (first, second)]
    paths = [Path(each.policy).parts for each in plans]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return [dataclasses.replace(each, label=name) for each, name in zip(plans, names, strict=True)]
    return [dataclasses.replace(each, label=f"{each.policy} ({number})") for number, each in enumerate(plans, 1)]


def record_side_by_side(plans: Sequence[Plan], episodes: Sequence[Differing], video: Path) -> None:
    """Record episodes of two policies: a row of tiles for each, one for each policy."""
    from embodyrl.envs import EpisodeSpec
    from embodyrl.runner.evaluation import TileRecorder
    from embodyrl.tracking.video import TiledVideo

    titles = [f"{plan.label}: {each.task} {each.initial_state}" for each in episodes for plan in plans]
    tiles: TiledVideo | None = None
    with ExitStack() as stack:
        for column, part in ((column, part) for column, each in enumerate(plans) for part in each.parts):
            # An episode belongs to the part that plays its task.
            rows = [row for row, each in enumerate(episodes) if each.task in part.config.env.tasks]
            records = [episodes[row].first if column == 0 else episodes[row].second for row in rows]
            specs = [EpisodeSpec(task=each.task, start_state=each.start_state, seed=each.seed) for each in records]
            if not specs:
                continue
            with acting(part) as (manager, engine):
                if tiles is None:
                    fps = manager.spec.control_frequency
                    tiles = stack.enter_context(TiledVideo(video, titles, fps=fps, columns=len(plans)))
                recorder = TileRecorder(manager, tiles, [len(plans) * row + column for row in rows])
                play_in(manager, engine, part.config, specs, video=recorder)
