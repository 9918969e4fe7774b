"""Which rank a process is, and what belongs to it."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import psutil
import pytest
from fake_machine import make_machine, write

from embodyrl.config import load_config
from embodyrl.config.schema import Config, Device
from embodyrl.placement.plan import Inventory, inventory
from embodyrl.placement.ranks import (
    RankInfo,
    RanksError,
    address_of,
    is_follower,
    own_share,
    rank_info_here,
    use_own_gpu,
)
from embodyrl.placement.topology import Gpu

GPUS = tuple(Gpu(index=index, address=f"0000:0{index}:00.0", uuid=f"GPU-{index}", node=0) for index in range(2))


def show_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable that says which GPUs CUDA shows, and restore it after the test, which sets it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def config_for(*overrides: str) -> Config:
    return load_config("experiment/gym_pendulum", ["env.num_envs=8", *overrides]).config


def launched(rank: int, size: int) -> dict[str, str]:
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"},
        "MASTER_ADDR": "localhost",
    }


def test_a_process_that_nobody_launched_is_the_first() -> None:
    assert (
        rank_info_here(config_for(), {}) == RankInfo() == rank_info_here(config_for("engine.parallel.world_size=1"), {})
    )
    assert rank_info_here(config_for("engine.parallel.world_size=2"), {}) == RankInfo(size=2, local_size=2)
    assert not is_follower({}) and not is_follower(launched(0, 2)) and is_follower(launched(1, 2))


def test_torchrun_says_which_rank_a_process_is() -> None:
    place = rank_info_here(config_for("engine.parallel.world_size=4"), launched(3, 4))
    assert place == RankInfo(rank=3, size=4, local_rank=1, local_size=2)
    with pytest.raises(RanksError, match=r"torchrun started 4 processes, but engine\.parallel\.world_size = 2: start"):
        rank_info_here(config_for("engine.parallel.world_size=2"), launched(0, 4))
    with pytest.raises(RanksError, match=r"env\.num_envs = 8 cannot be shared by 3 ranks: set env\.num_envs to 6 or 9"):
        rank_info_here(config_for(), launched(0, 3))
    groups = ["rollout.group_size=4", "algorithm=grpo", "rollout.episodes=whole", "rollout.num_chunks=200"]
    with pytest.raises(RanksError, match=r"by 4 ranks in whole groups of rollout\.group_size = 4: set env"):
        rank_info_here(config_for(*groups), launched(0, 4))


def test_a_name_that_means_loopback_is_an_address_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    card = psutil.net_if_addrs()["lo"][0]._replace(family=socket.AF_INET, address="192.0.2.7")
    loopback = card._replace(address="127.0.0.1")
    monkeypatch.setattr(socket, "gethostbyname", {"node": "127.0.1.1", "known": "192.0.2.9"}.__getitem__)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth0": [card]})
    named = {name: address_of(name) for name in ("node", "known", "127.0.0.2", "192.0.2.1", "::1")}
    assert named == {"node": "192.0.2.7", "known": "192.0.2.9", "127.0.0.2": "127.0.0.2"} | {
        name: name for name in ("192.0.2.1", "::1")
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback]})
    assert address_of("node") == "127.0.1.1"
    environ = launched(0, 4) | {"MASTER_ADDR": "192.0.2.1"}
    assert rank_info_here(config_for(), environ).address == "192.0.2.1"


def test_rollout_workers_need_all_ranks_on_their_machine() -> None:
    config = config_for("placement.rollout.workers=2")
    assert rank_info_here(config, launched(1, 2)).local_size == 2
    alone = {name: value for name, value in launched(1, 2).items() if name != "LOCAL_WORLD_SIZE"}
    for environ, here in ((launched(3, 4), 2), (alone, 1)):
        with pytest.raises(RanksError, match=rf"{here} of \d ranks are on this machine.*placement\.rollout\.workers=0"):
            rank_info_here(config, environ)


def test_slots_processes_and_cores_are_shared() -> None:
    place = RankInfo(rank=1, size=2, local_rank=1, local_size=2)
    share = own_share(config_for("env.workers=4").env, place, Inventory(cpus=(0, 1), cores=2))
    assert (share.num_envs, share.workers) == (4, 2)
    for cores, workers in ((2, 1), (5, 2), (16, 4)):
        assert own_share(config_for().env, place, Inventory(cpus=(0,), cores=cores)).workers == workers
    env = config_for().env
    assert own_share(env, RankInfo(), Inventory(cpus=(0,), cores=1)) is env


def test_every_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_all_gpus(monkeypatch)
    place = RankInfo(rank=1, size=2, local_rank=1, local_size=2)
    machine = Inventory(cpus=(0,), cores=1, gpus=GPUS)
    use_own_gpu(place, Device.cpu, machine)
    use_own_gpu(RankInfo(), Device.auto, machine)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    use_own_gpu(place, Device.auto, machine)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    show_all_gpus(monkeypatch)
    for name in ("10.0.0.1", "local"):
        use_own_gpu(dataclasses.replace(place, machine=name), Device.auto, machine)  # its launcher chooses
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    use_own_gpu(dataclasses.replace(place, machine="local", rank=0, local_rank=0), Device.auto, machine)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    with pytest.raises(RanksError, match=r"2 ranks on this machine, but 1 GPU: .*engine\.device=cpu"):
        use_own_gpu(place, Device.cuda, Inventory(cpus=(0,), cores=1, gpus=GPUS[:1]))


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        ("MIG-aa,MIG-bb", "MIG-bb"),  # slices of a GPU, which the kernel does not list
        ("GPU-0f, GPU-1f", "GPU-1f"),  # it lists others
        ("4,5", "5"),
        ("", ""),  # no GPU is to be used
        ("-1", "-1"),
    ],
)
def test_gpus_that_the_kernel_does_not_list_are_chosen_by_their_names(
    visible: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = inventory(make_machine(tmp_path, {0: "0-3"}, gpus={"0000:3b:00.0": 0}), cpus=[0])
    assert not machine.gpus
    use_own_gpu(RankInfo(rank=1, size=2, local_rank=1, local_size=2), Device.auto, machine)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_two_ranks_do_not_get_one_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa")
    machine = inventory(make_machine(tmp_path, {0: "0-3"}, gpus={"0000:3b:00.0": 0}), cpus=[0])
    with pytest.raises(RanksError, match=r"2 ranks on this machine, but 1 GPU"):
        use_own_gpu(RankInfo(size=2, local_size=2), Device.cuda, machine)


@pytest.mark.parametrize("device", ["nvidiactl", "dxg"])
def test_without_the_kernels_list_a_rank_takes_the_gpu_of_its_number(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_all_gpus(monkeypatch)
    place = RankInfo(rank=3, size=4, local_rank=1, local_size=2)
    use_own_gpu(place, Device.auto, inventory(make_machine(tmp_path, {0: "0-3"}), cpus=[0]))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    write(tmp_path / "dev" / device, "")
    use_own_gpu(place, Device.auto, inventory(tmp_path, cpus=[0]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    listed = inventory(make_machine(tmp_path, {0: "0-3"}, gpus={"0000:3b:00.0": 0}), cpus=[0])
    assert not listed.unlisted_gpus and listed.gpus
