"""Files of a checkpoint's folder: the weights, and `policy.json` with the options that a saved policy was built with.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from embodyrl.config.build import build_section
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Settings
from embodyrl.config.fields import class_at
from embodyrl.config.issues import Location
from embodyrl.config.renames import convert_options
from embodyrl.config.schema import BROUGHT, ModelConfig, Precision
from embodyrl.files import is_plain_name
from embodyrl.hub import name_of
from embodyrl.models.critics.config import CandidatesConfig
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.config import WeightType
from embodyrl.registry import SupportedModel

DIGITS = 19
"""Most characters of a whole number in a JSON file; more do not fit into 64 bits."""


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Raises:
        PolicyError: the file holds no JSON object.
    """
    try:
        parsed = json.loads(content, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{name} is damaged ({error})", "download it again") from error
    if not isinstance(parsed, dict):
        raise PolicyError(f"{name} is damaged (no JSON object)", "download it again")
    return parsed


def _integer(text: str) -> int | float:
    """Convert a whole number; one beyond 64 bits is no number of anything, as the 1e30 of `model_max_length` in public
    tokenizer_config.json, which stands for no limit."""
    return int(text) if len(text) <= DIGITS else float(text)


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file on disk; see `parse_json`."""
    return parse_json(path.read_bytes(), str(path))


# -------------------------------------------------------------------------------------------------------------- weights

PUBLISHED = "<published>"
"""Value of `checkpoint` that stands for the published size without weights, for planning and benchmarks."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HALF_TYPES = ("BF16", "F16")
"""Names of 16-bit types in safetensors."""
LARGE = 100 * 10**6
"""Weights from which on a model counts as large: memory and threads matter more than digits and starting time."""


def weight_files(folder: Path) -> list[Path]:
    """Return all files that belong to a checkpoint's weights; raises what `shard_files` raises."""
    index = folder / INDEX_FILE
    return [*shard_files(folder), *([index] if index.is_file() else [])]


def shard_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    Raises:
        PolicyError: there are none, or the index names files that are missing.
    """
    if not (folder / INDEX_FILE).is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise PolicyError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}", "give the folder of a checkpoint")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise PolicyError(f"{folder / INDEX_FILE} holds no weight_map from weights to files", "download it again")
    names = sorted(set(weight_map.values()))
    if not names or not all(map(is_plain_name, names)):
        odd = next((name for name in names if not is_plain_name(name)), "nothing")
        raise PolicyError(
            f"{folder / INDEX_FILE} names {odd!r}, names of files in its folder were expected", "download it again"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise PolicyError(f"{folder} lacks {', '.join(missing)}, which its {INDEX_FILE} names", "download them again")
    return [folder / name for name in names]


def open_shard(path: Path, framework: str) -> safe_open:
    """Open a safetensors file; only its header is read.

    Args:
        path: path of the file.
        framework: `pt` for torch tensors, `np` for numpy arrays.

    Raises:
        PolicyError: the file is damaged, incomplete or a pickle.
    """
    try:
        return safe_open(path, framework)
    except (SafetensorError, OSError) as error:
        if _is_pickle(path):
            raise PolicyError(
                f"{path} is a pickle, which could run code and is not read", "give safetensors"
            ) from error
        raise PolicyError(f"{path} is damaged or cut short ({error})", "download it again") from error


def _is_pickle(path: Path) -> bool:
    """Return whether a file begins like those of `torch.save` or pickle."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return start == b"PK" or start in (bytes([0x80, protocol]) for protocol in range(2, 6))


def weight_type(config: Any, *, precision: Precision = Precision.auto, gpu: bool = False) -> WeightType:
    """Return the type that a model's weights are held in, for its option `dtype`.

    Args:
        config: the model's options.
        precision: `engine.precision`; float32 is not computed with weights in fewer bits.
        gpu: whether the model runs on a GPU that computes with bfloat16.

    Raises:
        PolicyError: the checkpoint's files are missing or damaged.
    """
    chosen: WeightType = config.dtype
    if chosen is not WeightType.auto:
        return chosen
    if config.checkpoint is None or precision is Precision.float32:
        return WeightType.float32
    folder = Path(config.checkpoint)
    if gpu or not folder.is_dir():  # one that is elsewhere is planned for, in the published size
        return WeightType.bfloat16
    # Few weights save no memory worth their digits.
    large = sum(stored_types(folder).values()) >= LARGE
    return stored_type(folder) if large else WeightType.float32


def stored_type(folder: Path) -> WeightType:
    """Return the type of most of a checkpoint's weights; float16 counts as bfloat16. See `stored_types`."""
    counts = stored_types(folder)
    halves = sum(count for kind, count in counts.items() if kind in HALF_TYPES)
    return WeightType.bfloat16 if 2 * halves > sum(counts.values()) else WeightType.float32


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights by name; raises what `weight_layout` raises."""
    return weight_layout(folder).all_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How a checkpoint's weights are spread over files."""

    shapes: dict[str, dict[str, tuple[int, ...]]]
    """Shapes of the weights by file and name."""
    metadata: dict[str, dict[str, str] | None]
    """Metadata by file."""
    index: bytes | None
    """Contents of the index; None: there is one file."""

    @property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        return {name: shape for shapes in self.shapes.values() for name, shape in shapes.items()}


def weight_layout(folder: Path) -> WeightLayout:
    """Return how a checkpoint's weights are spread over files. Only headers are read; raises what `shard_files` and
    `open_shard` raise."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    metadata: dict[str, dict[str, str] | None] = {}
    for path in shard_files(folder):
        with open_shard(path, "np") as shard:
            names = list(shard.keys())  # no mapping
            shapes[path.name] = {name: tuple(shard.get_slice(name).get_shape()) for name in names}
            metadata[path.name] = shard.metadata()
    index = folder / INDEX_FILE
    return WeightLayout(shapes=shapes, metadata=metadata, index=index.read_bytes() if index.is_file() else None)


def stored_types(folder: Path) -> Counter[str]:
    """Return the number of a checkpoint's weights by type, as safetensors names it. Only headers are read.

    Raises:
        PolicyError: files are missing or damaged.
    """
    counts: Counter[str] = Counter()
    for path in shard_files(folder):
        with open_shard(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_slice(name)
                counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return counts


# ---------------------------------------------------------------------------------------------------------- policy.json

DESCRIPTION_FILE = "policy.json"
BASE_FILE = "base.json"
"""The description of a policy that consists of adapters, with the options of its base model."""
ADAPTER_FOLDER = "adapter"
"""Folder of the adapters, in the folder of a policy whose base weights are elsewhere."""
STEERING_FILE = "steering.safetensors"
"""File beside a flow policy's weights: the network that chooses its noise."""
HEADS_FILE = "heads.safetensors"
"""File beside that folder: weights that were trained in full."""
FREE = ("dtype", "noise_level", "noise_level_end")
"""Options that may differ between runs without a note."""

Options = TypeVar("Options", bound=ModelConfig)


def write_description(folder: Path, config: ModelConfig, spec: Any, **parts: Any) -> None:
    """Write the options that a policy is saved with, its `PolicySpec`, and what describes further parts of it.

    Options that name files elsewhere are null, because the folder has copies and may move to another machine; the
    commit of a checkpoint from the hub stays as its origin.
    """
    options = dataclasses.asdict(config)
    origins = {name: name_of(options[name]) for name in BROUGHT if options.get(name) is not None}
    options |= {name: None if origin is None else str(origin) for name, origin in origins.items()}
    description = {"options": options, "spec": dataclasses.asdict(spec), **parts}
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")


def read_description(folder: Path, name: str) -> tuple[dict[str, Any], int | None]:
    """Return the options that a model called `name` was saved with, and its chunk size.

    Options that name files, and the shape of new models, are left out. If the folder was not written by `save`, the
    result is `({}, None)`.

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
        raise PolicyError(f"{path} is damaged (no spec.chunk_size)", "take another checkpoint")
    for key in ("action_dim", "proprio_dim"):
        if type(spec.get(key, 0)) is not int:
            raise PolicyError(
                f"{path} is damaged (spec.{key} is {spec[key]!r:.60}, no whole number)", "take another checkpoint"
            )
    return kept, spec["chunk_size"]


def saved_model(folder: Path) -> str | None:
    """Return the name of the model that was saved in a folder; None if it was not written by `save`.

    Raises:
        PolicyError: the file is damaged.
    """
    path = folder / DESCRIPTION_FILE
    return _options(read_json(path), path).get("name") if path.is_file() else None


def read_steering(folder: Path) -> dict[str, Any] | None:
    """Return the options of the network that steers a saved flow policy (`SteeringConfig`), by name; None if nothing
    steers it.

    Raises:
        PolicyError: the file is damaged.
    """
    path = folder / DESCRIPTION_FILE
    found = (read_json(path) if path.is_file() else {}).get("steering")
    if found is not None and not isinstance(found, dict):
        raise PolicyError(f"{path} is damaged (steering is {found!r:.60}, no object)", "take another checkpoint")
    return found


def read_candidates(folder: Path) -> CandidatesConfig | None:
    """Return how a saved policy chooses among several chunks; None if it does not.

    Raises:
        PolicyError: the file is damaged.
    """
    path = folder / DESCRIPTION_FILE
    found = (read_json(path) if path.is_file() else {}).get("candidates")
    if found is None:
        return None
    settings = Settings(found if isinstance(found, dict) else {"candidates": found})
    if faults := check_settings(settings, CandidatesConfig, Location(f"{path} (candidates)"), ()):
        raise PolicyError(f"{path} is damaged ({'; '.join(map(str, faults))})", "take another checkpoint")
    described: CandidatesConfig = build_section(CandidatesConfig, settings.data)
    return described


def with_kept(config: Options, folder: Path) -> Options:
    """Return a config whose null options are filled from the policy that was saved in a folder.

    Only options of the model's registry entry `kept` are filled; its values stand for policies that were saved before
    the option existed. Otherwise such options would be determined anew for every simulator.

    Raises:
        PolicyError: the description in the folder is damaged.
    """
    path = next((folder / name for name in (DESCRIPTION_FILE, BASE_FILE) if (folder / name).is_file()), None)
    options = {} if path is None else _options(read_json(path), path)
    if options.get("name") != config.name:
        return config
    kept = SupportedModel.entry(config.name).kept
    found: dict[str, Any] = {key: options.get(key, old) for key, old in kept.items() if getattr(config, key) is None}
    return dataclasses.replace(config, **found)


def _options(description: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the options in a description by their current names; empty if it has none."""
    options = description.get("options", {})
    if not isinstance(options, dict):
        raise PolicyError(f"{path} is damaged (options is {options!r:.60}, no object)", "take another checkpoint")
    return convert_options(options, "model", class_at(ModelConfig, options))


def stands_alone(folder: Path) -> bool:
    """Return whether a saved policy is complete without a base model."""
    return not (folder / ADAPTER_FOLDER).is_dir()


def from_own_folder(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return options that build a policy from the folder that it was saved in only."""
    own: dict[str, Any] = dict.fromkeys(name for name in BROUGHT if hasattr(config, name))
    return dataclasses.replace(config, **own | {"checkpoint": str(folder)})


def own_folder_settings(config: ModelConfig, folder: str) -> list[str]:
    """Return the overrides for the command line that have the effect of `from_own_folder`."""
    others = [name for name in BROUGHT[1:] if getattr(config, name, None) is not None]
    return [f"model.checkpoint={folder}", *(f"model.{name}=null" for name in others)]


def other_options(config: ModelConfig) -> list[str]:
    """Return texts about options of a config that differ from those that its checkpoint was saved with."""
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


# ---------------------------------------------------------------------------------------------- files that are not read

ADAPTER = "a LoRA adapter that is not merged into the weights"
JAX = "weights of openpi in JAX's format"
PICKLE = "a pickle, which could run code"
MEANINGS = (
    ("adapter_config.json", ADAPTER),
    ("adapter_model.*", ADAPTER),
    ("*/adapter_config.json", ADAPTER),
    ("*/adapter_model.*", ADAPTER),
    ("params/*", JAX),
    ("train_state/*", JAX),
    ("*_METADATA", JAX),
    ("*--*.pt", "a part of the model in a file of its own"),
    *((f"*.{ending}", PICKLE) for ending in ("bin", "pt", "pth", "ckpt", "pkl", "pickle")),
    *((f"*.{ending}", "weights in another format") for ending in ("h5", "msgpack", "onnx", "gguf", "npz", "engine")),
    ("model*.safetensors", "weights that the index does not name"),
    ("*.py", "code, which is never run"),
)
"""Patterns of paths within a folder, and what such a file means, the first that fits first (`*` also stands for
slashes)."""
REMEDIES = {
    ADAPTER: "merge it into its base model's weights (peft: merge_and_unload; a policy trained here: embodyrl export), "
    "or, if the model has the option adapter, name its base in model.checkpoint and this folder in model.adapter",
    JAX: "convert it with openpi's examples/convert_jax_model_to_pytorch.py",
    PICKLE: "take the safetensors of the same model, or convert it",
}
READ = (
    *("*.json", "*.txt", "*.model", "*.yaml", "*heads.safetensors", "*head.safetensors", "steering.safetensors"),
    *("*processor*.safetensors", "lock.safetensors"),
)
"""Patterns of what models read or keep beside the weights, and what `embodyrl verify` reads."""
ABOUT = ("*.md", "LICENSE*", "NOTICE*", ".*", "*/.*", "*.jinja", "*.png", "*.jpg", "*.gif", "*.mp4", "*.svg", "*.pdf")
"""Patterns of texts and images about a checkpoint."""
PARTS = ("action_head--*_checkpoint.pt", "proprio_projector--*_checkpoint.pt")
"""Pickles that are read, as tensors alone."""
SHOWN = 4
"""Files that a note names at most."""


def unread_files(folder: Path) -> dict[str, list[str]]:
    """Return the files in a checkpoint's folder that nothing reads, sorted, by what they mean.

    Raises:
        PolicyError: the index of its weights is damaged.
    """
    has_weights = (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()
    weights = {path.name for path in shard_files(folder)} if has_weights else set()
    found: dict[str, list[str]] = {}
    for name in sorted(set(_names(folder)) - weights):
        meaning = next((meaning for pattern, meaning in MEANINGS if fnmatchcase(name, pattern)), None)
        known = (*PARTS, *ABOUT) if meaning else (*READ, *ABOUT)
        if not any(fnmatchcase(name, pattern) for pattern in known):
            found.setdefault(meaning or "no file of a policy", []).append(name)
    return found


def _names(folder: Path) -> Iterator[str]:
    for base, _, names in os.walk(folder):
        yield from (Path(base, name).relative_to(folder).as_posix() for name in names)


def unread_note(folder: Path) -> str | None:
    """Return a text on the files that nothing reads, with what they mean; None if there are none."""
    found = unread_files(folder)
    parts = [f"{_shown(names)} ({meaning})" for meaning, names in found.items()]
    return f"the checkpoint holds files that are not read: {'; '.join(parts)}" if parts else None


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def refuse_other_weights(folder: Path) -> None:
    """Raise a `PolicyError` if a folder's weights are only in files that nothing reads."""
    if (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file() or not folder.is_dir():
        return
    found = unread_files(folder)
    for meaning, remedy in REMEDIES.items():
        if meaning in found:
            raise PolicyError(
                f"{folder} holds no safetensors of a model, but {meaning}: {_shown(found[meaning])}", remedy
            )
