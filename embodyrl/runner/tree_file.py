"""Nested state in two files that run no code when they are read: safetensors for the tensors, JSON for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, STRUCTURE = ".safetensors", ".json"


def save_tree(tree: Any, folder: Path, name: str) -> None:
    """Write `<name>.safetensors` and `<name>.json` into an existing folder.

    Args:
        tree: dicts (keys: str or int), lists and tuples of numbers, strings, None and tensors, nested at will.
        folder: where to.
        name: of the files.

    Raises:
        TypeError: it holds something else; names where.
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, name, tensors)
    save_file(_apart(tensors), folder / (name + TENSORS))
    (folder / (name + STRUCTURE)).write_text(json.dumps(structure) + "\n")


def load_tree(folder: Path, name: str) -> Any:
    """Read what `save_tree` wrote; tensors are on the CPU.

    Raises:
        OSError, ValueError, KeyError, safetensors.SafetensorError: the files are missing or damaged.
    """
    structure = json.loads((folder / (name + STRUCTURE)).read_text())
    return _decode(structure, load_file(folder / (name + TENSORS)))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with another tensor for each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)  # type: ignore[func-returns-value]
    return iter(found)


def cloned(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _encode(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The node as JSON, in which an object with one key says what it stands for; its tensors go to `tensors`."""
    if isinstance(node, Tensor):
        if where in tensors:
            raise TypeError(f"two tensors of the state would be called {where}")
        tensors[where] = node.detach().cpu().contiguous()
        return {"tensor": where}
    if isinstance(node, dict):
        return {"dict": [[key, _encode(value, f"{where}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, list | tuple):
        items = [_encode(value, f"{where}/{index}", tensors) for index, value in enumerate(node)]
        return {"tuple": items} if isinstance(node, tuple) else items
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{where} is a {type(node).__name__}, which a checkpoint cannot hold")


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        return {key: _decode(value, tensors) for key, value in content}
    raise ValueError(f"{kind!r} stands for nothing")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers without shared memory, which the format does not know (weights that are used twice)."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return apart
