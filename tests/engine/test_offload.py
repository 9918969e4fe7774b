"""What `engine.offload` takes off the device comes back bit for bit, and its memory is really free meanwhile."""

from __future__ import annotations

import gc
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import torch
from engines import make_batch, make_engine, make_policy, resumed, weights, whole_state
from sync_peers import peers
from torch import Tensor, nn

from embodyrl.config.schema import Offload, OptimizerConfig, ParallelBackend, ParallelConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.offload import FileMemory, Offloaded, optimizer_tensors
from embodyrl.engine.parallel import connected
from embodyrl.errors import RunError, UserError
from embodyrl.placement.ranks import RankInfo

CPU = torch.device("cpu")
MIB = 2**20


def rss() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / MIB


def state(engine: HybridEngine) -> dict[str, Any]:
    return whole_state(engine)


def learned(folder: Path, setting: Offload, *, resume_after: int | None = None) -> tuple[Tensor, dict[str, Any]]:
    """Weights and state after four updates with a reference policy; perhaps with a new engine in between."""
    engine = make_engine(engine={"offload": setting}, kl_coef=0.1, folder=folder)
    for number in range(4):
        if number == resume_after:
            kept = state(engine)
            following = make_engine(engine={"offload": setting}, kl_coef=0.1, folder=folder)
            following.policy.load_state_dict(engine.policy.state_dict())
            resumed(following, kept)
            engine = following
        engine.learner.update(make_batch(engine), ["push"])
    return weights(engine), state(engine)


@pytest.mark.parametrize("setting", [Offload.optimizer, Offload.all])
@pytest.mark.parametrize("resume_after", [None, 2])
def test_offloading_changes_no_number(disk: Path, setting: Offload, resume_after: int | None) -> None:
    plain, plain_state = learned(disk, Offload.none)
    moved, moved_state = learned(disk, setting, resume_after=resume_after)
    assert torch.equal(plain, moved)
    # Texts are compared on their own: torch compares numbers only.
    assert plain_state["streams"].pop("device") == moved_state["streams"].pop("device")
    torch.testing.assert_close(plain_state, moved_state, rtol=0, atol=0)


def away(engine: HybridEngine, name: str) -> list[bool]:
    part = engine.offload._parts[name]
    assert part._memory is not None
    return [part._memory.holds(tensor) for tensor in part._movable()]


def test_parts_are_there_when_they_are_needed_and_away_otherwise(disk: Path) -> None:
    engine = make_engine(engine={"offload": Offload.all}, kl_coef=0.1, folder=disk)
    assert engine.reference is not None
    seen: dict[str, list[bool]] = {}

    def look(name: str) -> Any:
        return lambda *_: seen.update({f"{name} while it {what}": away(engine, part) for what, part in PARTS.items()})

    PARTS = {"learns": "optimizer", "compares": "reference"}
    engine.learner.update(make_batch(engine), ["push"])
    engine.policy.actor.register_forward_hook(look("policy"))
    engine.reference.weights.actor.register_forward_hook(look("reference"))
    engine.learner.update(make_batch(engine), ["push"])
    assert not any(seen["policy while it learns"]) and all(seen["policy while it compares"])
    assert not any(seen["reference while it compares"])
    assert all(away(engine, "optimizer")) and all(away(engine, "reference"))
    assert len(away(engine, "optimizer")) >= 8 and len(away(engine, "reference")) >= 4
    assert all(parameter.grad is None for parameter in engine.policy.parameters())


def test_full_precision_copies_of_the_weights_leave_too(disk: Path) -> None:
    def learned(setting: Offload) -> HybridEngine:
        optimizer = OptimizerConfig(lr=0.01, master_weights=True)
        engine = make_engine(
            policy=make_policy().bfloat16(), optimizer=optimizer, engine={"offload": setting}, folder=disk
        )
        for _ in range(2):
            engine.learner.update(make_batch(engine), ["push"])
        return engine

    plain, moved = learned(Offload.none), learned(Offload.optimizer)
    assert torch.equal(weights(plain), weights(moved)) and weights(moved).dtype is torch.bfloat16
    large = [copy for copy in moved.optimizer.stepped if copy.numel() > 1]
    memory = moved.offload._parts["optimizer"]._memory
    assert memory is not None and len(large) >= 6 and all(memory.holds(copy) for copy in large)


def test_the_objects_stay_the_same(disk: Path) -> None:
    engine = make_engine(engine={"offload": Offload.all}, kl_coef=0.1, folder=disk)
    assert engine.reference is not None

    def objects() -> list[int]:
        assert engine.reference is not None
        held = [*engine.policy.parameters(), *engine.reference.weights.parameters()]
        return [id(tensor) for tensor in [*held, *optimizer_tensors(engine.optimizer.inner, set())]]

    engine.learner.update(make_batch(engine), ["push"])
    before = objects()
    with engine.train_mode():
        assert objects() == before
    engine.learner.update(make_batch(engine), ["push"])
    assert objects() == before


@pytest.mark.faults
def test_the_memory_of_the_process_falls(disk: Path) -> None:
    """In a process of its own: libraries that other tests have loaded give memory back at moments of their own."""
    code = f"import pathlib, {Path(__file__).stem} as tests; tests.learn_with_all_away(pathlib.Path({str(disk)!r}))"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(programs.__file__).parent)])
    programs.run(["-c", code], env={**os.environ, "PYTHONPATH": path}, stderr=None, check=True)


