"""What the folder of a pi0 or pi0.5 checkpoint says beside its weights. Nothing here imports torch, so that a config
can be checked against its checkpoint before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.models.companions import parse_json
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import parse_statistics
from embodyrl.models.pi.layout import Layout

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
OPENPI, LEROBOT, NORMALIZER = "norm_stats.json", "stats.json", "normalizer_processor.safetensors"
"""Files of statistics: openpi's (also under assets/<data set>/), a LeRobotDataset's, and that of a lerobot policy."""
KEPT = (".json", ".model", "_processor.safetensors")

OPENPI_NAMES = {"state": "state", "actions": "actions"}
LEROBOT_NAMES = {"state": "observation.state", "actions": "action"}
"""What states and actions are called in either's statistics."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Those of one data set, as they are written; `ranges` makes sure that they are whole."""

    file: str
    """Where they are from, for messages."""
    content: Mapping[str, Any]
    """By what the file calls states and actions, each with some of mean, std, q01, q99."""
    names: Mapping[str, str]
    """What it calls them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """Everything but the weights."""

    config: Mapping[str, Any]
    """config.json."""
    companions: Mapping[str, bytes]
    """Contents of the other files, by path within the folder; `save` writes them again as they are."""
    layout: Layout
    """How the weights are called."""

    @classmethod
    def read(cls, folder: Path, *, tokenizer: str | None = None, statistics: str | None = None) -> CheckpointFiles:
        """Read a checkpoint's folder.

        Args:
            folder: of the checkpoint.
            tokenizer: file to use instead of the one in the folder.
            statistics: the same for statistics.

        Raises:
            PolicyError: it is not the folder of such a checkpoint, or the other files are not there.
        """
        if not (folder / CONFIG).is_file():
            raise PolicyError(f"{folder} holds no {CONFIG}: give the folder of a pi0 or pi0.5 checkpoint")
        places = sorted([*folder.glob("*"), *folder.glob("assets/**/*")])
        paths = [path for path in places if path.name.endswith(KEPT) and path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        config = parse_json(found.pop(CONFIG), str(folder / CONFIG))
        if tokenizer is not None:
            found = _replace(found, Path(tokenizer), TOKENIZERS, "model.tokenizer")
        files = cls(config=config, companions=found, layout=Layout.read(folder))
        return files if statistics is None else files.with_statistics(statistics)

    def with_statistics(self, path: str) -> CheckpointFiles:
        """The same with the statistics of another file.

        Raises:
            PolicyError: it is not there, or called otherwise than such files are.
        """
        found = _replace(self.companions, Path(path), (OPENPI, LEROBOT, NORMALIZER), "model.statistics")
        return dataclasses.replace(self, companions=found)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics by data set.

        Raises:
            PolicyError: there are none, or a file of them is damaged.
        """
        found = dict(self._statistics())
        if not found:
            raise PolicyError(
                f"the checkpoint has no statistics ({OPENPI}, {LEROBOT} or a {NORMALIZER}) to normalise states and "
                "actions with: set model.statistics to such a file"
            )
        return found

    def _statistics(self) -> Iterator[tuple[str, Statistics]]:
        for path, content in self.companions.items():
            if path.endswith(OPENPI):
                folder = path.removesuffix(OPENPI).strip("/").removeprefix("assets").strip("/")
                yield folder or "openpi", Statistics(file=path, content=_openpi(content, path), names=OPENPI_NAMES)
            elif path.rpartition("/")[2] == LEROBOT:
                yield "lerobot", Statistics(file=path, content=parse_json(content, path), names=LEROBOT_NAMES)
            elif path.endswith(NORMALIZER) and "unnormalizer" not in path:
                yield "lerobot", Statistics(file=path, content=parse_statistics(content, path), names=LEROBOT_NAMES)

    @property
    def tokenizer(self) -> tuple[str, bytes]:
        """Name and contents of the tokenizer's file.

        Raises:
            PolicyError: there is none.
        """
        for name in TOKENIZERS:
            if name in self.companions:
                return name, self.companions[name]
        raise PolicyError(
            f"the checkpoint has no {' or '.join(TOKENIZERS)}: put PaliGemma's tokenizer into its folder, or set "
            "model.tokenizer to that file"
        )

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        for path, content in self.companions.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def _replace(found: Mapping[str, bytes], path: Path, names: tuple[str, ...], setting: str) -> dict[str, bytes]:
    """The companions with another file instead of those with these names."""
    if not path.is_file() or not path.name.endswith(names):
        raise PolicyError(f"{setting} = {str(path)!r} is no file called {' or '.join(names)}")
    kept = {name: content for name, content in found.items() if not name.endswith(names)}
    return kept | {path.name: path.read_bytes()}


def _openpi(content: bytes, path: str) -> Mapping[str, Any]:
    """Openpi's statistics, which some public files hold without the entry `norm_stats` around them."""
    parsed = parse_json(content, path)
    found = parsed.get("norm_stats", parsed)
    if not isinstance(found, Mapping):
        raise PolicyError(
            f"{path}: norm_stats is {found!r}, a JSON object with state and actions was expected: download it again"
        )
    return found
