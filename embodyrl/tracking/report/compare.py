"""Several runs side by side: repetitions of an experiment as one, with the spread of its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from embodyrl.config.build import flat, inline, plain_value
from embodyrl.config.fields import class_at, settings_of
from embodyrl.config.schema import Config
from embodyrl.runs.record import EvaluationRecord, RunRecord
from embodyrl.tracking.intervals import mean_interval, outcomes, rate_interval, wilson_interval
from embodyrl.tracking.report.series import Curve, Series, evaluated, mean_of, points_of, running_mean, timed, window_of


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate and its 95 % interval."""

    name: str
    successes: int
    trials: int

    @property
    def rate(self) -> float:
        """Successes of the trials, 0 .. 1."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson interval."""
        return wilson_interval(self.successes, self.trials)


def by_task(evaluation: EvaluationRecord) -> list[Rate]:
    """Return the success of each task, in the order of their first episodes, where it is known."""
    return _rates(evaluation, "task")


def by_source(evaluation: EvaluationRecord) -> list[Rate]:
    """Return the success of each simulator of a mix, see `by_task`; none for runs with one."""
    return [rate for rate in _rates(evaluation, "source") if rate.name]


def _rates(evaluation: EvaluationRecord, key: str) -> list[Rate]:
    """Return the success of the episodes with each value of an entry of their records."""
    solved: dict[str, list[bool | None]] = {}
    for each in evaluation.episodes:
        name = each.get(key)
        solved.setdefault(name if isinstance(name, str) else "", []).append(each["success"])
    rates = {name: outcomes(found) for name, found in solved.items()}
    return [Rate(name=name, successes=sum(found), trials=len(found)) for name, found in rates.items() if found]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs whose configs differ in their seeds, names and places only."""

    name: str
    """The run's name, with what sets it apart from other experiments on the page."""
    settings: Mapping[str, str]
    """All that matters, by full name."""
    runs: Sequence[RunRecord]
    colour: int
    """Index of `series.COLOURS`."""

    @cached_property
    def finals(self) -> Sequence[EvaluationRecord]:
        """Last evaluation of each run that has one."""
        return [run.final for run in self.runs if run.final is not None]

    @cached_property
    def seeds(self) -> str:
        """Seeds, for people."""
        return ", ".join("?" if run.seed is None else str(run.seed) for run in self.runs)

    @cached_property
    def rates(self) -> Sequence[tuple[float, int]]:
        """Success rate, 0 .. 1, and episodes of each last evaluation whose success is known."""
        return [
            (each.success, round(each.metrics["eval/episodes"])) for each in self.finals if each.success is not None
        ]

    @property
    def success(self) -> float | None:
        """Mean success of the last evaluations, 0 .. 1; None if it is unknown."""
        return fmean(rate for rate, _ in self.rates) if self.rates else None

    @property
    def over_seeds(self) -> tuple[float, float] | None:
        """95 % interval of the mean over seeds (Student's t), within 0 .. 1; None for fewer than two."""
        interval = mean_interval([rate for rate, _ in self.rates])
        return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))

    @property
    def over_episodes(self) -> tuple[float, float] | None:
        """95 % Wilson interval of all last evaluations' episodes together, as if seeds did not matter."""
        trials = sum(episodes for _, episodes in self.rates)
        successes = sum(round(rate * episodes) for rate, episodes in self.rates)
        return wilson_interval(successes, trials) if trials else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval to show: `rate_interval` over the seeds."""
        return rate_interval([rate for rate, _ in self.rates], [episodes for _, episodes in self.rates])

    def mean(self, metric: str) -> tuple[float, tuple[float, float] | None] | None:
        """Return mean and interval over seeds of a metric of the last evaluations; None without any."""
        values = [float(each.metrics[metric]) for each in self.finals]
        return (fmean(values), mean_interval(values)) if values else None

    def by_task(self) -> dict[str, Rate]:
        """Return the success of each task in the last evaluations together."""
        counts: dict[str, tuple[int, int]] = {}
        for each in (rate for final in self.finals for rate in by_task(final)):
            successes, trials = counts.get(each.name, (0, 0))
            counts[each.name] = successes + each.successes, trials + each.trials
        return {name: Rate(name=name, successes=won, trials=trials) for name, (won, trials) in counts.items()}


def group(runs: Sequence[RunRecord]) -> list[Experiment]:
    """Return the experiments that runs repeat, in the order of their first runs; seeds in order."""
    gathered: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    for run in runs:
        gathered.setdefault(tuple(sorted(experiment_of(run.config).items())), []).append(run)
    settings = [dict(key) for key in gathered]
    names = [members[0].name for members in gathered.values()]
    apart = names_apart(settings)
    return [
        Experiment(
            name=name if names.count(name) == 1 else f"{name}: {differing}" if differing else name,
            settings=own,
            runs=sorted(members, key=lambda run: -1 if run.seed is None else run.seed),
            colour=number,
        )
        for number, (name, differing, own, members) in enumerate(
            zip(names, apart, settings, gathered.values(), strict=True)
        )
    ]


def x_key_of(experiments: Sequence[Experiment]) -> str:
    """Return the metric on the horizontal axis: env steps, unless a run takes none."""
    keys = {run.x_key for each in experiments for run in each.runs}
    return "iteration" if "iteration" in keys else "env/total_steps"


def evaluations_of(experiments: Sequence[Experiment], metric: str, x_key: str) -> list[Series]:
    """Return a metric of evaluations for each experiment: the points of a single run, with their intervals, or the mean
    of several with the band of its seeds."""

    def at(each: EvaluationRecord) -> float:
        return float(each.iteration) if x_key == "iteration" else each.env_steps

    found = []
    for experiment in experiments:
        runs = [
            [(at(each), each.metrics[metric], each.iteration) for each in run.evaluations if metric in each.metrics]
            for run in experiment.runs
            if any(metric in each.metrics for each in run.evaluations)
        ]
        if len(runs) == 1:
            alone = next(run for run in experiment.runs if run.evaluations)
            series = evaluated(alone.evaluations, metric, x_key, experiment.colour, experiment.name)
        else:
            series = mean_of(runs, experiment.name, colour=experiment.colour)
        if series is not None:
            found.append(timed(series, [run for run in experiment.runs if run.evaluations]))
    return found


def training_of(experiments: Sequence[Experiment], curve: Curve) -> tuple[list[Series], int]:
    """Return the mean of a diagram's first metric that an experiment has, with the band of its seeds; and over how many
    iterations it is a running mean."""
    window = window_of(curve, max(len(run.rows) for each in experiments for run in each.runs))
    found = []
    for each in experiments:
        for metric in curve.metrics:
            runs = [points for run in each.runs if (points := points_of(run, metric))]
            smooth = [_smoothed(points, window) for points in runs]
            if (series := mean_of(smooth, each.name, colour=each.colour)) is not None:
                found.append(timed(series, [run for run in each.runs if points_of(run, metric)]))
                break
    return found, window


def _smoothed(points: Sequence[tuple[float, float, int]], window: int) -> list[tuple[float, float, int]]:
    means = running_mean([value for _, value, _ in points], window)
    return [(x, mean, iteration) for (x, _, iteration), mean in zip(points, means, strict=True)]


def differing_settings(experiments: Sequence[Experiment]) -> list[tuple[str, list[str]]]:
    """Return the settings in which experiments differ, by name, with each one's value ("" where it has none)."""
    names = dict.fromkeys(name for each in experiments for name in each.settings)
    values = {name: [each.settings.get(name, "") for each in experiments] for name in names}
    return [(name, found) for name, found in values.items() if len(set(found)) > 1]


