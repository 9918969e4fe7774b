"""Why torch finds no CUDA device, as the driver's files and torch's own tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_machine import make_machine, write

from embodyrl.placement.cuda import (
    ALLOCATOR,
    PRODUCTS,
    TorchBuild,
    driver_version,
    set_up_allocator,
    set_up_cuda,
    torch_build,
    why_no_cuda,
)

DRIVER = "NVRM version: NVIDIA UNIX {}  {}  Release Build  (builder@host)  Thu Oct 26 06:00:00 UTC 2026"
KINDS = ["x86_64 Kernel Module", "Open Kernel Module for x86_64"]
NEW = TorchBuild(version="2.13.0+cu130", cuda="13.0")


def machine(root: Path, driver: str, kind: str = KINDS[0]) -> Path:
    write(root / "proc/driver/nvidia/version", f"{DRIVER.format(kind, driver)}\nGCC version:  gcc version 12.3.0")
    return make_machine(root, {0: "0-3"}, gpus={"0000:3b:00.0": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_the_drivers_version(kind: str, tmp_path: Path) -> None:
    assert driver_version(tmp_path) is None
    assert driver_version(machine(tmp_path, "550.54.14", kind)) == "550.54.14"


def test_torch_is_not_imported_to_read_what_it_was_built_for() -> None:
    assert torch_build() == TorchBuild(version=torch.__version__, cuda=torch.version.cuda)


def test_reasons(tmp_path: Path) -> None:
    assert str(why_no_cuda(tmp_path, {}, build=NEW)).startswith("there is no NVIDIA GPU")
    root = machine(tmp_path, "535.129.03")
    assert str(why_no_cuda(root, {"CUDA_VISIBLE_DEVICES": "-1"}, build=NEW)).startswith(
        "CUDA_VISIBLE_DEVICES='-1' hides"
    )
    cpu = TorchBuild(version="2.13.0+cpu", cuda=None)
    assert why_no_cuda(root, {}, build=cpu) == "torch 2.13.0+cpu is built for the CPU: make setup TORCH=cuda"
    assert why_no_cuda(root, {}, build=NEW) == (
        "the NVIDIA driver 535.129.03 is too old for torch 2.13.0+cu130 (CUDA 13.0), which needs 580 or newer: update "
        "the driver, or install a torch for an older CUDA"
    )
    assert why_no_cuda(root, {"CUDA_VISIBLE_DEVICES": "0"}, build=TorchBuild(version="2.13.0", cuda="12.8")) is None
    assert why_no_cuda(machine(tmp_path, "580.65.06"), {}, build=NEW) is None


def test_the_allocator_grows_its_segments_unless_the_user_decides(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    set_up_allocator(tmp_path, found)
    assert found == {}, "there is no GPU"
    here = machine(tmp_path, "580.65.06")
    make_machine(here, {0: "0-1"}, online_cpus="0-1", gpus={"0000:3b:00.0": 0})
    set_up_allocator(here, found)
    assert found == ALLOCATOR
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        set_up_allocator(here, own)
        assert own == {name: "max_split_size_mb:64"}


def test_products_can_be_deterministic_in_any_run_of_a_process(tmp_path: Path) -> None:
    """The first product reads the variable, also that of a run which does not ask for it."""
    found: dict[str, str] = {}
    set_up_cuda(tmp_path, found)
    assert found == {}, "there is no GPU"
    here = machine(tmp_path, "580.65.06")
    make_machine(here, {0: "0-1"}, online_cpus="0-1", gpus={"0000:3b:00.0": 0})
    set_up_cuda(here, found)
    assert found == ALLOCATOR | PRODUCTS
    own = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    set_up_cuda(here, own)
    assert own["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
