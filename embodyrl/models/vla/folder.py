"""What a checkpoint's folder holds beside the weights: its files, what config.json may state, statistics. Imports no
torch, so that a config can be checked against its checkpoint before anything starts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import PUBLISHED

CONFIG = "config.json"


# ------------------------------------------------------------------------------------------------------ what they state

MOST = (
    ("layers", 1_000),
    ("image_size", 4_096),
    ("patch", 4_096),
    ("resolution", 4_096),
    ("chunk_size", 10_000),
    ("horizon", 10_000),
    ("_dim", 65_536),
    ("_length", 100_000),
)
"""Largest sizes that a checkpoint may state, by a part of their names: larger ones would take all memory, or hours."""
MOST_OF_OTHERS = 2**24


def wrong(where: str, found: object, expected: str, *, shown: int | None = 60) -> PolicyError:
    """Return the error for what is at a place of a file instead of what was expected; the first `shown` characters are
    shown, None: all."""
    return PolicyError(f"{where} is {repr(found)[:shown]}, {expected} was expected", "download it again")


def no_config(folder: Path, what: str) -> PolicyError:
    """Return the error for a folder without config.json; folders in it that have one are named.

    Args:
        folder: that was given.
        what: whose folder is wanted, as in `a pi0 checkpoint`.
    """
    inner = sorted(str(path.parent) for path in islice(folder.glob(f"*/{CONFIG}"), 100))
    remedy = f"give the folder of {what}" + (f", such as {' or '.join(inner[:4])}" if inner else "")
    return PolicyError(f"{folder} holds no {CONFIG}", remedy)


def damaged(where: str, found: object, expected: str) -> PolicyError:
    """Return the error for an entry of config.json; see `wrong`."""
    return wrong(f"{CONFIG}: {where}", found, expected, shown=None)


def check_whole(found: object, where: str, *, least: int = 1, file: str = CONFIG) -> int:
    """Return a whole number of a checkpoint's file.

    Args:
        found: what is there.
        where: its place in the file, for messages; its name decides how large it may be.
        least: the smallest that is allowed.
        file: name of the file.

    Raises:
        PolicyError: it is something else, or too small or too large.
    """
    most = next((most for part, most in MOST if part in where.rpartition(".")[2]), MOST_OF_OTHERS)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise wrong(f"{file}: {where}", found, f"a whole number from {least} on")
    if found > most:
        raise wrong(f"{file}: {where}", found, f"at most {most}")
    return found


def check_real(found: object, where: str, *, above: float = -math.inf, below: float = 1e9, file: str = CONFIG) -> float:
    """Return a number of a checkpoint's file.

    Args:
        found: what is there.
        where: its place in the file, for messages.
        above: it must be larger.
        below: it must be smaller.
        file: name of the file.

    Raises:
        PolicyError: it is something else, or outside of these ends.
    """
    if isinstance(found, bool) or not isinstance(found, int | float) or not above < found < below:
        raise wrong(f"{file}: {where}", found, f"a number above {above:g} and below {below:g}")
    return float(found)


@contextmanager
def described_by(file: str) -> Iterator[None]:
    """Turn errors of other packages in a block, which is given what a checkpoint's file states, into a sentence."""
    try:
        yield
    except (PolicyError, MemoryError):
        raise
    except Exception as error:  # each package has its own
        why = " ".join(str(error).split()) or type(error).__name__
        raise PolicyError(f"{file} describes no model that can be built ({why:.200})", "download it again") from error


# ---------------------------------------------------------------------------------------------------------------- files


