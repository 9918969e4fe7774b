"""Reads which settings take several values, in Hydra's multirun syntax, and lists the runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from embodyrl.config import ConfigError, LoadedConfig
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, Location

SEED = "seed"
MOST_RUNS = 1000
"""Most runs of a sweep."""
LONGEST_NAME = 200
"""Most characters of a run's folder, which a file system limits to 255 bytes."""
NOT_SWEPT = {
    "run.dir": "each run gets a folder of its own in that of the sweep",
    "run.name": "all runs of a sweep are in one folder",
    "plugins": "all runs of a sweep run the same code",
}
"""Settings that have one value for all runs, and why."""
SHOWN_SETTINGS = 3
"""More settings with a fault are counted, not named."""


@dataclass(frozen=True)
class Axis:
    """A setting with several values."""

    key: str
    """As on the command line: `algorithm.loss.clip_high`, `env`."""
    values: tuple[str, ...]
    """As on the command line."""


@dataclass(frozen=True)
class Point:
    """The swept settings of one run."""

    name: str
    """Its folder: `algorithm.loss.clip_high=0.2,seed=3`."""
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        """The settings for the command line."""
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def setting(self) -> str:
        """The settings without the seed; runs that share it are repetitions."""
        return ",".join(f"{key}={value}" for key, value in self.values.items() if key != SEED)


def several_values(word: str) -> Axis | None:
    """Return the values of an argument that names several: `a=1,2`, `a=range(1,4)`, `a=choice(x,y)`; None of any other.
    A list in brackets is one value, and so is what stands in quotes."""
    key, equals, text = word.partition("=")
    if not equals or not ("," in text or "(" in text):
        return None
    try:
        # Only the value, because Hydra would not read every key that means something here.
        parsed = OverridesParser.create().parse_override(f"key={text}")
        if not parsed.is_sweep_override():
            return None
        return Axis(key.lstrip("+"), tuple(parsed.sweep_string_iterator()))
    except (HydraException, RecursionError):  # the config's own check says what is wrong with it
        return None


def split_words(words: Iterable[str]) -> tuple[list[str], list[Axis]]:
    """Split overrides into those with one value and the axes of a sweep."""
    plain, axes = [], []
    for word in words:
        axis = several_values(word)
        if axis is None:
            plain.append(word)
        else:
            axes.append(axis)
    return plain, axes


Seeds = str | int | tuple[str, ...] | None
"""Seeds of a sweep: as `--seeds` says, their number, or themselves; None: only those of a setting."""