# ------------------------------------------------------------------------------------------------------------- settings

NO_MATTER = ("seed", "run.", "tracking.", "plugins")
"""Settings, or sections, in which repetitions of an experiment may differ."""


@dataclass(frozen=True)
class Change:
    """A setting that is not at its default."""

    name: str
    value: str
    default: str
    """Empty for settings without one."""


def changes_from_defaults(config: Mapping[str, Any]) -> list[Change]:
    """Return the settings of a plain config that differ from the defaults of the components that it chooses. Of
    components that are not registered here, such as those of plug-ins, which are not imported, all are returned."""
    return list(_changes(Config, config, ""))


def _changes(section: type, data: Mapping[str, Any], prefix: str) -> Iterator[Change]:
    known = settings_of(class_at(section, dict(data)))
    for key, value in data.items():
        setting, name = known.get(key), f"{prefix}{key}"
        if isinstance(value, dict) and setting is not None and setting.section is not None:
            yield from _changes(setting.section, value, f"{name}.")
        elif setting is None or setting.required:
            yield Change(name, inline(value), "")
        elif value != (default := plain_value(setting.default)):
            yield Change(name, inline(value), inline(default))


def experiment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that make an experiment, by full name: all but those in which its repetitions differ."""
    return {
        name: inline(value)
        for name, value in flat(config).items()
        if not any(name == each or (each.endswith(".") and name.startswith(each)) for each in NO_MATTER)
    }


def names_apart(experiments: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a text for each experiment with the settings in which it differs from others, for instance
    `engine.optimizer.lr=0.001`; empty for a single one."""
    names = dict.fromkeys(name for each in experiments for name in each)
    apart = [name for name in names if len({each.get(name) for each in experiments}) > 1]
    return [", ".join(f"{name}={each[name]}" for name in apart if name in each) for each in experiments]
