"""The folder of evaluations in progress: what was asked for, and each episode as soon as it ended, so that they can go
on after an interruption.

`evaluation.json` is written once, before the first episode; `episodes.jsonl` gets a line per episode.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from embodyrl.config.build import flat
from embodyrl.evaluation.protocols import ProtocolError
from embodyrl.files import digest, write_whole
from embodyrl.hub import is_hub_name
from embodyrl.runner.checkpoint import MANIFEST, POLICY, Manifest
from embodyrl.runner.rundir import RunDir
from embodyrl.runs.metrics import read_json_lines
from embodyrl.servers import is_url
from embodyrl.version import __version__

if TYPE_CHECKING:  # imports torch
    from embodyrl.runner.evaluation import EpisodeRecord

ASKED_FILE = "evaluation.json"
EPISODES_FILE = "episodes.jsonl"
SHOWN = 3
"""Most differences that a message names."""


class JournalError(ProtocolError):
    """Raised when evaluations cannot continue in a folder; nothing was started."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What evaluations were asked for, as `embodyrl.compare` takes it."""

    policy: str
    other: str | None
    overrides: list[str]
    protocols: list[str]
    video: str | None
    has_config: bool
    """A config was given in Python as a value, which the folder does not hold."""
    directory: str
    """Working directory, from which relative paths lead."""
    config: str | None = None
    """Config for public weights or the policy of a server: a file, or the name of an experiment."""
    perturb: dict[str, list[int]] | None = None
    """Levels of each kind of perturbation whose effect is evaluated, see `robustness.grid_of`; None: it is not."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        plain = asdict(self)
        return {name: value for name, value in plain.items() if name not in ("config", "perturb") or value is not None}

    def missing(self) -> list[str]:
        """Return the policies, protocols and config that are relative paths and lead nowhere from here."""
        files = [name for name in (*self.protocols, self.config or "") if name.endswith((".yaml", ".yml"))]
        places = [name for name in (self.policy, self.other) if name is not None]
        named = [*(name for name in places if not is_hub_name(name) and not is_url(name)), *files]
        return [name for name in named if not Path(name).exists() and not Path(name).is_absolute()]


def is_journal(folder: Path) -> bool:
    """Return whether a folder holds evaluations that can continue."""
    return (folder / ASKED_FILE).is_file()


def read_command(folder: Path) -> Command:
    """Return what the evaluations in a folder were asked for.

    Raises:
        JournalError: evaluation.json is missing or damaged.
    """
    try:
        return Command(**_read(folder)["command"])
    except (KeyError, TypeError) as error:
        raise _damaged(folder, error) from error


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ASKED_FILE).read_text())
        if not isinstance(found, dict):
            raise ValueError("no mapping")
    except FileNotFoundError as error:
        raise JournalError(
            f"{folder} holds no evaluation to continue (no {ASKED_FILE}): give the folder of `embodyrl eval --out`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, error) from error
    return found


def _damaged(folder: Path, error: Exception) -> JournalError:
    return JournalError(
        f"{folder / ASKED_FILE} is damaged ({type(error).__name__}: {error}): evaluate again, into another folder"
    )


class Journal:
    """Keeps the episodes of evaluations; one process at a time has the folder.

    Args:
        folder: is made if it is missing.
        command: what was asked for.
        facts: what decides the results: settings, weights, versions.

    Raises:
        JournalError: the folder holds evaluations for which anything in `facts` is different.
        RunDirError: another process plays them.
    """

    def __init__(self, folder: Path, command: Command, facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._directory = RunDir(folder)
        try:
            if is_journal(folder):
                _refuse_others(folder, _read(folder), facts)
            else:
                asked = {"embodyrl": __version__, "command": command.to_plain(), **facts}
                write_whole(folder / ASKED_FILE, json.dumps(asked, indent=1) + "\n")
            self._rows = list(_rows(folder / EPISODES_FILE))
            # A line per write: what a killed process leaves is a part of the last line at most.
            self._file = (folder / EPISODES_FILE).open("a", buffering=1)
        except BaseException:
            self._directory.close()
            raise
        if self._file.tell() and not (folder / EPISODES_FILE).read_bytes().endswith(b"\n"):
            self._file.write("\n")  # ends such a part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._directory.close()

    def kept(self, evaluation: int, part: int) -> tuple[dict[int, EpisodeRecord], float]:
        """Return the episodes of a part of an evaluation that ended earlier, by their numbers in it, and the seconds
        that the part has taken."""
        from embodyrl.runner.evaluation import EpisodeRecord

        own = [row for row in self._rows if (row["evaluation"], row["part"]) == (evaluation, part)]
        records = {row["number"]: EpisodeRecord(**row["record"]) for row in own}
        return records, max((row["seconds"] for row in own), default=0.0)

    def add(self, evaluation: int, part: int, number: int, record: EpisodeRecord, seconds: float) -> None:
        """Write an episode that has ended, and the seconds that the part has taken until then."""
        row = {"evaluation": evaluation, "part": part, "number": number, "seconds": round(seconds, 3)}
        self._file.write(json.dumps(row | {"record": asdict(record)}) + "\n")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of episodes.jsonl; an episode whose line is damaged is played again."""
    from embodyrl.runner.evaluation import EpisodeRecord

    for row in read_json_lines(path):
        try:
            EpisodeRecord(**row["record"])
            yield {name: row[name] for name in ("evaluation", "part", "number", "record")} | {
                "seconds": float(row["seconds"])
            }
        except (ValueError, KeyError, TypeError):
            continue


def _refuse_others(folder: Path, found: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to continue with anything that would give other episodes."""
    before, now = (flat({name: given.get(name) for name in facts}, into_lists=True) for given in (found, facts))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        texts = [f"{name}: {_written(before.get(name))} there, {_written(now.get(name))} now" for name in changed]
        rest = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        raise JournalError(
            f"{folder / ASKED_FILE} is of another evaluation, so its episodes cannot be kept: "
            f"{'; '.join(texts[:SHOWN])}{rest}. Restore what was there, or name another folder"
        )


def _written(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:12] + "..."


def digest_of(place: str) -> str:
    """Return what identifies the weights of a policy: a hash of its files. Of a name on the hub, or of a server, that
    name."""
    folder = Path(place)
    if not folder.is_dir():
        return place
    if (folder / MANIFEST).is_file():  # its hashes were compared with the files when the checkpoint was found
        files = Manifest.read(folder).files
        hashes = {name: facts["sha256"] for name, facts in files.items() if name.startswith(f"{POLICY}/")}
    else:
        files_here = sorted(path for path in folder.rglob("*") if path.is_file())
        hashes = {str(path.relative_to(folder)): digest(path) for path in files_here}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