def read_seeds(text: str) -> int | tuple[str, ...]:
    """Return what `--seeds` asks for: a number of seeds, or the seeds themselves.

    Raises:
        ConfigError: it is neither.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+", word) for word in words) or (len(words) == 1 and int(text) == 0):
        raise refusal(f"--seeds {text!r} is neither a number of seeds nor a list of them", "write 5, or 3,7,9")
    if len(words) == 1 and int(text) > MOST_RUNS:
        raise refusal(f"--seeds {text} is more than {MOST_RUNS}", "write a smaller number, or that seed as seed=...")
    return int(text) if len(words) == 1 else tuple(words)


def refusal(message: str, hint: str) -> ConfigError:
    """Return an error about the command line."""
    return ConfigError([ConfigIssue((), message, hint, Location(COMMAND_LINE))])


def check_axes(axes: Sequence[Axis], plain: Sequence[str], seeds: int | tuple[str, ...] | None) -> None:
    """Check what is swept.

    Raises:
        ConfigError: with every fault.
    """
    given = Counter([axis.key for axis in axes] + [word.partition("=")[0] for word in plain])
    found = []
    for axis in axes:
        if axis.key in NOT_SWEPT:
            text = ",".join(axis.values)
            found.append((f"{axis.key} takes one value: {NOT_SWEPT[axis.key]}", f"""write '{axis.key}="{text}"'"""))
        if given[axis.key] > 1:
            found.append((f"{axis.key} is given {given[axis.key]} times", "name all of its values at once"))
        if repeated := [value for value, count in Counter(axis.values).items() if count > 1]:
            found.append((f"{axis.key} names {', '.join(repeated)} more than once", "name each value once"))
    if (isinstance(seeds, tuple) and given[SEED]) or (seeds is not None and SEED in [axis.key for axis in axes]):
        found.append(("seed and --seeds both name seeds", "leave one of them out"))
    if isinstance(seeds, tuple) and len(set(map(int, seeds))) < len(seeds):
        found.append((f"--seeds {','.join(seeds)} names a seed more than once", "name each once"))
    count = len(seeds) if isinstance(seeds, tuple) else seeds or 1
    number = math.prod(len(axis.values) for axis in axes) * count
    if number > MOST_RUNS:
        found.append((f"a sweep of {number} runs is larger than {MOST_RUNS}", "sweep fewer settings at once"))
    if found:
        where = Location(COMMAND_LINE)
        raise ConfigError([ConfigIssue((), message, hint, where) for message, hint in dict.fromkeys(found)])


def points_of(axes: Sequence[Axis]) -> list[Point]:
    """List all runs: every combination, the last axis fastest. Folders have different names."""
    points: list[Point] = []
    taken: Counter[str] = Counter()
    for values in product(*(axis.values for axis in axes)):
        chosen = dict(zip((axis.key for axis in axes), values, strict=True))
        plain = ",".join(f"{key}={value}" for key, value in chosen.items())
        name = re.sub(r"[^\w.,=+-]+", "_", plain)[:LONGEST_NAME].strip(".")
        taken[name] += 1
        points.append(Point(name if taken[name] == 1 else f"{name}~{taken[name]}", chosen))
    return points


Loader = Callable[[Sequence[str]], LoadedConfig]
"""Loads a sweep's config with overrides."""


def load_all(load: Loader, plain: Sequence[str], points: Sequence[Point]) -> list[LoadedConfig]:
    """Load the config of every run.

    Raises:
        ConfigError: see `together`.
    """
    return together(points, lambda point: load([*plain, *point.overrides]))


def together(points: Sequence[Point], load: Callable[[Point], LoadedConfig]) -> list[LoadedConfig]:
    """Load the config of every run.

    Raises:
        ConfigError: with the faults of all of them; one that only some settings have names these.
    """
    loaded, found = [], dict[ConfigIssue, list[Point]]()
    for point in points:
        try:
            loaded.append(load(point))
        except ConfigError as error:
            for fault in error.faults:
                found.setdefault(fault, []).append(point)
    if found:
        raise ConfigError([_with_settings(fault, concerned, points) for fault, concerned in found.items()])
    return loaded


def _with_settings(fault: ConfigIssue, concerned: Sequence[Point], points: Sequence[Point]) -> ConfigIssue:
    """Return a fault that says which settings have it, unless all have: one value, if exactly its runs do."""
    if len(concerned) == len(points):
        return fault
    names = list(dict.fromkeys(point.setting or point.name for point in concerned))
    for key, value in concerned[0].values.items():
        if [point for point in points if point.values[key] == value] == concerned:
            names = [f"{key}={value}"]
    more = f" and {len(names) - SHOWN_SETTINGS} more" if len(names) > SHOWN_SETTINGS else ""
    return replace(fault, message=f"with {'; '.join(names[:SHOWN_SETTINGS])}{more}: {fault.message}")


def with_seeds(load: Loader, plain: Sequence[str], axes: Sequence[Axis], seeds: Seeds) -> list[Axis]:
    """Return the axes, with one for the seeds that are asked for; a number of them begins with the config's own.

    Raises:
        ConfigError: what is swept, or the seeds, are illegal.
    """
    wanted = read_seeds(seeds) if isinstance(seeds, str) else seeds
    check_axes(axes, plain, wanted)
    if wanted is None:
        return list(axes)
    if isinstance(wanted, int):
        try:
            first = load([*plain, *points_of(axes)[0].overrides]).config.seed
        except ConfigError:  # all faults are reported together, later
            first = 1
        wanted = tuple(str(seed) for seed in range(first, first + wanted))
    return [*axes, Axis(SEED, wanted)]
