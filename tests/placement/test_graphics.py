"""Which driver simulator processes are told to draw with."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machine import write

from embodyrl.config.schema import EnvConfig
from embodyrl.placement.graphics import OPENGL, VULKAN, Graphics, graphics_variables, read_graphics
from embodyrl.placement.plan import Inventory, plan_env_workers
from embodyrl.placement.startup_lock import make_startup_lock
from embodyrl.placement.topology import Gpu

GPUS = [Gpu(index=index, address=f"0000:{index}b:00.0", uuid="", node=None) for index in (2, 5)]
BOTH = ("egl", "osmesa")


def opengl(installed=BOTH, *, gpus=(), rank=0, **preset):
    return graphics_variables(OPENGL, Graphics(opengl=installed, preset=preset), gpus, rank)


@pytest.mark.parametrize(
    ("installed", "gpus", "name"),
    [(BOTH, [], "osmesa"), (("egl",), [], "egl"), (BOTH, GPUS, "egl"), (("osmesa",), GPUS, "osmesa"), ((), GPUS, None)],
)
def test_egl_on_a_gpu_and_mesa_on_the_cpu(installed, gpus, name):
    variables = opengl(installed, gpus=gpus)
    assert variables.get("MUJOCO_GL") == variables.get("PYOPENGL_PLATFORM") == name
    assert variables["LP_NUM_THREADS"] == "1"


def test_processes_take_turns_on_gpus():
    assert [opengl(gpus=GPUS, rank=rank)["MUJOCO_EGL_DEVICE_ID"] for rank in range(3)] == ["2", "5", "2"]
    assert "MUJOCO_EGL_DEVICE_ID" not in opengl(("osmesa",), gpus=GPUS)


def test_what_the_user_has_set_stays():
    assert opengl(MUJOCO_GL="egl") == {"PYOPENGL_PLATFORM": "egl", "LP_NUM_THREADS": "1"}
    assert opengl(PYOPENGL_PLATFORM="egl")["MUJOCO_GL"] == "egl"
    assert opengl(MUJOCO_GL="disable") == {"LP_NUM_THREADS": "1"}
    assert "LP_NUM_THREADS" not in opengl(LP_NUM_THREADS="4")
    assert "MUJOCO_EGL_DEVICE_ID" not in opengl(gpus=GPUS, MUJOCO_EGL_DEVICE_ID="0")


def test_vulkan_on_the_cpu_alone_where_there_is_no_device():
    here = Graphics(software_vulkan="/lvp.json")
    assert graphics_variables(VULKAN, here, [], 0)["VK_ICD_FILENAMES"] == "/lvp.json"
    with_device = Graphics(software_vulkan="/lvp.json", has_device=True)
    set_by_user = Graphics(software_vulkan="/lvp.json", preset={"VK_DRIVER_FILES": "/mine.json"})
    for graphics, gpus in ((here, GPUS), (with_device, []), (Graphics(), []), (set_by_user, [])):
        assert "VK_ICD_FILENAMES" not in graphics_variables(VULKAN, graphics, gpus, 0)


def test_a_simulator_that_does_not_say_how_it_draws_is_told_nothing():
    assert graphics_variables(None, Graphics(opengl=BOTH), GPUS, 0) == {}


def test_what_a_machine_can_draw_with(tmp_path):
    write(tmp_path / "usr/share/vulkan/icd.d/lvp_icd.x86_64.json", "{}")
    write(tmp_path / "dev/dri/renderD128", "")
    graphics = read_graphics(tmp_path, {"MUJOCO_GL": "egl", "HOME": "/root", "VK_DRIVER_FILES": ""})
    assert graphics.software_vulkan == str(tmp_path / "usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
    assert graphics.has_device and graphics.preset == {"MUJOCO_GL": "egl"}
    nothing = read_graphics(tmp_path / "empty", {})
    assert not nothing.has_device and nothing.software_vulkan is None


def test_the_plan_tells_the_processes():
    machine = Inventory(cpus=(0, 1), cores=2, graphics=Graphics(opengl=BOTH), gpus=tuple(GPUS))
    plan = plan_env_workers(EnvConfig(name="metaworld", tasks=["reach-v3"], num_envs=2), machine)
    assert [spec.env_vars["MUJOCO_EGL_DEVICE_ID"] for spec in plan] == ["2", "5"]
    assert {spec.env_vars["MUJOCO_GL"] for spec in plan} == {"egl"}


WORKER = """
import sys
from embodyrl.envs.mujoco import rendering
from embodyrl.placement.startup_lock import use_startup_lock
use_startup_lock(int(sys.argv[1]))
rendering.context(16, 16)
print("drawn", flush=True)
"""


def test_opengl_is_initialised_in_turns():
    if not (importlib.util.find_spec("mujoco") and read_graphics(Path("/"), {}).opengl):
        pytest.skip("needs MuJoCo and an OpenGL without a screen")
    startup_lock = make_startup_lock()
    fcntl.lockf(startup_lock, fcntl.LOCK_EX)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(startup_lock)], pass_fds=[startup_lock], text=True, **pipes
    )
    said = next(line for line in worker.stderr if line.startswith("waiting"))
    assert said == f"waiting for process {os.getpid()} to initialise OpenGL, then it is this process's turn\n"
    fcntl.lockf(startup_lock, fcntl.LOCK_UN)
    assert worker.communicate(timeout=240)[0] == "drawn\n"
    os.close(startup_lock)
