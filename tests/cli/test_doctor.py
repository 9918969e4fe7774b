"""`embodyrl doctor` on this machine, and on one where something was broken on purpose."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import programs
import psutil
import pytest

from embodyrl.cli import checkup
from embodyrl.cli.checkup import CheckResult, Status
from embodyrl.cli.doctor import _start, verdict
from embodyrl.config import ConfigUse, load_config
from embodyrl.envs.mujoco import rendering
from embodyrl.placement.plan import Inventory
from embodyrl.placement.process import Probe, ProbeFailed
from embodyrl.placement.topology import Gpu
from embodyrl.registry import SIMULATORS

needs_mujoco = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="MuJoCo is not installed")
needs_maniskill = pytest.mark.skipif(bool(SIMULATORS.entry("maniskill").missing()), reason="ManiSkill not installed")


def doctor(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "400", **variables}
    return programs.run(["-m", "embodyrl", "doctor", *words], cwd=cwd, env=environment)


def row(done: subprocess.CompletedProcess[str], subject: str) -> tuple[str, str]:
    """Status and text of a row, its remedy included."""
    match = re.search(rf"^{re.escape(subject)} +(ok|absent|FAULT) +(.*(?:\n +-> .*)?)", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout + done.stderr
    return match[1], match[2].rstrip()


IMPORT_LIGHT = """
import sys
from embodyrl.cli.main import main
sys.argv[1:] = ["doctor"]
try:
    main()
