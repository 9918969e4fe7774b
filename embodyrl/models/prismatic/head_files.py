"""Parts of a model that the public layout keeps outside its safetensors, as `<name>--<step>_checkpoint.pt`."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.files import head_file

PREFIX = "module."
"""In front of every name: the public training code saves what is inside DistributedDataParallel."""


def read_head(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a head by name; nothing but tensors is read from the file.

    Raises:
        PolicyError: there is no such file, it is damaged, or it holds something else.
    """
    path = head_file(folder, name)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise PolicyError(f"{path} is damaged or holds more than tensors: download it again") from error
    return {key.removeprefix(PREFIX): value for key, value in content.items()}


def write_head(head: nn.Module, folder: Path, name: str) -> None:
    """Write a head in the public layout."""
    tensors = {PREFIX + key: value.detach().cpu().clone() for key, value in head.state_dict().items()}
    torch.save(tensors, folder / f"{name}--latest_checkpoint.pt")
