"""What a checkpoint's folder says beside its weights. Nothing here imports torch, so that a config can be checked
against its checkpoint before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.models.companions import parse_json
from embodyrl.models.errors import PolicyError

CONFIG, STATISTICS = "config.json", "dataset_statistics.json"
PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer.json"
COMPANIONS = (
    PREPROCESSOR,
    TOKENIZER,
    "processor_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    STATISTICS,
)
"""Files that are kept as they are and written again by `save`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """Everything but the weights."""

    config: Mapping[str, Any]
    """config.json."""
    companions: Mapping[str, bytes]
    """Contents of the other files by name."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointFiles:
        """Read a checkpoint's folder.

        Raises:
            PolicyError: it is not the folder of such a checkpoint.
        """
        for name in (CONFIG, PREPROCESSOR, TOKENIZER):
            if not (folder / name).is_file():
                raise PolicyError(f"{folder} holds no {name}: give the folder of an OpenVLA or OpenVLA-OFT checkpoint")
        companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
        files = cls(config=_read_json(folder / CONFIG), companions=companions)
        for name in (PREPROCESSOR, STATISTICS):
            files.parse(name)
        return files

    def parse(self, name: str) -> dict[str, Any]:
        """Contents of a JSON companion; empty if there is no such file."""
        return parse_json(self.companions.get(name, b"{}"), name)

    @property
    def statistics(self) -> dict[str, Any]:
        """Ranges of the training data by data set; those of a fine-tuned model stand in a file of their own."""
        return {**self.config.get("norm_stats", {}), **self.parse(STATISTICS)}

    @property
    def tokenizer(self) -> str:
        """Text of tokenizer.json."""
        return self.companions[TOKENIZER].decode()

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        for name, content in self.companions.items():
            (folder / name).write_bytes(content)


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json(path.read_bytes(), str(path))


def head_file(folder: Path, name: str) -> Path:
    """The file of a head.

    Raises:
        PolicyError: there is none, or there are several.
    """
    found = sorted(folder.glob(f"{name}--*_checkpoint.pt"))
    if not found:
        raise PolicyError(f"{folder} holds no {name}--*_checkpoint.pt, which the model's options ask for")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise PolicyError(f"{folder} holds several files of the {name} ({names}): leave the one to use")
    return found[0]
