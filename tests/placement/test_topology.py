"""What the kernel's files say about a machine, on trees of machines that are not there."""

import os

import pytest
from fake_machine import make_machine, write
from hypothesis import given
from hypothesis import strategies as st

from embodyrl.placement.topology import (
    ROOT,
    Gpu,
    Node,
    allowed_cpus,
    cpu_limit,
    format_ids,
    parse_ids,
    read_gpus,
    read_nodes,
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("\n", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("0-1,4-5\n", (0, 1, 4, 5)), ("5,1", (1, 5))],
)
def test_lists_of_ids(text, ids):
    assert parse_ids(text) == ids


@given(st.sets(st.integers(0, 300)))
def test_lists_of_ids_survive_the_round_trip(ids):
    assert parse_ids(format_ids(ids)) == tuple(sorted(ids))


def test_two_nodes(tmp_path):
    root = make_machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"})
    assert read_nodes(root, range(16)) == [
        Node(id=0, cpus=(0, 1, 2, 3, 8, 9, 10, 11), memory=True),
        Node(id=1, cpus=(4, 5, 6, 7, 12, 13, 14, 15), memory=True),
    ]


def test_a_node_of_memory_alone_and_one_without_memory(tmp_path):
    root = make_machine(tmp_path, {0: "0-1", 1: "", 2: "2-3"}, memory_gib={2: 0})
    cpus_and_memory = [(node.cpus, node.memory) for node in read_nodes(root, range(4))]
    assert cpus_and_memory == [((0, 1), True), ((), True), ((2, 3), False)]


def test_nodes_need_not_be_numbered_from_zero(tmp_path):
    root = make_machine(tmp_path, {0: "0-1", 8: "2-3"})
    assert [node.id for node in read_nodes(root, range(4))] == [0, 8]


def test_cpus_that_are_offline_or_not_allowed_do_not_count(tmp_path):
    root = make_machine(tmp_path, {0: "0-3", 1: "4-7"}, online_cpus="0-2,4-7")
    assert [node.cpus for node in read_nodes(root, {1, 2, 3, 4})] == [(1, 2), (4,)]


def test_memory_outside_the_cpuset_does_not_count(tmp_path):
    root = make_machine(tmp_path, {0: "0-3", 1: "4-7"}, mems_allowed="1")
    nodes = read_nodes(root, range(8))
    assert [node.memory for node in nodes] == [False, True]


def test_a_kernel_without_numa(tmp_path):
    root = make_machine(tmp_path, {})
    assert read_nodes(root, range(8)) == []


def test_gpus_keep_their_domain_and_read_in_lower_case(tmp_path):
    root = make_machine(tmp_path, {0: "0-3"}, gpus={"0001:C1:00.0": 1, "0000:3B:00.0": -1, "0000:5e:00.1": None})
    assert read_gpus(root, {}) == [
        Gpu(index=0, address="0000:3b:00.0", uuid="GPU-1abc", node=None),
        Gpu(index=1, address="0000:5e:00.1", uuid="GPU-2abc", node=None),
        Gpu(index=2, address="0001:c1:00.0", uuid="GPU-0abc", node=1),
    ]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1,0", [1, 0]),
        ("GPU-1", [1]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("NoDevFiles", []),
        ("GPU-", []),
        ("MIG-a", []),
    ],
)
def test_cuda_shows_only_some_gpus(tmp_path, visible, indices):
    root = make_machine(tmp_path, {0: "0-3"}, gpus={"0000:3b:00.0": 0, "0000:5e:00.0": 0})
    assert [gpu.index for gpu in read_gpus(root, {"CUDA_VISIBLE_DEVICES": visible})] == indices


def test_a_container_shows_only_some_gpus(tmp_path):
    root = make_machine(tmp_path, {0: "0-3"}, gpus={"0000:3b:00.0": 0, "0000:5e:00.0": 1})
    for number, address in enumerate(("0000:3b:00.0", "0000:5e:00.0")):
        write(root / "proc/driver/nvidia/gpus" / address / "information", f"Device Minor: \t {number}")
    write(root / "dev/nvidia1", "")
    assert [(gpu.index, gpu.node) for gpu in read_gpus(root, {})] == [(0, 1)]


def test_a_machine_without_nvidias_driver(tmp_path):
    root = make_machine(tmp_path, {0: "0-3"})
    assert read_gpus(root, {}) == []


def test_this_machine():
    nodes = read_nodes(ROOT, allowed_cpus())
    if nodes:
        assert {cpu for node in nodes for cpu in node.cpus} == os.sched_getaffinity(0)
        assert any(node.memory for node in nodes)


@pytest.mark.parametrize(
    ("text", "limit"), [("max 100000", None), ("150000 100000", 2), ("5000 100000", 1), ("rubbish", None), (None, None)]
)
def test_the_containers_limit_of_cpu_time(tmp_path, text, limit):
    if text is not None:
        write(tmp_path / "sys/fs/cgroup/cpu.max", text)
    assert cpu_limit(tmp_path) == limit