def learn_with_all_away(folder: Path) -> None:
    """75 MiB of optimiser state and 37 MiB of reference policy; the C library keeps a little."""
    engine = make_engine(
        policy=make_policy(hidden_sizes=[2200, 2200]),
        engine={"offload": Offload.all},
        kl_coef=0.1,
        folder=folder,
        epochs=1,
        minibatches=1,
    )
    size = sum(parameter.numel() * 4 for parameter in engine.policy.parameters()) / MIB
    assert engine.offload.metrics()["memory/reference_freed_mib"] > 0.9 * size
    engine.learner.update(make_batch(engine), ["push"])
    acting = rss()
    with engine.train_mode():
        learning = rss()
    assert learning - acting > 0.9 * 2 * size and rss() - acting < 0.2 * size, (acting, learning, rss())
    freed = engine.offload.metrics()
    assert freed["memory/optimizer_freed_mib"] > 0.9 * 2 * size and freed["memory/reference_freed_mib"] > 0.9 * size


def learn_in_shards(line: Connection, rank: int, folder: Path, setting: Offload) -> list[bytes]:
    """A rank's part of the weights after two updates, a checkpoint and another update."""
    place = RankInfo(rank=rank, size=2, meeting=str(folder / f"meeting-{setting}"))
    with connected(place, CPU, 60.0, lambda _: None) as ranks:
        settings = {"offload": setting, "parallel": ParallelConfig(backend=ParallelBackend.fsdp)}
        engine = make_engine(engine=settings, kl_coef=0.1, folder=folder, ranks=ranks)
        for _ in range(2):
            engine.learner.update(make_batch(engine), ["push"])
        kept = state(engine)
        if setting is not Offload.none:
            assert all(away(engine, "optimizer")) and len(away(engine, "optimizer")) >= 8
            assert list(engine.offload._parts) == ["optimizer"], "FSDP keeps the memory of what it shards"
        if ranks.is_first:
            torch.save(kept, folder / f"state-{setting}")
        ranks.barrier()
        engine.load_state_dict(torch.load(folder / f"state-{setting}", weights_only=True))
        engine.learner.update(make_batch(engine), ["push"])
        return [parameter.to_local().detach().numpy().tobytes() for parameter in engine.policy.parameters()]


def test_shards_leave_and_come_back_on_every_rank(disk: Path) -> None:
    learned = {}
    for setting in (Offload.none, Offload.all):
        with peers(*((learn_in_shards, rank, disk, setting) for rank in range(2))) as ranks:
            learned[setting] = [rank.get() for rank in ranks]
    assert learned[Offload.none] == learned[Offload.all]
    first, second = learned[Offload.none]
    assert all(isinstance(part, bytes) for part in first) and first != second, first


def test_a_tensor_that_numpy_has_seen_can_leave(disk: Path) -> None:
    module = nn.Linear(64, 64)
    seen = module.weight.detach().numpy()
    before = seen.copy()
    part = Offloaded(lambda: module.parameters(), device=CPU, folder=disk)
    part.offload()
    part.offload()
    assert (module.weight.detach().numpy() == before).all()
    part.onload()
    module.weight.detach().add_(1.0)
    part.offload()
    assert (module.weight.detach().numpy() == before + 1.0).all()


def test_layouts_and_types_are_kept_and_other_tensors_get_other_places(disk: Path) -> None:
    tensors = [
        torch.randn(3, 5, 7).transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(33, dtype=torch.bfloat16),
        torch.arange(7, dtype=torch.uint8),
    ]
    copies, layouts = [each.clone() for each in tensors], [each.stride() for each in tensors]
    part = Offloaded(lambda: tensors, device=CPU, folder=disk)
    for _ in range(2):
        part.offload()
        part.onload()
        assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))
        assert [each.stride() for each in tensors] == layouts
    part.offload()
    tensors.append(torch.ones(5))
    copies.append(torch.ones(5))
    part.offload()
    assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))
    part.onload()
    tensors[0].zero_()
    copies[0].zero_()
    part.offload()
    assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))


@pytest.mark.faults
def test_a_disk_without_room_is_named_before_anything_moves(disk: Path) -> None:
    """Here a limit on the size of files stands for the end of the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    weight = torch.randn(MIB)
    before, part = weight.data_ptr(), Offloaded(lambda: [weight], device=CPU, folder=disk)
    try:
        with pytest.raises(RunError, match=rf"engine\.offload needs 4 MiB on the disk of {disk}: File too large"):
            part.offload()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert weight.data_ptr() == before
    part.offload()
    assert weight.data_ptr() != before


def test_what_is_too_large_for_the_disk_takes_nothing_of_it(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("others have no room meanwhile"))
    room = os.statvfs(disk)
    with pytest.raises(RunError, match=r"on the disk of .*: No space left on device"):
        FileMemory(2 * room.f_bavail * room.f_frsize, disk)


def test_a_folder_in_memory_is_refused() -> None:
    folder = Path("/dev/shm")
    if not any(each.mountpoint == str(folder) and each.fstype == "tmpfs" for each in psutil.disk_partitions(all=True)):
        pytest.skip("no file system in memory here")
    with pytest.raises(UserError, match=r"which is itself kept in memory: choose a run\.dir on a disk"):
        FileMemory(MIB, folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_memory_of_the_gpu_falls_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    device = torch.device("cuda")
    tensors = [torch.randn(64 * MIB // 4, device=device) for _ in range(4)]
    copies = [each.cpu() for each in tensors]
    part = Offloaded(lambda: tensors, device=device, folder=tmp_path)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        part.offload()
        assert part.freed == 256 * MIB and before - torch.cuda.memory_reserved() == 256 * MIB
        assert all(each.device.type == "cpu" and each.is_pinned() for each in tensors)
        part.onload()
        assert all(each.is_cuda for each in tensors)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors, copies, strict=True))
