"""Parts of checkpoints beside the weights, shared by several models: files and statistics. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        raise PolicyError(
            f"{file}: {where} is {found!r:.60}, a whole number from {least} on was expected", "download it again"
        )
    if found > most:
        raise PolicyError(f"{file}: {where} is {found}, at most {most} was expected", "download it again")
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
        raise PolicyError(
            f"{file}: {where} is {found!r:.60}, a number above {above:g} and below {below:g} was expected",
            "download it again",
        )
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


def read_tokenizer(content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json.

    Args:
        content: contents of the file.
        name: name of the file, for messages.

    Raises:
        PolicyError: the file is damaged.
    """
    from tokenizers import Tokenizer  # configs are checked where the package is not installed

    try:
        tokenizer = Tokenizer.from_str(content.decode())
        tokenizer.encode("pick up")
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises what is no Exception where its own code fails
        raise PolicyError(f"{name} cannot be read ({error!s:.200})", "download it again") from error
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True)
class FilesBesideWeights:
    """Files of a checkpoint's folder, except the weights."""

    config: Mapping[str, Any]
    """config.json."""
    companions: Mapping[str, bytes]
    """Contents of the other files by path within the folder; `write` writes them unchanged."""

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        for path, content in self.companions.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


# ----------------------------------------------------------------------------------------- models without checkpoint


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

    Args:
        content: contents of the file.
        name: name of the file, for messages.

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
