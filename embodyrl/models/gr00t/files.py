"""What a checkpoint's folder says beside its weights. Nothing here imports torch, so that a config can be checked
against its checkpoint before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.models.companions import parse_json
from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t.architecture import Architecture, check_model
from embodyrl.models.gr00t.options import Gr00tConfig
from embodyrl.models.gr00t.statistics import LEROBOT_TAG, REMEDY, as_metadata
from embodyrl.models.lerobot import parse_statistics

CONFIG = "config.json"
EAGLE = "eagle2_hg_model"
"""Folder of what belongs to the vision-language model."""
EAGLE_CONFIG = f"{EAGLE}/config.json"
METADATA = "experiment_cfg/metadata.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "vocab.json", "merges.txt", "added_tokens.json")
LEROBOT_TYPE = "groot"
"""`type` in the config.json of LeRobot, which says nothing about sizes: there is only the published one."""
PREPROCESSOR, PACKING = "policy_preprocessor.json", "groot_pack_inputs"
"""LeRobot's list of what it does to an observation, and the beginning of the step's name that knows the statistics."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """Everything but the weights."""

    config: Mapping[str, Any]
    """config.json."""
    eagle: Mapping[str, Any] | None
    """The vision-language model's config.json; None: it is the published one."""
    metadata: Mapping[str, Any]
    """Statistics by robot."""
    tokenizer: Mapping[str, bytes]
    """Contents of the tokenizer's files by name."""
    origin: str
    """Where the statistics come from, for messages."""

    @classmethod
    def read(cls, config: Gr00tConfig) -> CheckpointFiles:
        """Read what belongs to `config.checkpoint`.

        Raises:
            PolicyError: a file is missing or damaged, or is not that of such a checkpoint.
        """
        folder = Path(str(config.checkpoint))
        content = _read_json(folder / CONFIG, "give the folder of a GR00T N1.5 checkpoint")
        if content.get("type") == LEROBOT_TYPE:
            content = Architecture().to_config()
        check_model(content)
        eagle = folder / EAGLE_CONFIG
        metadata, origin = read_statistics(folder if config.statistics is None else Path(config.statistics))
        return cls(
            config=content,
            eagle=_read_json(eagle, "") if eagle.is_file() else None,
            metadata=metadata,
            tokenizer=_read_tokenizer(folder, config.tokenizer),
            origin=origin,
        )

    @property
    def architecture(self) -> Architecture:
        """The network's shape."""
        return Architecture.from_config(self.config, self.eagle)

    def with_cameras(self, tag: str, cameras: Sequence[str]) -> CheckpointFiles:
        """The same for a robot whose statistics do not say which pictures go with them."""
        robot = {**self.metadata[tag], "modalities": {"video": {camera: {} for camera in cameras}}}
        return dataclasses.replace(self, metadata={**self.metadata, tag: robot})

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        contents = {CONFIG: self.config, METADATA: self.metadata}
        if self.eagle is not None:
            contents[EAGLE_CONFIG] = self.eagle
        written = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
        written |= {f"{EAGLE}/{name}": content for name, content in self.tokenizer.items()}
        for name, content in written.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def read_statistics(path: Path) -> tuple[dict[str, Any], str]:
    """Statistics by robot, and the file that they are in. Only what is read of it later is looked at (`choose_robot`).

    Args:
        path: Isaac's metadata.json, a LeRobotDataset's stats.json, or the folder of a checkpoint.

    Raises:
        PolicyError: there are none, or their file is damaged.
    """
    if path.is_dir() and (path / PREPROCESSOR).is_file() and not (path / METADATA).is_file():
        return _lerobot_statistics(path)
    file = path / METADATA if path.is_dir() else path
    return as_metadata(_read_json(file, REMEDY)), str(file)


def _lerobot_statistics(folder: Path) -> tuple[dict[str, Any], str]:
    """Those that a policy of LeRobot keeps beside its weights, of the robot that it names."""
    steps = _read_json(folder / PREPROCESSOR, "").get("steps", [])
    packing = [step for step in steps if str(step.get("registry_name", "")).startswith(PACKING)]
    name = packing[0].get("state_file") if packing else None
    if name is None or not (folder / name).is_file():
        found = f"names {name}, which is not there" if name else f"has no step {PACKING}.. with statistics"
        raise PolicyError(f"{folder / PREPROCESSOR} {found}: {REMEDY}")
    features = parse_statistics((folder / name).read_bytes(), name)
    tag = packing[0].get("config", {}).get("embodiment_tag", LEROBOT_TAG)
    return as_metadata(features, tag), str(folder / name)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise PolicyError(f"{path.parent} holds no {path.name}: {remedy}")
    return parse_json(path.read_bytes(), str(path))


def _read_tokenizer(folder: Path, named: str | None) -> dict[str, bytes]:
    places = [folder / EAGLE, folder] if named is None else [Path(named)]
    for place in places:
        found = {name: (place / name).read_bytes() for name in TOKENIZER_FILES if (place / name).is_file()}
        if TOKENIZER in found or {"vocab.json", "merges.txt"} <= found.keys():
            return found
    where = " or ".join(map(str, places))
    raise PolicyError(
        f"no tokenizer in {where} (tokenizer.json, or vocab.json and merges.txt): set model.tokenizer to the folder "
        "eagle2_hg_model of Isaac-GR00T"
    )
