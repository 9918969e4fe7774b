"""Which files hold a checkpoint's weights. Nothing here imports torch, so that a config can be checked against its
checkpoint before anything starts."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from embodyrl.models.companions import parse_json
from embodyrl.models.errors import PolicyError

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
    weight_map = parse_json((folder / INDEX_FILE).read_bytes(), str(folder / INDEX_FILE)).get("weight_map")
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
    """Whether a file looks like what `torch.save` or pickle writes."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return start == b"PK" or start in (bytes([0x80, protocol]) for protocol in range(2, 6))
