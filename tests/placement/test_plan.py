import os
from dataclasses import replace
from itertools import chain

import pytest
from fake_machine import make_machine
from hypothesis import given
from hypothesis import strategies as st

from embodyrl.config.schema import Device, EnvConfig, Numa, StartMethod
from embodyrl.errors import UserError
from embodyrl.placement.plan import (
    Inventory,
    binds,
    describe_binding,
    inventory,
    largest_divisor,
    plan_env_workers,
    policy_gpu,
)
from embodyrl.placement.topology import Gpu, Node
from embodyrl.registry import SIMULATORS


def settings(num_envs, workers="auto", **options):
    return EnvConfig(name="gymnasium", tasks=["Pendulum-v1"], num_envs=num_envs, workers=workers, **options)


@st.composite
def machines(draw):
    """Up to four nodes, some without memory, some without a CPU that may be used; often none at all."""
    counts = draw(st.lists(st.integers(0, 16), max_size=4))
    nodes, first = [], 3
    for number, count in enumerate(counts):
        nodes.append(Node(id=2 * number, cpus=tuple(range(first, first + count)), memory=draw(st.booleans())))
        first += count
    cpus = tuple(cpu for node in nodes for cpu in node.cpus) or tuple(range(draw(st.integers(1, 8))))
    gpus = [Gpu(index=0, address="0000:3b:00.0", uuid="", node=draw(st.sampled_from([None, 0, 2, 4, 6, 8])))]
    return Inventory(
        cpus=cpus,
        cores=draw(st.integers(1, len(cpus))),
        nodes=tuple(nodes),
        gpus=tuple(gpus if draw(st.booleans()) else []),
    )


def near_of(machine):
    return policy_gpu(Device.auto, machine)


@given(num_envs=st.integers(1, 300), machine=machines())
def test_auto_serves_every_slot_once_within_the_cores(num_envs, machine):
    plan = plan_env_workers(settings(num_envs), machine, near_of(machine))
    assert list(chain(*(spec.slots for spec in plan))) == list(range(num_envs))
    assert [spec.rank for spec in plan] == list(range(len(plan)))
    assert len(plan) <= machine.cores
    better = [count for count in range(len(plan) + 1, machine.cores + 1) if num_envs % count == 0]
    assert not better


@given(workers=st.integers(1, 40), share=st.integers(1, 40), machine=machines())
def test_a_given_number_of_workers_shares_evenly(workers, share, machine):
    plan = plan_env_workers(settings(workers * share, workers), machine, near_of(machine))
    assert [len(spec.slots) for spec in plan] == [share] * workers
    assert list(chain(*(spec.slots for spec in plan))) == list(range(workers * share))


@given(workers=st.integers(1, 64), machine=machines(), numa=st.sampled_from(Numa))
def test_every_worker_runs_on_allowed_cpus_of_one_node(workers, machine, numa):
    plan = plan_env_workers(settings(workers, workers, numa=numa), machine, near_of(machine))
    nodes = {node.id: node for node in machine.nodes}
    for spec in plan:
        assert spec.cpus and set(spec.cpus) <= set(machine.cpus)
        if not binds(numa, machine):
            own = numa is Numa.auto and len(machine.nodes) < 2 and workers == len(machine.cpus)
            cpus = (machine.cpus[spec.rank],) if own else machine.cpus
            assert (spec.numa_node, spec.memory_node, spec.cpus) == (None, None, cpus)
        else:
            assert spec.cpus == nodes[spec.numa_node].cpus
            assert spec.memory_node == (spec.numa_node if nodes[spec.numa_node].memory else None)


@given(workers=st.integers(1, 64), machine=machines())
def test_nodes_are_loaded_by_their_cpus(workers, machine):
    plan = plan_env_workers(settings(workers, workers), machine)
    if not binds(Numa.auto, machine):
        return
    homes = [spec.numa_node for spec in plan]
    assert homes == sorted(homes)  # neighbours share a node
    load = {node.id: homes.count(node.id) for node in machine.usable_nodes}
    for one in machine.usable_nodes:
        for other in machine.usable_nodes:  # no worker would have more CPUs to itself on another node
            assert load[one.id] == 0 or len(one.cpus) / load[one.id] >= len(other.cpus) / (load[other.id] + 1)


@given(workers=st.integers(1, 64), machine=machines())
def test_workers_that_fit_run_beside_the_gpu(workers, machine):
    near = near_of(machine)
    plan = plan_env_workers(settings(workers, workers), machine, near)
    home = [node for node in machine.usable_nodes if near is not None and node.id == near.node]
    if binds(Numa.auto, machine) and home and workers <= len(home[0].cpus):
        assert {spec.numa_node for spec in plan} == {near.node}
    else:
        assert plan == plan_env_workers(settings(workers, workers), machine)


@given(num_envs=st.integers(1, 200), workers=st.integers(-3, 300), machine=machines())
def test_an_uneven_share_is_refused(num_envs, workers, machine):
    if workers >= 1 and num_envs % workers == 0:
        return
    with pytest.raises(UserError, match="must be a multiple of workers"):
        plan_env_workers(settings(num_envs, workers), machine)


def test_the_remedy_names_a_number_that_works():
    with pytest.raises(UserError, match=r"num_envs \(12\) must be a multiple of workers, got 5: use 4"):
        plan_env_workers(settings(12, 5), inventory())


def test_no_slots():
    with pytest.raises(UserError, match="at least 1"):
        plan_env_workers(settings(0), inventory())


def test_workers_do_not_start_threads():
    (spec,) = plan_env_workers(settings(1, 1), inventory())
    assert spec.env_vars["OMP_NUM_THREADS"] == "1"
    assert spec.label == "env worker 0"


