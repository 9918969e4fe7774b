"""Every process of a run has its place, once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from fake_machine import make_machine
from hypothesis import given
from hypothesis import strategies as st

from embodyrl.config import load_config
from embodyrl.config.schema import Config, Device
from embodyrl.placement.plan import Inventory, WorkerSpec, inventory, plan_env_workers, policy_gpu
from embodyrl.placement.ranks import RankInfo, RanksError, blocks_of, idle_gpus, own_blocks, own_share
from embodyrl.placement.run_plan import Machine, Plan, plan_run
from embodyrl.placement.topology import Gpu

BASE = load_config("experiment/gym_pendulum").config


@pytest.fixture(scope="module", autouse=True)
def no_chosen_gpus() -> Iterator[None]:
    """Leave it to the machines of the tests which GPUs there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


def gpus(count: int, first: int = 0) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=number, address=f"0000:{first + number:02x}:00.0", uuid=f"GPU-{first + number}", node=None)
        for number in range(count)
    )


def inventory_of(cores: int, cards: int = 0, first: int = 0) -> Inventory:
    return Inventory(cpus=tuple(range(cores)), cores=cores, gpus=gpus(cards, first))


def settings(
    envs: int, workers: int, *, share_gpus: bool = False, blocks: int | str = "auto", device: Device = Device.auto
) -> Config:
    rollout = replace(BASE.placement.rollout, workers=workers, share_gpus=share_gpus)
    return replace(
        BASE,
        env=replace(BASE.env, num_envs=envs, workers="auto"),
        rollout=replace(BASE.rollout, blocks=blocks),
        engine=replace(BASE.engine, device=device),
        placement=replace(BASE.placement, rollout=rollout),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Config, list[Machine], int]:
    """A run, machines with enough GPUs, or none, and the number of ranks."""
    ranks, workers, many = draw(st.integers(1, 5)), draw(st.integers(0, 6)), draw(st.integers(1, 3))
    share, blocks = draw(st.booleans()), draw(st.integers(1, 3))
    rolling = workers or ranks
    config = settings(
        rolling * blocks * draw(st.integers(1, 6)),
        workers,
        share_gpus=share,
        blocks=draw(st.sampled_from(["auto", rolling * blocks])),
        device=draw(st.sampled_from([Device.auto, Device.cpu])),
    )
    wanted = draw(st.sampled_from([0, ranks if share else ranks + workers]))
    cards = [-(-wanted // many)] * many
    machines = [
        Machine(name=f"m{number}", inventory=inventory_of(draw(st.integers(1, 16)), count, sum(cards[:number])))
        for number, count in enumerate(cards)
    ]
    return config, machines, ranks


def all_of(plan: Plan, role: str, field: str) -> list[int]:
    return list(chain(*(getattr(spec, field) for spec in plan.role(role))))


@given(run=runs())
def test_each_slot_block_and_process_has_one_place(run: tuple[Config, list[Machine], int]) -> None:
    config, machines, ranks = run
    plan, workers = plan_run(config, machines, ranks), config.placement.rollout.workers
    assert plan == plan_run(config, machines, ranks)
    order = [(spec.role, spec.rank) for spec in plan.specs]
    computing = [*(("rank", number) for number in range(ranks)), *(("rollout", number) for number in range(workers))]
    assert order[: len(computing)] == computing
    assert order[len(computing) :] == [("env", number) for number in range(len(plan.role("env")))]
    for field, total in (("slots", config.env.num_envs), ("blocks", blocks_of(config, ranks))):
        assert list(chain(*(getattr(spec, field) for spec in plan.acting))) == list(range(total))
    assert all_of(plan, "env", "slots") == list(range(config.env.num_envs))
    assert not workers or all_of(plan, "rank", "slots") == all_of(plan, "rank", "blocks") == []
    for process in plan.acting:
        beside = plan.simulators_of(process)
        assert list(chain(*(spec.slots for spec in beside))) == list(process.slots)
        assert {spec.machine for spec in beside} == {process.machine}
        assert process.blocks == own_blocks(config, process.rank, len(plan.acting))


@given(run=runs())
def test_machines_are_filled_in_order_and_not_beyond_their_capacity(run: tuple[Config, list[Machine], int]) -> None:
    config, machines, ranks = run
    plan = plan_run(config, machines, ranks)
    computing = [*plan.role("rank"), *plan.role("rollout")]
    if not config.placement.rollout.share_gpus:
        assert [spec.machine for spec in computing] == sorted(spec.machine for spec in computing)
    for machine in machines:
        acting = [spec for spec in plan.acting if spec.machine == machine.name]
        here = [spec for spec in plan.role("env") if spec.machine == machine.name]
        assert len(here) <= max(machine.inventory.cores, len(acting))
        assert all(set(spec.gpus) <= set(machine.inventory.gpus) for spec in computing if spec.machine == machine.name)


@given(run=runs())
def test_no_gpu_has_two_processes_unless_it_is_shared(run: tuple[Config, list[Machine], int]) -> None:
    config, machines, ranks = run
    plan, rollout = plan_run(config, machines, ranks), config.placement.rollout
    cards = [gpu.uuid for machine in machines for gpu in machine.inventory.gpus]
    learning, rolling = ([gpu.uuid for spec in plan.role(role) for gpu in spec.gpus] for role in ("rank", "rollout"))
    if config.engine.device is Device.cpu or not cards:
        assert learning == rolling == [] and not any(spec.env_vars for spec in plan.acting)
    elif rollout.share_gpus:
        assert learning == cards[:ranks]
        assert rolling == [cards[number % ranks] for number in range(rollout.workers)]
    else:
        assert learning + rolling == cards[: ranks + rollout.workers]


@given(cores=st.integers(1, 16), cards=st.integers(0, 4), ranks=st.integers(1, 4), share=st.integers(1, 8))
def test_without_workers_it_is_what_each_rank_plans_for_itself(cores: int, cards: int, ranks: int, share: int) -> None:
    """A rank of several sees one GPU alone, see `use_own_gpu`."""
    config, machine = settings(ranks * share, 0), inventory_of(cores, cards and max(cards, ranks))
    planned = plan_run(config, [Machine(name="", inventory=machine)], ranks).role("env")
    expected: list[WorkerSpec] = []
    for rank in range(ranks):
        place = RankInfo(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
        seen = machine if ranks == 1 else replace(machine, gpus=machine.gpus[rank : rank + 1])
        for spec in plan_env_workers(own_share(config.env, place, seen), seen, policy_gpu(Device.auto, seen)):
            slots = range(rank * share + spec.slots.start, rank * share + spec.slots.stop)
            expected.append(replace(spec, rank=len(expected), slots=slots))
    assert planned == expected


def test_workers_share_the_cores_of_a_machine() -> None:
    config, machine = settings(32, 2), inventory_of(8)
    for worker in range(2):
        place = RankInfo(rank=worker, size=2, local_rank=worker, local_size=2)
        assert own_share(config.env, place, machine) == replace(config.env, num_envs=16, workers=4)
    assert len(plan_run(config, [Machine(inventory=machine)], 3).role("env")) == 8


def test_auto_is_a_block_for_each_process_that_rolls_out() -> None:
    assert [blocks_of(settings(12, workers), 3) for workers in (0, 1, 4)] == [3, 1, 4]
    assert blocks_of(settings(12, 2, blocks=12), 3) == 12


@pytest.mark.parametrize(
    ("workers", "share", "ranks", "cards", "chosen"),
    [
        (2, False, 1, 3, ["GPU-1", "GPU-2"]),
        (2, False, 2, 4, ["GPU-2", "GPU-3"]),
        (3, True, 2, 2, ["GPU-0", "GPU-1", "GPU-0"]),
        (2, True, 1, 8, ["GPU-0", "GPU-0"]),
    ],
)
def test_a_worker_is_shown_its_gpu(workers: int, share: bool, ranks: int, cards: int, chosen: list[str]) -> None:
    config, machine = settings(12, workers, share_gpus=share), inventory_of(4, cards)
    assert shown(config, ranks, machine) == [{"CUDA_VISIBLE_DEVICES": name} for name in chosen]
    on_cpu = settings(12, workers, share_gpus=share, device=Device.cpu)
    assert shown(on_cpu, ranks, machine) == [{}] * workers == shown(config, ranks, inventory_of(4))


def shown(config: Config, ranks: int, machine: Inventory) -> list[dict[str, str]]:
    """The environment variables of each rollout worker."""
    planned = plan_run(config, [Machine(inventory=machine)], ranks)
    return [dict(spec.env_vars) for spec in planned.role("rollout")]


def test_slices_of_a_gpu_and_gpus_that_only_the_driver_knows_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    machine = inventory(make_machine(tmp_path, {}, gpus={"0000:3B:00.0": None}), [0, 1])
    assert shown(settings(4, 2), 1, machine)[1] == {"CUDA_VISIBLE_DEVICES": "MIG-c"}
    with pytest.raises(RanksError, match="need 4 GPUs, but there are 3"):
        shown(settings(6, 3), 1, machine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = Inventory(cpus=(0,), cores=1, unlisted_gpus=True)
    assert shown(settings(4, 2), 1, driver)[1] == {"CUDA_VISIBLE_DEVICES": "2"}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("workers", "ranks", "cards", "message"),
    [
        (
            4,
            1,
            3,
            "1 rank and 4 rollout workers need 5 GPUs, but there are 3: set placement.rollout.share_gpus=true, "
            "placement.rollout.workers=2, or engine.device=cpu",
        ),
        (
            1,
            1,
            1,
            "1 rank and 1 rollout worker need 2 GPUs, but there is 1: set placement.rollout.share_gpus=true, "
            "placement.rollout.workers=0, or engine.device=cpu",
        ),
        (0, 2, 1, "2 ranks need a GPU each, but there is 1: start as many ranks as there are GPUs, or set "),
    ],
)
def test_too_few_gpus_are_reported_with_remedies(workers: int, ranks: int, cards: int, message: str) -> None:
    with pytest.raises(RanksError) as caught:
        plan_run(settings(8, workers), [Machine(inventory=inventory_of(4, cards))], ranks)
    assert str(caught.value).startswith(message)


def test_gpus_of_rollout_workers_are_not_idle() -> None:
    assert idle_gpus(settings(8, 1), 2, {}) is None
    assert idle_gpus(settings(8, 1), 4, {}) == (
        "2 of them would stay idle, because the run has 1 rank and 1 rollout worker",
        "set engine.parallel.world_size or placement.rollout.workers to more",
    )


def labelled(*labels: str, cards: int = 0) -> list[Machine]:
    return [
        Machine(
            name=f"m{number}",
            inventory=inventory_of(4, cards, number * cards),
            labels=(label,) if label else (),
            address=f"10.0.0.{number}",
        )
        for number, label in enumerate(labels)
    ]


def on_machines(
    config: Config, *, ranks: str | None = None, rollout: str | None = None, simulators: str | None
) -> Config:
    placement = config.placement
    return replace(
        config,
        placement=replace(
            placement,
            ranks=replace(placement.ranks, nodes=ranks),
            rollout=replace(placement.rollout, nodes=rollout),
            simulators=replace(placement.simulators, nodes=simulators),
        ),
    )


def where(plan: Plan, role: str) -> list[str]:
    return [spec.machine for spec in plan.role(role)]


def test_labels_say_which_machines_are_for_what() -> None:
    machines = labelled("train", "gpu", "gpu", "sim", "sim")
    plan = plan_run(on_machines(settings(8, 4), ranks="train", rollout="gpu", simulators="sim"), machines, 2)
    assert where(plan, "rank") == ["m0", "m0"] and where(plan, "rollout") == ["m1", "m1", "m2", "m2"]
    assert where(plan, "simulators") == ["m3", "m3", "m4", "m4"]
    assert {spec.machine for spec in plan.role("env")} == {"m3", "m4"}
    for number, process in enumerate(plan.role("rollout")):
        host = plan.role("simulators")[number]
        assert host.slots == process.slots and host.rank == process.rank
        assert {spec.machine for spec in plan.simulators_of(process)} == {host.machine}
    last = plan.role("rollout")[3]
    assert plan.place_of(last) == RankInfo(rank=3, size=4, local_rank=1, local_size=2, machine="m2", address="10.0.0.2")
    assert plan.is_spread


def test_machines_without_a_word_are_those_that_nobody_else_is_meant_for() -> None:
    machines = labelled("", "sim", "")
    plan = plan_run(on_machines(settings(4, 0), simulators="sim"), machines, 2)
    assert where(plan, "rank") == ["m0", "m2"] and set(where(plan, "env")) == {"m1"}
    plan = plan_run(on_machines(settings(4, 0), simulators=None), machines[:1], 1)
    assert not plan.is_spread and plan.place_of(plan.role("rank")[0]).address is None


def test_more_machines_for_simulators_than_hosts_stay_idle() -> None:
    plan = plan_run(on_machines(settings(4, 0), simulators="sim"), labelled("", "sim", "sim"), 1)
    assert where(plan, "simulators") == ["m1"]


@pytest.mark.parametrize(
    ("labels", "wanted", "message"),
    [
        (
            ("", "a"),
            {"simulators": "b"},
            r"no machine has the label 'b' of placement\.simulators\.nodes \(labels: m0: none",
        ),
        (
            ("a", "a"),
            {"simulators": "a"},
            "every machine is labelled for something else, and placement.ranks.nodes is null",
        ),
        (
            ("a", "b"),
            {"ranks": "b", "simulators": None},
            "the first rank is this process, on machine m0, but the ranks be",
        ),
    ],
)
def test_machines_that_are_missing_are_named(
    labels: tuple[str, ...], wanted: dict[str, str | None], message: str
) -> None:
    with pytest.raises(RanksError, match=message):
        plan_run(on_machines(settings(4, 0), **{"simulators": None, **wanted}), labelled(*labels), 1)


def test_gpus_of_machines_for_ranks_and_for_workers_are_counted_apart() -> None:
    machines = labelled("train", "gpu", cards=2)
    plan = plan_run(on_machines(settings(4, 2), ranks="train", rollout="gpu", simulators=None), machines, 2)
    assert [spec.env_vars["CUDA_VISIBLE_DEVICES"] for spec in plan.specs[:4]] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    with pytest.raises(RanksError, match=r"4 processes need a GPU each, .* \(placement\.rollout\.nodes\) have 2"):
        plan_run(on_machines(settings(4, 4), ranks="train", rollout="gpu", simulators=None), machines, 2)
