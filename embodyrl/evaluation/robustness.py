"""`embodyrl eval --robustness`: the same episodes without perturbation, and with each kind at each level."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.config import ConfigError
from embodyrl.config.perturbation_rules import perturbations
from embodyrl.config.schema import KINDS, MOST_LEVEL, Config
from embodyrl.envs.perturb.kinds import Perturbation
from embodyrl.errors import UserError, did_you_mean
from embodyrl.evaluation.journal import Command
from embodyrl.evaluation.protocols import OWN, ProtocolError
from embodyrl.evaluation.results import Comparison, Row, table
from embodyrl.evaluation.study import (
    PERTURBED,
    RECORDED,
    Load,
    Part,
    Plan,
    Study,
    acting,
    expected_seconds,
    perturbs,
    plan,
    play_in,
)
from embodyrl.files import write_whole
from embodyrl.placement.launcher import WorkerError
from embodyrl.registry import PYAV
from embodyrl.runs import ROBUSTNESS
from embodyrl.runs.robustness import FIGURE_FILE, VIDEO_FILE, Robustness
from embodyrl.screen import counted, rounded
from embodyrl.tracking.report.robustness import robustness_svg

if TYPE_CHECKING:  # these import torch
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.envs.manager import Simulators
    from embodyrl.runner.evaluation import EpisodeRecord

USUAL_LEVELS = (1, 3, 5)
"""Levels that are played if none are named."""
PLAIN = "none"
"""Name of the evaluation without perturbation."""
UNPERTURBED = f"{PERTURBED}=null"


class PerturbationError(UserError):
    """Raised when there is no such kind or level of perturbation, or it cannot be done here; nothing was started."""

    exit_code = 2


def grid_of(kinds: str | None, levels: str | None) -> dict[str, list[int]]:
    """Return the levels to play for each kind that is named; all kinds with the key "" if none is.

    Args:
        kinds: names, as in `camera,light`; None: all that the simulator can do.
        levels: as in `1,3,5`; None: `USUAL_LEVELS`.

    Raises:
        PerturbationError: there is no such kind or level.
    """
    numbers = [part.strip() for part in levels.split(",")] if levels is not None else [*map(str, USUAL_LEVELS)]
    for number in numbers:
        if number not in map(str, range(1, MOST_LEVEL + 1)):
            raise PerturbationError(
                f"--levels {levels}: {number!r} is no level, want numbers from 1 to {MOST_LEVEL}, as in 1,3,5"
            )
    chosen = sorted({int(number) for number in numbers})
    names = [part.strip() for part in kinds.split(",")] if kinds is not None else [""]
    for name in names:
        if kinds is not None and name not in KINDS:
            hint = did_you_mean(name, KINDS, lead=" - ")
            raise PerturbationError(f"--kinds {kinds}: there is no kind {name!r}{hint} (kinds: {', '.join(KINDS)})")
    return {name: chosen for name in dict.fromkeys(names)}


class RobustnessStudy(Study):
    """Paired evaluations of one policy without and with perturbations, in simulators that are started once.

    Args:
        command: has the levels to play for each kind; see `grid_of`.
        load: loads the policy's config.
        out: folder of results, figure and video; None: nothing is kept.
        goes_on: see `Study`.
        say: prints a text for people.

    Raises:
        PerturbationError: the simulator, the model or the tasks cannot show what is asked for.
        ProtocolError, ConfigError: see `Study`.
    """

    def __init__(
        self, command: Command, load: Load, out: Path | None, *, goes_on: bool, say: Callable[[str], None]
    ) -> None:
        self._simulators: tuple[Simulators, HybridEngine] | None = None
        self._left_out = ""
        super().__init__(command, load, None, out, goes_on=goes_on, say=say)

    def _planned(self, load: Load, load_other: Load | None) -> list[Plan]:
        command = self._command
        if command.other is not None or command.protocols != [OWN]:
            raise ProtocolError("robustness is evaluated of one policy with its own settings: leave out the protocol")
        if perturbs(text.partition("=")[0].strip() for text in command.overrides):
            raise PerturbationError(
                f"{PERTURBED} and --robustness: episodes without a perturbation are what the others are compared with; "
                f"leave out {PERTURBED}, and name kinds and levels with --kinds and --levels"
            )
        own = plan(load, [UNPERTURBED, *command.overrides], command.policy, OWN, label=PLAIN)
        grid = _possible(own.base, command.perturb or {})
        if "words" in grid:
            self._check_words(load, grid)
        return [
            own,
            *(
                dataclasses.replace(own, label=f"{kind} {level}", perturb=((kind, level),))
                for kind, levels in grid.items()
                for level in levels
            ),
        ]

    def _check_words(self, load: Load, grid: dict[str, Sequence[int]]) -> None:
        """Leave out paraphrases that are too long for the model, unless they are asked for.

        Raises:
            ConfigError: they are asked for.
        """
        try:
            load([*self._command.overrides, f"eval.perturb={{words: {max(grid['words'])}}}"])
        except ConfigError as error:
            if "" not in (self._command.perturb or {}):
                raise
            del grid["words"]
            self._left_out = f"words: {error.faults[0].message}"

    def run(self) -> Comparison:
        """See `Study`."""
        with ExitStack() as stack:
            self._stack = stack
            return super().run()

    @contextmanager
    def _opened(self, part: Part) -> Iterator[tuple[Simulators, HybridEngine]]:
        """See `Study`; all evaluations have the same simulators and the same policy."""
        if self._simulators is None:
            self._simulators = self._stack.enter_context(acting(part))
        yield self._simulators

    def _announce(self) -> None:
        own, count = self._plans[0], len(self._plans)
        kinds = list(dict.fromkeys(kind for each in self._plans for kind, _ in each.perturb))
        levels = sorted({level for each in self._plans for _, level in each.perturb})
        tasks = own.base.env.tasks
        what = counted(len(tasks), "task") if len(tasks) > 1 else tasks[0]
        self._say(
            f"robustness of {own.policy}\n"
            f"  {counted(own.episodes, 'episode')} of {what}, without and with\n"
            f"  {', '.join(kinds)} at {'level' if len(levels) == 1 else 'levels'} {', '.join(map(str, levels))}\n"
            f"  {count} evaluations, {counted(sum(each.most_steps for each in self._plans), 'control step')} at most"
        )
        left = [kind for kind in KINDS if kind not in kinds]
        if left and "" in (self._command.perturb or {}):
            self._say(f"  not possible here: {', '.join(left)}")
        if self._left_out:
            self._say(f"  {self._left_out}")
        if (seconds := expected_seconds(self._plans, Path(own.policy))) is not None:
            self._say(f"at most about {rounded(seconds)}, by the speed of the run that trained it")

    def _ended(self, rows: Sequence[Row]) -> None:
        [*_, found] = degradations(Comparison(rows=tuple(rows)))
        success = "unknown" if found.success is None else f"{found.success:.2f}"
        drop = "" if found.drop is None else f", drop {found.drop:+.2f}"
        self._say(f"  {found.name}: success {success}{drop}, return {found.mean_return:.2f}")

    def _text(self, found: Comparison) -> str:
        return robustness_text(degradations(found))

    def _kept(self, found: Comparison) -> dict[str, Any]:
        return {ROBUSTNESS: [each.to_plain() for each in degradations(found)]}

    def _show(self, found: Comparison) -> None:
        rows = degradations(found)
        self._say(robustness_text(rows))
        if rows[0].success == 0.0:
            self._say("nothing could be lost: the policy solves no episode without a perturbation either")
        if self._out is None:
            return
        self._say(f"written to {self._write(found.rows)}")
        if rows[0].success is not None:
            write_whole(self._out / FIGURE_FILE, robustness_svg(rows))
            self._say(f"figure: {self._out / FIGURE_FILE}")
        self._film(found, self._out / VIDEO_FILE)

    def _film(self, found: Comparison, video: Path) -> None:
        """Record episodes that were lost to a perturbation, without and with it side by side."""
        config = self._plans[0].base
        lost = worst(found, config.tracking.video.episodes or RECORDED)
        if not lost:
            self._say("no video: no episode that is solved without perturbation fails with one")
        elif config.eval.sample:
            self._say("no video: with sampled actions, episodes that are played again end otherwise")
        elif not PYAV.is_met():
            self._say(f"no video: PyAV is not installed: {PYAV.install}")
        else:
            try:
                self._record_pairs(lost, video)
            except WorkerError as error:  # such as that there is no OpenGL here; the results are written
                self._say(f"no video: {str(error).splitlines()[0]}")

    def _record_pairs(self, lost: Sequence[Lost], video: Path) -> None:
        self._say(f"recording {counted(len(lost), 'episode')}, without and with a perturbation")
        from embodyrl.envs import EpisodeSpec
        from embodyrl.runner.evaluation import TileRecorder
        from embodyrl.tracking.video import TiledVideo

        titles = [title for each in lost for title in (f"none: {each.where}", f"{each.label}: {each.where}")]
        [part] = self._plans[0].parts
        with (
            self._opened(part) as (manager, engine),
            TiledVideo(video, titles, fps=manager.spec.control_frequency, columns=2) as tiles,
        ):
            for column in (0, 1):
                specs = [
                    EpisodeSpec(
                        task=each.record.task,
                        start_state=each.record.start_state,
                        seed=each.record.seed,
                        perturb=each.perturb if column else (),
                    )
                    for each in lost
                ]
                recorder = TileRecorder(manager, tiles, [2 * row + column for row in range(len(lost))])
                play_in(manager, engine, part.config, specs, video=recorder)
        self._say(f"recorded {counted(len(lost), 'episode')} that a perturbation loses, without and with it: {video}")


def _possible(config: Config, asked: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the levels to play for each kind.

    Raises:
        PerturbationError: a kind that is named cannot be done here, or none can.
    """
    able = perturbations(config, known="" in asked)
    if "" in asked:
        if not able:
            raise PerturbationError(
                f"simulator {config.env.name!r} can do no perturbation here, and model {config.model.name!r} reads no "
                "task descriptions that could be paraphrased: evaluate without --robustness"
            )
        return {kind: asked[""] for kind in able}
    for kind in asked:
        if kind not in able:
            raise PerturbationError(
                f"--kinds: {kind!r} is not possible with simulator {config.env.name!r}, env.cameras = "
                f"{config.env.cameras} and model {config.model.name!r} (possible: {', '.join(able) or 'nothing'}): "
                "leave it out"
            )
    return {kind: asked[kind] for kind in KINDS if kind in asked}


