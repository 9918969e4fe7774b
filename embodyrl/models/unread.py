"""Files of a checkpoint that nothing here reads, and what they mean. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import INDEX_FILE, SINGLE_FILE, shard_files

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
    "*processor*.safetensors",
)
"""Patterns of what models read or keep beside the weights."""
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
