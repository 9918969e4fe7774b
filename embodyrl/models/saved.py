"""What a checkpoint's folder holds: which files hold the weights, and what a saved policy says of itself in
`policy.json`, the options it was built with. Nothing here imports torch, so that a config can be checked against its
checkpoint before anything starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from embodyrl.config.fields import class_at
from embodyrl.config.renames import convert_options
from embodyrl.config.schema import ModelConfig
from embodyrl.models.errors import PolicyError
from embodyrl.registry import SupportedModel


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Contents of a JSON file.

    Args:
        content: of the file.
        name: of the file, for messages.

    Raises:
        PolicyError: it is no JSON object.
    """
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise PolicyError(f"{name} is damaged ({error}): download it again") from error
    if not isinstance(parsed, dict):
        raise PolicyError(f"{name} is damaged (no JSON object): download it again")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file on disk; see `parse_json`."""
    return parse_json(path.read_bytes(), str(path))


# -------------------------------------------------------------------------------------------------------------- weights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def shard_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    Raises:
        PolicyError: there are none, or the index names files that are not there.
    """
    if not (folder / INDEX_FILE).is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise PolicyError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}: give the folder of a checkpoint")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise PolicyError(f"{folder / INDEX_FILE} holds no weight_map from weights to files: download it again")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise PolicyError(f"{folder} lacks {', '.join(missing)}, which its {INDEX_FILE} names: download them again")
    return [folder / name for name in names]


def open_shard(path: Path, framework: str) -> safe_open:
    """A file of weights; its header is read, and nothing else yet.

    Args:
        path: of the file.
        framework: `pt` for torch tensors, `np` for numpy arrays.

    Raises:
        PolicyError: it is no such file, or not all of it.
    """
    try:
        return safe_open(path, framework)
    except (SafetensorError, OSError) as error:
        if _is_pickle(path):
            raise PolicyError(f"{path} is a pickle, which could run code and is not read: give safetensors") from error
        raise PolicyError(f"{path} is damaged or cut short ({error}): download it again") from error


def _is_pickle(path: Path) -> bool:
    """Return whether a file looks like what `torch.save` or pickle writes."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return start == b"PK" or start in (bytes([0x80, protocol]) for protocol in range(2, 6))


# ---------------------------------------------------------------------------------------------------------- policy.json

DESCRIPTION_FILE = "policy.json"
BASE_FILE = "base.json"
"""The same of a policy that is adapters, and what they are for."""
ADAPTER_FOLDER = "adapter"
"""In the folder of a policy that is adapters for weights elsewhere."""
HEADS_FILE = "heads.safetensors"
"""Beside that folder: what learned in full."""
BROUGHT = ("checkpoint", "adapter", "statistics", "tokenizer")
"""Options that say where something was taken from, which a saved policy then has in its own folder."""
FREE = ("dtype", "noise_level", "noise_level_end")
"""Options that differ from run to run without anybody being surprised."""

Options = TypeVar("Options", bound=ModelConfig)


def write_description(folder: Path, config: ModelConfig, spec: Any) -> None:
    """Say with which options a policy is saved, and its `PolicySpec`."""
    description = {"options": dataclasses.asdict(config), "spec": dataclasses.asdict(spec)}
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")


def read_description(folder: Path, name: str) -> tuple[dict[str, Any], int | None]:
    """Options that a model called `name` was saved with, but for those that it brings itself, and its actions per
    decision; nothing where the folder comes from elsewhere.

    Raises:
        PolicyError: the file is damaged.
    """
    path = folder / DESCRIPTION_FILE
    found = read_json(path) if path.is_file() else {}
    options = _options(found, path)
    if options.get("name") != name:
        return {}, None
    kept = {key: value for key, value in options.items() if key not in ("name", "scratch", *BROUGHT)}
    spec = found.get("spec")
    if not isinstance(spec, dict) or type(spec.get("chunk_size")) is not int:
        raise PolicyError(f"{path} is damaged (no spec.chunk_size): take another checkpoint")
    return kept, spec["chunk_size"]


def with_kept(config: Options, folder: Path) -> Options:
    """A config with those of its options that were saved with the policy in a folder, where it leaves open (null) what
    belongs to a policy from its first day on: what its model's fact `kept` names, with what stands for a description
    from before there was the option. Otherwise, what a policy learned with would be found anew for every simulator.

    Raises:
        PolicyError: the description there is damaged.
    """
    path = next((folder / name for name in (DESCRIPTION_FILE, BASE_FILE) if (folder / name).is_file()), None)
    options = {} if path is None else _options(read_json(path), path)
    if options.get("name") != config.name:
        return config
    kept = SupportedModel.entry(config.name).kept
    found: dict[str, Any] = {key: options.get(key, old) for key, old in kept.items() if getattr(config, key) is None}
    return dataclasses.replace(config, **found)


def _options(description: dict[str, Any], path: Path) -> dict[str, Any]:
    """The options in a description, by the names that they have now; none in one without any."""
    options = description.get("options", {})
    if not isinstance(options, dict):
        raise PolicyError(f"{path} is damaged (options is {options!r:.60}, no object): take another checkpoint")
    return convert_options(options, "model", class_at(ModelConfig, options))


def stands_alone(folder: Path) -> bool:
    """Return whether a saved policy needs no weights but its own."""
    return not (folder / ADAPTER_FOLDER).is_dir()


def from_own_folder(config: ModelConfig, folder: Path) -> ModelConfig:
    """The options that build a policy from the folder that it was saved in, whatever it was made from."""
    own: dict[str, Any] = dict.fromkeys(name for name in BROUGHT if hasattr(config, name))
    return dataclasses.replace(config, **own | {"checkpoint": str(folder)})


def own_folder_settings(config: ModelConfig, folder: str) -> list[str]:
    """The same for the command line."""
    others = [name for name in BROUGHT[1:] if getattr(config, name, None) is not None]
    return [f"model.checkpoint={folder}", *(f"model.{name}=null" for name in others)]


def other_options(config: ModelConfig) -> list[str]:
    """In which options a config differs from those that its checkpoint was saved with."""
    if config.checkpoint is None:
        return []
    folder = Path(config.checkpoint)
    saved, _ = read_description(folder, config.name)
    here = json.loads(json.dumps(dataclasses.asdict(with_kept(config, folder))))
    return [
        f"model.{key} = {here[key]!r} (it was {value!r})"
        for key, value in saved.items()
        if key not in FREE and key in here and here[key] != value
    ]