def as_json(content: object) -> bytes:
    """Return the contents of a JSON file as they are written here."""
    return (json.dumps(content, indent=2) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """Files of a checkpoint's folder, except the weights. A family says how they are read, and what they are for random
    weights and for the published size."""

    companions: Mapping[str, bytes]
    """Contents by path within the folder; `write` writes them unchanged."""

    @classmethod
    def of(cls, config: Any, simulator: SimulatorSpec | None, chunk_size: int) -> Self:
        """Return the files that a model is built from: those of its checkpoint, or new ones.

        Args:
            config: the model's options.
            simulator: the simulator's spec; None: not known.
            chunk_size: actions per chunk.

        Raises:
            PolicyError: a file is missing or damaged, or a model without a checkpoint has no simulator with continuous
                actions.
        """
        if config.checkpoint == PUBLISHED:
            return cls.published(config)
        if config.checkpoint is not None:
            files = cls.read(config)
        else:
            files = cls.scratch(config, simulator_to_start_in(simulator), chunk_size)
        named: str | None = getattr(config, "statistics", None)
        return files if named is None else files.with_statistics(named)

    @classmethod
    def read(cls, config: Any) -> Self:
        """Read the folder `config.checkpoint`, with its own statistics.

        Raises:
            PolicyError: it is not the folder of such a checkpoint.
        """
        raise NotImplementedError

    @classmethod
    def scratch(cls, config: Any, simulator: SimulatorSpec, chunk_size: int) -> Self:
        """Return the files of a model with random weights. Its vocabulary is that of the simulator's task descriptions,
        its horizon is one chunk, and its ranges are the simulator's."""
        raise NotImplementedError

    @classmethod
    def published(cls, config: Any) -> Self:
        """Return the files of a model of the published size."""
        raise NotImplementedError

    def with_statistics(self, path: str) -> Self:
        """Return a copy with the statistics of another file.

        Raises:
            PolicyError: the file does not exist, is of another kind, or is damaged.
        """
        raise NotImplementedError

    def contents(self) -> Mapping[str, bytes]:
        """Return all that `write` writes, by path within the folder."""
        return self.companions

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        for path, content in self.contents().items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


@dataclass(frozen=True, kw_only=True)
class ConfiguredFolder(CheckpointFolder):
    """A folder whose config.json is kept as what it says."""

    config: Mapping[str, Any]
    """config.json."""

    def contents(self) -> Mapping[str, bytes]:
        """See `CheckpointFolder.contents`."""
        return {CONFIG: as_json(self.config), **self.companions}


def simulator_to_start_in(simulator: SimulatorSpec | None) -> SimulatorSpec:
    """Return the simulator that a model without a checkpoint is built for.

    Raises:
        PolicyError: there is no simulator, or its actions are discrete.
    """
    if simulator is None:
        raise PolicyError("give a checkpoint: without a simulator there is nothing to build a new model for")
    if is_discrete(simulator):
        raise PolicyError("this simulator takes one choice among n, the model needs continuous actions")
    return simulator


# ----------------------------------------------------------------------------------------------------------- statistics


def first_not_finite(numbers: Sequence[Any]) -> int | None:
    """Return the index of the first entry of a JSON list that is not a finite number; None if all are."""
    for place, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return place
    return None


def finite_numbers(found: Any, where: str, error: Callable[[str, object, str], PolicyError] = wrong) -> list[float]:
    """Return a JSON list of finite numbers.

    Args:
        found: what is there.
        where: its place, for messages.
        error: makes the error of a place, what is there and what was expected.

    Raises:
        PolicyError: it is something else.
    """
    if not isinstance(found, list):
        raise error(where, found, "a list of numbers")
    if (place := first_not_finite(found)) is not None:
        raise error(f"{where}[{place}]", found[place], "a finite number")
    return found


def impossible(names: tuple[str, ...], first: Sequence[float], second: Sequence[float]) -> str | None:
    """Return what is impossible about two statistics: a lower end above the upper one, or a deviation below 0; None if
    nothing is.

    Args:
        names: of both; the second one `std` or an upper end.
        first: means or lower ends `[D]`.
        second: standard deviations or upper ends `[D]`.
    """
    is_deviation = names[1] == "std"
    for place, (low, high) in enumerate(zip(first, second, strict=False)):
        if is_deviation and high < 0:
            return f"std[{place}] is {high}, below 0"
        if not is_deviation and low > high:
            return f"{names[0]}[{place}] is {low}, above {names[1]}, which is {high}"
    return None


def parse_statistics(content: bytes, name: str) -> dict[str, dict[str, Any]]:
    """Return statistics by feature from LeRobot's safetensors, whose tensors are named `feature.number`.

    Raises:
        PolicyError: the file is damaged.
    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise PolicyError(f"{name} is damaged ({error})", "download it again") from error
    features: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        feature, _, number = key.rpartition(".")
        features.setdefault(feature, {})[number] = tensor.tolist()
    return features


def choose_key(statistics: Mapping[str, Any], key: str | None) -> str:
    """Return the data set to use: `key`, its version without idle steps (`<key>_no_noops`), or the only one.

    Raises:
        PolicyError: no data set has this name, or there are several and `key` is None.
    """
    if not statistics:
        raise PolicyError("the checkpoint has no statistics of any data set", "take another checkpoint")
    known = ", ".join(sorted(statistics))
    if key is None:
        if len(statistics) != 1:
            raise PolicyError("the checkpoint has statistics of several data sets", f"set unnorm_key to one of {known}")
        return next(iter(statistics))
    for name in (key, f"{key}_no_noops"):
        if name in statistics:
            return name
    hint = did_you_mean(key, statistics, lead=" - ")
    raise PolicyError(f"the checkpoint has no statistics of unnorm_key = {key!r}{hint} (known: {known})")
