"""Which folder of meshes and textures LIBERO plays with, and what is said when none is whole."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import libero_files
import pytest
from libero_files import needs_assets

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.libero import assets
from embodyrl.envs.options import LiberoConfig
from embodyrl.errors import UserError
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

FIRST, SECOND, *OTHERS = assets.KNOWN_FILES


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of one's own, and no environment variable."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(assets.VARIABLE, raising=False)
    assets._of_packages.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The five packages in a folder of their own, of links to the files that are installed."""
    folder = tmp_path / "packages"
    for name in assets.KNOWN_FILES:
        for file in importlib.metadata.distribution(name).files or ():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(str(file.locate()), folder / file)
    found = {
        name: importlib.metadata.PathDistribution(next(folder.glob(f"{name.replace('-', '_')}-*.dist-info")))
        for name in assets.KNOWN_FILES
    }
    monkeypatch.setattr(assets, "_distribution", lambda name: found.get(name))
    return folder


def nothing(name: str) -> None:
    """No package is installed."""


def refused() -> str:
    """What is said of the packages."""
    assets._of_packages.cache_clear()
    with pytest.raises(UserError) as raised:
        assets.find(LiberoConfig(name="libero", tasks=[]))
    return str(raised.value)


def faults(*overrides: str) -> list[str]:
    """What `validate` says about LIBERO Goal with these changes."""
    assets._of_packages.cache_clear()
    try:
        load_config("experiment/libero_goal", list(overrides))
    except ConfigError as error:
        return [f"{fault.message} - {fault.hint}" for fault in error.faults]
    return []


def test_a_config_without_assets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_distribution", nothing)
    (missing,) = faults()
    assert "its package lacks, are not installed - make libero (or pip install 'embodyrl[libero]')" in missing
    (wrong,) = faults(f"env.assets={tmp_path / 'nowhere'}")
    assert "nowhere' does not exist - make libero" in wrong
    (tmp_path / "scenes").mkdir()
    (incomplete,) = faults(f"env.assets={tmp_path}")
    assert "has no folder articulated_objects/ - make libero" in incomplete
    for part in assets.PARTS:
        (tmp_path / "assets" / part).mkdir(parents=True)
    (above,) = faults(f"env.assets={tmp_path}")
    assert f"its folder assets/ has all; did you mean '{tmp_path}/assets'?" in above
    monkeypatch.setenv(assets.VARIABLE, str(tmp_path / "elsewhere"))
    (by_variable,) = faults()
    assert by_variable.startswith(f"${assets.VARIABLE} = ")


@needs_assets
def test_they_are_looked_for_in_the_users_folder_the_packages_and_what_libero_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = libero_files.place()
    assert here is not None
    download = tmp_path / "home" / ".cache" / "libero" / "assets"
    config = LiberoConfig(name="libero", tasks=[])
    for place in (tmp_path / "named", tmp_path / "by-variable", download):
        for part in assets.PARTS:
            (place / part).mkdir(parents=True)
    monkeypatch.setenv(assets.VARIABLE, str(tmp_path / "by-variable"))
    named = LiberoConfig(name="libero", tasks=[], assets=str(tmp_path / "named"))
    assert assets.find(named) == tmp_path / "named"
    assert assets.find(config) == tmp_path / "by-variable"
    monkeypatch.delenv(assets.VARIABLE)
    assert assets.find(config) == here and faults() == []
    monkeypatch.setattr(assets, "_distribution", nothing)
    assets._of_packages.cache_clear()
    assert assets.find(config) == download


@needs_assets
def test_half_of_the_packages(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets._of_packages.cache_clear()
    assert assets.find(LiberoConfig(name="libero", tasks=[])) == packages / assets.FOLDER.rstrip("/")
    found = assets._distribution
    monkeypatch.setattr(assets, "_distribution", lambda name: None if name == SECOND else found(name))
    assert f"half installed, the package {SECOND} is missing: make libero installs them anew" in refused()


@needs_assets
def test_a_package_that_was_cut_short_by_a_full_disk(packages: Path) -> None:
    texture = packages / assets.FOLDER / "articulated_objects/basin_faucet/ceramic.png"
    whole = texture.read_bytes()
    texture.unlink()
    assert f"the package {FIRST} is half unpacked, {assets.FOLDER}articulated_objects/basin" in refused()
    texture.write_bytes(whole[:1000])
    assert "ceramic.png is missing or cut short: make libero installs them anew" in refused()
    texture.write_bytes(whole)
    assert assets._first_broken(importlib.metadata.distribution(FIRST)) is None


@needs_assets
def test_a_package_of_another_version(packages: Path) -> None:
    file, _ = assets.KNOWN_FILES[FIRST]
    place = packages / assets.FOLDER / file
    whole = place.read_bytes()
    place.unlink()
    place.write_bytes(whole.replace(b"0", b"1", 1))  # of the same size
    assert f"the package {FIRST} 0.1.0 has another {file} than the one that is known: pip install" in refused()