@pytest.mark.parametrize(
    ("method", "declared", "preload"),
    [
        (StartMethod.auto, ("a",), ("a",)),
        (StartMethod.auto, None, None),
        (StartMethod.fork, ("a",), ("a",)),
        (StartMethod.fork, None, ()),
        (StartMethod.spawn, ("a",), None),
    ],
)
def test_how_workers_start(method, declared, preload, monkeypatch):
    entry = SIMULATORS.entry("gymnasium")
    monkeypatch.setitem(SIMULATORS._entries, "gymnasium", replace(entry, preload=declared))
    plan = plan_env_workers(settings(2, start_method=method), inventory())
    assert {spec.preload for spec in plan} == {preload}


@given(number=st.integers(1, 1000), limit=st.integers(1, 1000))
def test_largest_divisor(number, limit):
    divisor = largest_divisor(number, limit)
    assert divisor == max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def test_inventory_is_what_this_process_may_use():
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[:1])
    try:
        machine = inventory()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (machine.cpus, machine.cores) == ((allowed[0],), 1)
    assert [cpu for node in machine.nodes for cpu in node.cpus] in ([], allowed[:1])


# ---- whole machines


def plan_on(tree, num_envs, workers="auto", *, cpus, numa=Numa.auto, device=Device.auto):
    machine = inventory(tree, cpus)
    near = policy_gpu(device, machine)
    plan = plan_env_workers(settings(num_envs, workers, numa=numa), machine, near)
    return [(spec.numa_node, spec.cpus, spec.memory_node) for spec in plan], describe_binding(numa, machine, plan, near)


def test_one_node_is_left_alone_and_says_so(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {0: "0-3"}), 2, cpus=range(4))
    assert plan == [(None, (0, 1, 2, 3), None)] * 2
    assert said == "one NUMA node: nothing to bind processes to"


def test_a_kernel_without_numa_is_left_alone(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {}), 2, cpus=range(3))
    assert plan == [(None, (0, 1, 2), None)] * 2
    assert said == "no NUMA nodes shown: nothing to bind processes to"


def test_as_many_processes_as_cpus_of_one_node_get_one_each(tmp_path):
    tree = make_machine(tmp_path, {0: "0-3"})
    plan, said = plan_on(tree, 3, cpus=[0, 2, 3])
    assert plan == [(None, (0,), None), (None, (2,), None), (None, (3,), None)]
    assert said == "one NUMA node: each process has a CPU of its own"
    assert plan_on(tree, 3, cpus=[0, 2, 3], numa=Numa.off)[0] == [(None, (0, 2, 3), None)] * 3


def test_two_nodes_share_the_workers(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {0: "0-1", 1: "2-3"}), 8, cpus=range(4))
    assert plan == [(0, (0, 1), 0)] * 2 + [(1, (2, 3), 1)] * 2
    assert said == "processes are bound to NUMA nodes 0-1"


def test_numa_off(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {0: "0-1", 1: "2-3"}), 4, cpus=range(4), numa=Numa.off)
    assert plan == [(None, (0, 1, 2, 3), None)] * 4
    assert "env.numa is off" in said


def test_four_nodes_and_memory_that_the_cpuset_denies(tmp_path):
    tree = make_machine(tmp_path, {0: "0", 1: "1", 2: "2", 3: "3"}, mems_allowed="0-2")
    plan, _ = plan_on(tree, 4, cpus=range(4))
    assert plan == [(0, (0,), 0), (1, (1,), 1), (2, (2,), 2), (3, (3,), None)]


def test_a_node_of_memory_alone_gets_no_worker(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {0: "0-1", 1: ""}), 2, cpus=range(2))
    assert plan == [(0, (0, 1), 0)] * 2
    assert said == "processes are bound to NUMA node 0"


def test_a_restricted_set_of_cpus(tmp_path):
    plan, _ = plan_on(make_machine(tmp_path, {0: "0-3", 1: "4-7"}), 4, cpus=[3, 4, 5, 6])
    assert plan == [(0, (3,), 0)] + [(1, (4, 5, 6), 1)] * 3


def test_cpus_of_no_node_bind_nothing_and_warn(tmp_path):
    plan, said = plan_on(make_machine(tmp_path, {0: "0-3", 1: "4-7"}), 2, cpus=[8, 9])
    assert plan == [(None, (8, 9), None)] * 2
    assert said.startswith("warning: none of the allowed CPUs 8-9 belongs to a NUMA node")


def test_beside_the_gpu_while_there_is_room(tmp_path):
    tree = make_machine(tmp_path, {0: "0-3", 1: "4-7"}, gpus={"0001:C1:00.0": 1})
    plan, said = plan_on(tree, 4, 4, cpus=range(8))
    assert plan == [(1, (4, 5, 6, 7), 1)] * 4
    assert said == "processes are bound to NUMA node 1, the GPU's"
    plan, said = plan_on(tree, 8, 8, cpus=range(8))
    assert [node for node, _, _ in plan] == [0] * 4 + [1] * 4
    assert said == "processes are bound to NUMA nodes 0-1 (the GPU's, 1, has not CPUs for all)"
    on_cpu, _ = plan_on(tree, 4, 4, cpus=range(8), device=Device.cpu)
    assert [node for node, _, _ in on_cpu] == [0, 0, 1, 1]


def test_a_gpu_whose_node_may_not_be_used_is_a_warning(tmp_path):
    tree = make_machine(tmp_path, {0: "0-3", 1: "4-7"}, gpus={"0000:c1:00.0": 1})
    plan, said = plan_on(tree, 2, cpus=range(4))
    assert [node for node, _, _ in plan] == [0, 0]
    assert said.startswith("warning: the GPU's NUMA node 1 has no allowed CPU; processes are bound to NUMA node 0")
