"""`validate` refuses what a run cannot start with on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.config import ConfigError, ConfigUse, load_config
from embodyrl.envs.gymnasium import families
from embodyrl.registry import Requirement
from embodyrl.runner import start_rules


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with a file and a folder that is somebody's."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("own").mkdir()
    Path("own/notes.txt").write_text("")


def faults(*settings: str, experiment: str = "gym_pendulum") -> str:
    """What is said about a config that would start now."""
    try:
        load_config(experiment, settings, use=ConfigUse.check, also=[start_rules.start_rules])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.dir=file"], "run.dir: file is a file - choose another run.dir"),
        (["run.dir=file/a/b"], "file/a/b cannot be made, because "),
        (
            ["run.dir=/proc/x"],
            "run.dir: /proc/x cannot be made, because /proc ",  # root and others have different reasons
        ),
        (["run.dir=/proc"], "command line: run.dir: /proc "),  # it exists, and only root may write there
        (["run.dir=own"], "own exists already and is never overwritten - choose another run.dir\n"),
        (["env=gym/pendulum_rgb"], "env.cameras = ['render'], but model 'mlp' reads states alone"),
        (
            ["env.num_envs=100000000"],
            "env.num_envs = 100000000 in env.workers = auto processes need 307 GB of main memory",
        ),
        (
            ["rollout.num_chunks=1000000000000"],
            "rollout.num_chunks = 1000000000000 of env.num_envs = 8 need 512000 GB of main memory or more",
        ),
        (
            [f"model.hidden_sizes={[16384] * 101}"],
            "are 2.7e+10 weights, which need 215 GB of main memory or more",
        ),
        (["env.num_envs=1000000", "env.workers=1000000"], "env.workers = 1000000, but this machine allows "),
        (["env.kwargs.gg=9"], "'Pendulum-v1' takes no argument 'gg' (env.kwargs) - did you mean 'g'?"),
        (["env.cameras=[rendr]", "model=cnn"], "Pendulum-v1 has no camera 'rendr' - did you mean 'render'?"),
        (
            ["env.tasks=[Pendulum-v1,CartPole-v1]", "env.success_return=0.0"],
            "env.tasks mixes environments of different",
        ),
    ],
)
def test_it_is_refused_before_anything_starts(settings: list[str], message: str) -> None:
    assert message in faults(*settings)
    assert sorted(path.name for path in Path().rglob("*")) == ["file", "notes.txt", "own"]


def test_a_check_leaves_nothing_behind() -> None:
    assert not faults("run.dir=new/run") and sorted(path.name for path in Path().iterdir()) == ["file", "own"]


def test_packages_of_gymnasiums_own_environments_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["env.tasks=[LunarLander-v3]", "env.success_return=200"]
    missing = Requirement(module="box_of_no_dimensions", install="pip install 'gymnasium[box2d]'")
    monkeypatch.setitem(families.OWN_PACKAGES, "box2d", missing)
    assert faults(*chosen).startswith(
        "command line: the Gymnasium environment 'LunarLander-v3' needs the package 'box_of_no_dimensions', which is "
        "not installed - pip install 'gymnasium[box2d]'\n"
    )
    load_config("gym_cartpole", chosen, use=ConfigUse.elsewhere)


def test_what_fits_passes() -> None:
    assert faults() == faults("run.dir=new/er") == faults("env.kwargs.g=9.8", "env.workers=2") == ""
    assert faults("model.hidden_sizes=[1000,1000]") == ""
    assert faults("env=gym/pendulum_rgb", "model=cnn") == faults("rollout.num_chunks=1000000") == ""
    Path("empty").mkdir()
    assert faults("run.dir=empty") == ""


def test_all_of_it_comes_at_once() -> None:
    text = faults("run.dir=file", "env.kwargs.gg=9", "env.num_envs=100000000", "engine.optimizer.lr=-1")
    assert text.endswith("4 faults; nothing was started.")


def test_critics_count() -> None:
    critics = "algorithm.off_policy.critics.hidden_sizes"
    assert f"{critics} = [16384, 16384] are 2.7e+10 weights, which need" in faults(
        f"{critics}=[16384,16384]", "algorithm.off_policy.critics.count=100", experiment="gym_pendulum_sac"
    )


def test_adapters_find_layers_without_weights() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    wanted = ["env=gym/pendulum_rgb", "env.image_size=[224,224]", "model=smolvla", "engine.lora.rank=4"]
    fault = "engine.lora.targets: no layer of model 'smolvla' that learns ends in 'q_prj' - did you mean 'q_proj'?"
    assert fault in faults(*wanted, "engine.lora.targets=[v_proj,q_prj]")
    frozen = faults(*wanted, "model.frozen=language", "engine.lora.targets=[nowhere]")
    assert frozen.count("no layer of model") == 1, "what follows from other remedies repeats it"
    assert "engine.lora.targets" not in faults(*wanted, "engine.lora.targets=[v_proj,q_proj]")
    assert faults("engine.lora.rank=4", "engine.lora.targets=[q_proj]").endswith("\n1 fault; nothing was started.")


def test_control_groups_and_ulimits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this machine allows" not in faults("env.workers=8")
    monkeypatch.setattr(start_rules, "_control_group", lambda: 3)
    assert "this machine allows 3 processes (pids.max of the control group)" in faults("env.workers=8")
    monkeypatch.setattr(start_rules, "_control_group", lambda: None)
    monkeypatch.setattr(start_rules, "_limit", lambda kind: 99)
    assert "this machine allows 7 simulator processes, for each has 7 open files (ulimit -n 99)" in faults(
        "env.workers=8"
    )
