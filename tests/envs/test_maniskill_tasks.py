"""What is said about a run on ManiSkill before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.maniskill import info
from embodyrl.envs.options import ManiSkillConfig, Sim
from embodyrl.placement.graphics import Graphics
from embodyrl.placement.plan import Inventory, plan_env_workers
from embodyrl.placement.topology import Gpu
from embodyrl.registry import SIMULATORS

if missing := [requirement.module for requirement in SIMULATORS.entry("maniskill").missing()]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

TWO_GPUS = tuple(
    Gpu(index=index, address=f"0000:0{index}:00.0", uuid=uuid, node=None) for index, uuid in enumerate(("GPU-a", ""))
)


def machine(gpus: int) -> Inventory:
    return Inventory(cpus=(0, 1, 2, 3), cores=4, gpus=TWO_GPUS[:gpus])


def faults(*overrides: str) -> list[str]:
    """Place and text of every fault."""
    try:
        load_config("experiment/maniskill_push_cube", list(overrides))
    except ConfigError as error:
        return [f"{'.'.join(map(str, fault.path))}: {fault.message} - {fault.hint}" for fault in error.faults]
    return []


def test_a_task_that_does_not_exist() -> None:
    (fault,) = faults("env.tasks=[PushCub-v1]")
    assert fault.startswith("env.tasks.0: maniskill has no task 'PushCub-v1' - did you mean 'PushCube-v1'? (`embodyrl")


def test_assets_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    (fault,) = faults("env.tasks=[PutCarrotOnPlateInScene-v1]")
    assert fault == (
        "env.tasks.0: the assets (bridge_v2_real2sim, widowx250s) of the ManiSkill task 'PutCarrotOnPlateInScene-v1' "
        "are not on this machine - python -m mani_skill.utils.download_asset bridge_v2_real2sim && "
        "python -m mani_skill.utils.download_asset widowx250s"
    )
    (tmp_path / "data/robots/widowx").mkdir(parents=True)
    (fault,) = faults("env.tasks=[PutCarrotOnPlateInScene-v1]")
    assert "(bridge_v2_real2sim)" in fault and "widowx" not in fault
    (tmp_path / "data/tasks/bridge_v2_real2sim_dataset").mkdir(parents=True)
    assert not faults("env.tasks=[PutCarrotOnPlateInScene-v1]")


def test_what_the_upstream_driver_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not faults("env.driver=upstream")
    assert faults("env.driver=upstream", "env.sim=gpu", "env.tasks=[PushCube-v1]")[0] == (
        "env.driver: env.driver = 'upstream', but with env.sim = 'gpu' scenes are saved and restored by the fast "
        "driver - set env.driver to fast, or env.sim to cpu"
    )
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    for place in ("data/robots/widowx", "data/tasks/bridge_v2_real2sim_dataset"):
        (tmp_path / place).mkdir(parents=True)
    (fault,) = faults("env.driver=upstream", "env.tasks=[PutCarrotOnPlateInScene-v1]")
    assert fault == (
        "env.tasks.0: the ManiSkill task 'PutCarrotOnPlateInScene-v1' has no state observations, which env.driver = "
        "'upstream' reads - set env.driver to fast"
    )


def test_a_task_with_two_robots() -> None:
    (fault,) = faults("env.tasks=[TwoRobotPickCube-v1]")
    assert "env.tasks.0: the ManiSkill task 'TwoRobotPickCube-v1' has several robots - choose another" in fault


@pytest.mark.parametrize(
    ("graphics", "can"),
    [
        (Graphics(), False),
        (Graphics(software_vulkan="/usr/share/vulkan/icd.d/lvp_icd.json"), True),
        (Graphics(has_device=True), True),
        (Graphics(preset={"VK_ICD_FILENAMES": "mine.json"}), True),
    ],
)
def test_images_need_a_driver(graphics: Graphics, can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "inventory", lambda: Inventory(cpus=(0,), cores=1, graphics=graphics))
    assert not faults()
    for setting, path in (("env.cameras=[base_camera]", "env.cameras"), *[("tracking.video.episodes=1",) * 2]):
        found = faults(setting)
        assert [fault.startswith(path.partition("=")[0] + ": ") for fault in found] == ([] if can else [True])
        assert can or "no Vulkan driver is installed here - install a Vulkan driver" in found[0]


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, [], "env.sim: env.sim = 'gpu', but there is no NVIDIA GPU here - set env.sim to cpu"),
        (1, [], None),
        (1, ["env.workers=2"], "env.workers: env.workers = 2, but with env.sim = 'gpu' a process fills a GPU"),
        (2, ["env.workers=2"], None),
        (1, ["env.tasks=[PushCube-v1,PullCube-v1]"], "env.tasks: with env.sim = 'gpu' all slots play one task"),
        (
            1,
            ["env.rebuild=true"],
            "env.rebuild: env.rebuild is true, but with env.sim = 'gpu' all envs",
        ),
    ],
)
def test_a_gpu(gpus: int, overrides: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "inventory", lambda: machine(gpus))
    found = faults("env.sim=gpu", *overrides)
    assert [fault.startswith(expected) for fault in found] == [True] if expected else not found


def test_processes_on_gpus_are_as_many_as_these_and_see_one_each() -> None:
    config = ManiSkillConfig(name="maniskill", tasks=["PushCube-v1"], num_envs=64, sim=Sim.gpu)
    (only,) = plan_env_workers(config, machine(1))
    assert only.slots == range(64) and "CUDA_VISIBLE_DEVICES" not in only.env_vars
    both = plan_env_workers(config, machine(2))
    assert [spec.env_vars["CUDA_VISIBLE_DEVICES"] for spec in both] == ["GPU-a", "1"]
    on_cpu = ManiSkillConfig(name="maniskill", tasks=["PushCube-v1"], num_envs=64)
    assert len(plan_env_workers(on_cpu, machine(2))) == 4
