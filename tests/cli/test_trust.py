"""Whose Python code runs: that of one's own runs, and of others only when asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import programs
import pytest

from embodyrl.config import load_config
from embodyrl.config.plugins import UntrustedError, read_saved

PLUGIN = """
import pathlib
with open(pathlib.Path(__file__).parent / "imported", "a") as file:
    file.write("once\\n")
"""
CONFIG = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
plugins: [mine]
seed: 1
run: {dir: out, iterations: 1, eval_every: 0}
env: {num_envs: 2, workers: 1, max_episode_steps: 5}
eval: {episodes: 2}
rollout: {num_chunks: 4}
algorithm: {minibatches: 1, epochs: 1}
tracking: {sinks: [jsonl], report: false}
"""
DENIED = "'): read that code, and if you trust it, say so with --trust (in Python trust=True)\n"


def embodyrl(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"} | variables
    return programs.run(["-m", "embodyrl", *words], timeout=200, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, its plug-in, and a run in out/; `imported` has a line for every import."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "my.yaml").write_text(CONFIG)
    done = embodyrl(folder, "run", "my.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"plug-in mine: {folder / 'mine.py'}\n")
    assert f"\n  plug-ins   mine ({folder / 'mine.py'})\n" in done.stdout
    return folder


@pytest.fixture
def strange(project: Path, tmp_path: Path) -> Path:
    """The run as a stranger would send it: the plug-in inside, and origin.json says so."""
    place = tmp_path / "strange"
    shutil.copytree(project / "out", place, symlinks=True)
    shutil.copy(project / "mine.py", place)
    for origin in place.rglob("origin.json"):
        origin.write_text(json.dumps({"source": "my.yaml", "plugin_dir": str(place)}))
    sign_off(place)
    return place


def sign_off(place: Path) -> None:
    """Make the manifests fit the files again, as a stranger can."""
    import hashlib

    for manifest in place.rglob("manifest.json"):
        contents = json.loads(manifest.read_text())
        for name, facts in contents["files"].items():
            data = (manifest.parent / name).read_bytes()
            facts |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(contents))


def rewrite(place: Path, **changes: str) -> None:
    """Change every origin.json."""
    for origin in place.rglob("origin.json"):
        origin.write_text(json.dumps(json.loads(origin.read_text()) | changes))
    sign_off(place)


COMMANDS = [
    ["eval", "strange"],
    ["eval", "strange/checkpoints/000001"],
    ["export", "strange", "--out", "exported"],
    ["resume", "strange", "run.iterations=2"],
    ["run", "strange/config.yaml", "run.dir=other"],
    ["run", "strange/config.yaml", "--print-config"],
    ["validate", "strange/checkpoints/last/config.yaml"],
    ["plan", "strange/config.yaml"],
    ["graph", "strange/config.yaml"],
    ["doctor", "strange/config.yaml"],
    ["collect", "strange/config.yaml", "--episodes", "1", "--out", "demos"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_strangers_code_does_not_run_unasked(strange: Path, words: list[str]) -> None:
    done = embodyrl(strange.parent, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "strange/" in done.stderr and done.stderr.count("\n") == 1
    denied = f"looks for plug-ins in its own folder, and it would run the Python code of mine (in '{strange}{DENIED}"
    assert done.stderr.endswith(denied)
    assert not (strange / "imported").exists()


@pytest.mark.parametrize("words", [COMMANDS[0], COMMANDS[3], COMMANDS[7]], ids=" ".join)
def test_it_runs_when_asked_and_says_so_first(strange: Path, words: list[str]) -> None:
    done = embodyrl(strange.parent, *words, "--trust")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"plug-in mine: {strange / 'mine.py'}\n")
    assert done.stderr.count("plug-in mine") == 1
    assert (strange / "imported").exists()


@pytest.mark.parametrize("words", ["resume moved run.iterations=2", "eval moved", "plan moved/config.yaml"])
def test_own_runs_go_on_unasked_also_elsewhere_on_the_machine(project: Path, tmp_path: Path, words: str) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(project / "out", moved, symlinks=True)
    done = embodyrl(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"plug-in mine: {project / 'mine.py'}\n"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_ranks_go_on_unasked_and_strange_ones_when_asked(project: Path, strange: Path, tmp_path: Path) -> None:
    words = ["run.iterations=2", "engine.parallel.world_size=2", "env.workers=2", "engine.device=cpu"]
    shutil.copytree(project / "out", tmp_path / "own", symlinks=True)
    done = embodyrl(tmp_path, "resume", "own", *words[:3])
    assert done.returncode == 0, done.stderr
    assert embodyrl(tmp_path, "resume", "strange", *words[:3]).returncode == 2
    assert not (strange / "imported").exists()
    done = embodyrl(tmp_path, "resume", "strange", *words[:3], "--trust")
    assert done.returncode == 0, done.stderr


def test_a_signature_fits_what_it_was_made_for_and_nothing_else(project: Path, tmp_path: Path) -> None:
    own = json.loads((project / "out" / "origin.json").read_text())
    assert len(own["signature"]) == 64
    before = (project / "imported").read_text()
    for number, changes in enumerate(
        (
            {"signature": ""},
            {"signature": "0" * 64},
            {"plugin_dir": str(tmp_path)},
            {"plugin_dir": "../../" + str(project.relative_to(project.parents[1]))},
        )
    ):
        place = tmp_path / f"changed-{number}"
        shutil.copytree(project / "out", place, symlinks=True)
        rewrite(place, **changes)
        done = embodyrl(tmp_path, "eval", place.name)
        assert done.returncode == 2 and done.stderr.endswith(DENIED), done.stderr
    place = tmp_path / "other-module"
    shutil.copytree(project / "out", place, symlinks=True)
    for config in place.rglob("config.yaml"):
        config.write_text(config.read_text().replace("function: null", "function: subprocess:getoutput"))
    sign_off(place)
    done = embodyrl(tmp_path, "eval", place.name)
    assert done.returncode == 2
    assert "was not made by you on this machine, and it would run the Python code of mine, subproc" in done.stderr
    assert (project / "imported").read_text() == before


def test_another_users_run_is_a_strangers(project: Path, tmp_path: Path) -> None:
    done = embodyrl(project, "eval", "out", XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 2
    assert "out/checkpoints/000001/config.yaml was not made by you on this machine, " in done.stderr
    assert done.stderr.endswith(DENIED)


def test_a_key_that_others_can_read_vouches_for_nothing(project: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(os.environ["XDG_STATE_HOME"], state)
    assert embodyrl(project, "eval", "out", XDG_STATE_HOME=str(state)).returncode == 0
    (state / "embodyrl" / "key").chmod(0o644)
    assert embodyrl(project, "eval", "out", XDG_STATE_HOME=str(state)).returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_home_only_runs_with_plug_ins_notice(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = {"XDG_STATE_HOME": str(tmp_path / "file" / "state"), "HOME": str(tmp_path / "file")}
    plain = embodyrl(project, "run", "my.yaml", "plugins=[]", f"run.dir={tmp_path / 'plain'}", **nowhere)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "plug-ins" not in plain.stdout and "--trust" not in plain.stdout
    own = embodyrl(project, "run", "my.yaml", f"run.dir={tmp_path / 'own'}", **nowhere)
    assert own.returncode == 0, own.stderr
    assert "so resume and eval will need --trust" in own.stdout
    assert embodyrl(project, "eval", str(tmp_path / "plain"), **nowhere).returncode == 0
    refused = embodyrl(project, "eval", str(tmp_path / "own"), **nowhere)
    assert refused.returncode == 2 and refused.stderr.endswith(DENIED)
    assert embodyrl(project, "eval", str(tmp_path / "own"), "--trust", **nowhere).returncode == 0


def test_a_pipelines_function_is_code_too(strange: Path) -> None:
    for config in strange.rglob("config.yaml"):
        text = config.read_text().replace("plugins: [mine]", "plugins: []")
        config.write_text(text.replace("function: null", "function: mine:build"))
    sign_off(strange)
    done = embodyrl(strange.parent, "graph", "strange/config.yaml")
    assert done.returncode == 2 and done.stderr.endswith(DENIED)
    assert not (strange / "imported").exists()


def test_an_exported_policy_with_code_beside_it_is_a_strangers(strange: Path) -> None:
    policy = strange.parent / "policy"
    policy.mkdir()
    shutil.copy(strange / "config.yaml", policy / "training.yaml")
    shutil.copy(strange / "mine.py", policy)
    done = embodyrl(strange.parent, "run", "policy/training.yaml", "run.dir=new")
    assert done.returncode == 2 and done.stderr.endswith(DENIED)
    assert not (policy / "imported").exists()


def test_a_run_directory_without_its_origin_is_a_strangers(tmp_path: Path) -> None:
    """Whoever passes it on can leave files out; any that is left tells that a run made the folder."""
    imported = []
    for mark in ("checkpoints/", "metrics.jsonl", "run.log", ".lock", "origin.json", None):
        folder = tmp_path / str(mark).strip("/")
        place = folder if mark else folder / "checkpoints" / "000001"
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(CONFIG)
        (place / "mine.py").write_text(PLUGIN)
        if mark is not None:
            (place / mark).mkdir() if mark.endswith("/") else (place / mark).symlink_to("nothing")
        try:
            load_config(place / "config.yaml")
        except UntrustedError as error:
            assert "looks for plug-ins in its own folder, and it would run the Python code of mine" in str(error)
        else:
            imported.append(mark)
        assert not (place / "imported").exists() or mark in imported
    assert not imported
    own = tmp_path / "own" / "my.yaml"
    own.parent.mkdir()
    own.write_text(CONFIG)
    assert read_saved(own) is None, "written manually"
    done = embodyrl(tmp_path, "validate", "run.log/config.yaml")
    assert done.returncode == 2 and done.stderr.endswith(DENIED)


def test_what_is_asked_for_on_the_command_line_comes_from_no_strange_folder(strange: Path) -> None:
    done = embodyrl(strange.parent, "eval", "strange", "plugins=[]")
    assert done.returncode == 0, done.stderr
    assert embodyrl(strange.parent, "eval", "strange", "plugins=[mine]").returncode == 2
    assert not (strange / "imported").exists()