# ---- what came of it


def degradations(found: Comparison) -> list[Robustness]:
    """Return the success of each evaluation, and how it drops against the first, which is without perturbation."""
    rows = []
    for number, row in enumerate(found.rows):
        kind, _, level = row.label.partition(" ")
        pairs, interval = found.pairs(row), row.interval or (None, None)
        compared = number > 0 and pairs.count > 0
        low, high = pairs.interval if compared else (0.0, 0.0)
        rows.append(
            Robustness(
                kind=kind if number else None,
                level=int(level or 0),
                episodes=len(row.records),
                success=row.rate,
                success_low=interval[0],
                success_high=interval[1],
                drop=0.0 - pairs.difference if compared else None,  # 0.0, where `-` alone would make it -0.0
                drop_low=0.0 - high if compared else None,
                drop_high=0.0 - low if compared else None,
                lost=pairs.only_first,
                gained=pairs.only_second,
                mean_return=row.mean_return,
            )
        )
    return rows


def robustness_text(rows: Sequence[Robustness]) -> str:
    """Return the table, no wider than 80 columns."""
    lines = [("kind", "level", "success", "95 % interval", "drop", "95 % interval", "lost", "return")]
    for before, row in zip((None, *rows), rows, strict=False):
        success, drop = ("-", "-"), ("", "")
        if row.success is not None and row.success_low is not None and row.success_high is not None:
            success = (f"{row.success:.2f}", f"{row.success_low:.2f} .. {row.success_high:.2f}")
        if row.drop is not None and row.drop_low is not None and row.drop_high is not None:
            drop = (f"{row.drop:+.2f}", f"{row.drop_low:+.2f} .. {row.drop_high:+.2f}")
        first = before is None or before.kind != row.kind
        name = (row.kind or PLAIN) if first else ""
        lost = "" if row.kind is None else str(row.lost)
        lines.append((name, str(row.level or ""), *success, *drop, lost, f"{row.mean_return:.2f}"))
    return table(lines)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """An episode that a perturbation loses."""

    label: str
    """Name of the evaluation with it."""
    perturb: Perturbation
    record: EpisodeRecord
    initial_state: int
    decrease: float
    """Of the return."""

    @property
    def where(self) -> str:
        """Task and initial state, for people."""
        return f"{self.record.task} {self.initial_state}"


def worst(found: Comparison, count: int) -> list[Lost]:
    """Return up to `count` episodes that are solved without perturbation and not with one: of each kind one that the
    lowest level loses, and of these those that lose most of the return first."""
    by_kind: dict[str, Lost] = {}
    for row in found.rows[1:]:
        for each in found.differing(row):
            if not found.rows[0].is_solved(each.first):
                continue
            kind, _, level = row.label.partition(" ")
            lost = Lost(
                label=row.label,
                perturb=((kind, int(level)),),
                record=each.second,
                initial_state=each.initial_state,
                decrease=each.first.total_reward - each.second.total_reward,
            )
            kept = by_kind.get(kind)
            if kept is None or (kept.label == row.label and kept.decrease < lost.decrease):
                by_kind[kind] = lost
    return sorted(by_kind.values(), key=lambda each: -each.decrease)[:count]