finally:
    heavy = {"torch", "tensordict", "gymnasium", "metaworld", "mujoco", "mani_skill", "sapien"}
    sys.stderr.write(" ".join(heavy & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def healthy() -> subprocess.CompletedProcess[str]:
    """The answer on this machine as it is, by an interpreter of its own that says what it has imported."""
    command, environment = [sys.executable, "-c", IMPORT_LIGHT], {**os.environ, "COLUMNS": "400"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_this_machine_can_run(healthy: subprocess.CompletedProcess[str]) -> None:
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    for subject in ("Python", "torch", "CPUs", "memory", "disk", "gymnasium"):
        assert row(healthy, subject)[0] == "ok"
    assert healthy.stdout.splitlines()[-1].startswith("everything that every run needs is here")
    assert not healthy.stderr, "it imports neither torch nor a simulator: other processes do"


def test_every_simulator_has_a_row(healthy: subprocess.CompletedProcess[str]) -> None:
    for name in ("gymnasium", "libero", "maniskill", "metaworld"):  # other tests may have registered more
        entry = SIMULATORS.entry(name)
        status, text = row(healthy, entry.name)
        assert (status == "ok") == (not entry.missing())
        assert status == "ok" or entry.missing()[0].install in text


@pytest.mark.skipif(bool(SIMULATORS.entry("libero").missing()), reason="LIBERO is not installed")
def test_assets_of_libero(tmp_path: Path) -> None:
    wrong = doctor(EMBODYRL_LIBERO_ASSETS=str(tmp_path / "nowhere"))
    status, text = row(wrong, "libero assets")
    assert status == "absent" and "nowhere" in text and "-> make libero" in text
    for part in (
        "articulated_objects",
        "scenes",
        "stable_hope_objects",
        "stable_scanned_objects",
        "turbosquid_objects",
    ):
        (tmp_path / part).mkdir()
    assert row(doctor(EMBODYRL_LIBERO_ASSETS=str(tmp_path)), "libero assets") == ("ok", f"in {tmp_path}")


@needs_mujoco
def test_a_config_is_checked_for_what_it_needs() -> None:
    """With an OpenGL that does not exist, and a place where nobody can write."""
    done = doctor("experiment/metaworld_reach", "run.dir=/proc/nowhere/run", MUJOCO_GL="nonsense")
    assert done.returncode == 1 and row(done, "disk")[0] == "FAULT"
    status, text = row(done, "OpenGL (MUJOCO_GL=nonsense)")
    assert status == "FAULT" and "nonsense" in text and "-> unset MUJOCO_GL, or set it to osmesa or egl" in text
    assert done.stdout.splitlines()[-1] == "2 faults: disk, OpenGL (MUJOCO_GL=nonsense)"
    assert "maniskill" not in done.stdout and "Vulkan" not in done.stdout
    wrong = doctor("experiment/gym_pendulum", "env.num_envs=0")
    assert wrong.returncode == 2 and "env.num_envs" in wrong.stderr


IMAGES = "env.cameras=[base_camera]"


@pytest.mark.slow
@needs_maniskill
def test_a_vulkan_driver_that_does_not_exist() -> None:
    broken = {"VK_ICD_FILENAMES": os.devnull, "VK_DRIVER_FILES": os.devnull}
    images = doctor("experiment/maniskill_push_cube", IMAGES, **broken)
    status, text = row(images, "Vulkan (SAPIEN)")
    assert status == "FAULT" and "no device that can render" in text and "-> install a Vulkan driver" in text
    assert images.returncode == 1


@needs_maniskill
def test_states_need_no_driver_but_images_and_videos_of_them_do() -> None:
    found = {}
    for needs in ("", IMAGES, "tracking.video.episodes=2"):
        overrides = [needs] if needs else []
        loaded = load_config("experiment/maniskill_push_cube", overrides, use=ConfigUse.elsewhere)
        started = _start(loaded, Inventory(cpus=(0,), cores=1))
        for each in started:
            each.probe.close()
        findings = [each.judge(None, None) for each in started[1:]]  # the first is torch
        found[needs] = {each.subject: each.status for each in findings}
    assert found == {
        "": {"Vulkan (SAPIEN)": Status.absent},
        IMAGES: {"Vulkan (SAPIEN)": Status.fault},
        "tracking.video.episodes=2": {"Vulkan (SAPIEN)": Status.fault, "videos": Status.ok},
    }


def test_a_probe_that_crashes() -> None:
    with pytest.raises(ProbeFailed, match=r"crashes \(SIGABRT\)"):
        Probe("import os; os.abort()").result(time.monotonic() + 240)


def test_a_probe_that_raises() -> None:
    with pytest.raises(ProbeFailed, match=r"ImportError: libGL\.so: cannot open"):
        Probe("raise ImportError('libGL.so: cannot open')").result(time.monotonic() + 240)


def test_a_probe_that_hangs_is_killed_with_what_it_started() -> None:
    probe = Probe("import subprocess, sys; subprocess.run(['sleep', '1000'])")
    process = psutil.Process(probe._process.pid)
    deadline = time.monotonic() + 240
    while not (children := process.children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ProbeFailed, match="hangs"):
        probe.result(time.monotonic())
    gone, alive = psutil.wait_procs([process, *children], timeout=60)
    assert not alive and len(gone) == 1 + len(children)


def test_a_probe_says_what_was_printed_last() -> None:
    assert Probe("print('noise'); print('[1, null]')").result(time.monotonic() + 240) == [1, None]


@needs_mujoco
def test_a_driver_that_hangs_is_a_finding() -> None:
    (first, *_) = rendering.checks(Inventory(cpus=(0,), cores=1))
    started = checkup.start_rendering(first, needed=True)
    started.probe.close()
    finding = started.judge(None, ProbeFailed("hangs: no answer in time"))
    assert finding.status is Status.fault and finding.remedy


def test_little_memory_and_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "LEAST_MEMORY", 2**60)
    monkeypatch.setattr(checkup, "LEAST_DISK", 2**60)
    for finding in (checkup.memory(), checkup.disk(tmp_path / "not" / "yet")):
        assert finding.status is Status.fault and finding.remedy
    absent = checkup.shared_memory(tmp_path / "shm")
    assert absent.status is Status.absent and absent.remedy


def test_the_last_line() -> None:
    fine = CheckResult(subject="a", status=Status.ok, found="")
    odd = CheckResult(subject="b", status=Status.absent, found="")
    bad = CheckResult(subject="c", status=Status.fault, found="")
    assert verdict([fine], None) == "everything that every run needs is here"
    assert verdict([fine, odd], None).endswith("; absent, needed by some runs: b")
    assert verdict([fine, odd, bad, bad], None) == "2 faults: c, c"
    loaded = load_config("experiment/gym_pendulum")
    assert verdict([fine, odd], loaded) == "everything experiment/gym_pendulum needs is here"


def gpus(count: int) -> Inventory:
    """A machine with so many GPUs."""
    found = [Gpu(index=index, address=f"0000:0{index}:00.0", uuid=f"GPU-{index}", node=0) for index in range(count)]
    return Inventory(cpus=(0,), cores=1, gpus=tuple(found))


def test_gpus_that_would_stay_idle() -> None:
    assert checkup.driver(gpus(0), None) is None
    everything = checkup.driver(gpus(8), None)
    assert everything is not None and everything.status is Status.ok and everything.found.startswith("8 GPUs, driver ")
    for overrides, idle in ([], 7), (["engine.parallel.world_size=4", "env.num_envs=8"], 4), (["engine.device=cpu"], 0):
        finding = checkup.driver(gpus(8), load_config("experiment/gym_pendulum", overrides).config)
        assert finding is not None and (finding.status is Status.absent) == bool(idle)
        assert (f"; {idle} of them would stay idle" in finding.found) == bool(idle)
        assert ("set engine.parallel.world_size=8" in finding.remedy) == bool(idle)


def test_gpus_in_words() -> None:
    large, small = ("NVIDIA H200", 140 * 2**30, "9.0"), ("NVIDIA L4", 23 * 2**30, "8.9")
    assert checkup.describe_gpus([large, large, small]) == (
        "2 x NVIDIA H200 (140.0 GiB, compute capability 9.0), 1 x NVIDIA L4 (23.0 GiB, compute capability 8.9)"
    )


def test_a_torch_that_does_not_fit_the_gpus() -> None:
    started = checkup.start_torch(gpus(1), needs_cuda=True)
    started.probe.close()
    finding = started.judge(["2.13.0", "13.0", []], None)
    assert finding.status is Status.fault and "the kernel shows 1 NVIDIA GPUs" in finding.found and finding.remedy
