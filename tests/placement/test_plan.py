import os
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory, cpu_limit, inventory, largest_divisor, plan_env_workers

machines = st.integers(1, 64).flatmap(
    lambda cpus: st.builds(
        lambda cores: Inventory(cpus=tuple(range(3, 3 + cpus)), cores=cores), cores=st.integers(1, cpus)
    )
)


@given(num_envs=st.integers(1, 500), machine=machines)
def test_auto_serves_every_slot_once_within_the_cores(num_envs, machine):
    plan = plan_env_workers(num_envs, "auto", machine)
    assert list(chain(*(spec.slots for spec in plan))) == list(range(num_envs))
    assert [spec.rank for spec in plan] == list(range(len(plan)))
    assert len(plan) <= machine.cores
    assert all(set(spec.cpus) <= set(machine.cpus) for spec in plan)
    better = [count for count in range(len(plan) + 1, machine.cores + 1) if num_envs % count == 0]
    assert not better


@given(workers=st.integers(1, 40), share=st.integers(1, 40), machine=machines)
def test_a_given_number_of_workers_shares_evenly(workers, share, machine):
    plan = plan_env_workers(workers * share, workers, machine)
    assert [len(spec.slots) for spec in plan] == [share] * workers
    assert list(chain(*(spec.slots for spec in plan))) == list(range(workers * share))


@given(num_envs=st.integers(1, 200), workers=st.integers(-3, 300), machine=machines)
def test_an_uneven_share_is_refused(num_envs, workers, machine):
    if workers >= 1 and num_envs % workers == 0:
        return
    with pytest.raises(UserError, match="must be a multiple of workers"):
        plan_env_workers(num_envs, workers, machine)


def test_the_remedy_names_a_number_that_works():
    with pytest.raises(UserError, match=r"num_envs \(12\) must be a multiple of workers, got 5: use 4"):
        plan_env_workers(12, 5, inventory())


def test_no_slots():
    with pytest.raises(UserError, match="at least 1"):
        plan_env_workers(0, "auto", inventory())


def test_workers_do_not_start_threads():
    (spec,) = plan_env_workers(1, 1, inventory())
    assert spec.env_vars["OMP_NUM_THREADS"] == "1"
    assert spec.label == "env worker 0"


@given(number=st.integers(1, 1000), limit=st.integers(1, 1000))
def test_largest_divisor(number, limit):
    divisor = largest_divisor(number, limit)
    assert divisor == max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def test_inventory_is_what_this_process_may_use():
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[:1])
    try:
        assert inventory() == Inventory(cpus=(allowed[0],), cores=1)
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("text", "limit"), [("max 100000", None), ("150000 100000", 2), ("5000 100000", 1), ("rubbish", None), (None, None)]
)
def test_the_containers_limit_of_cpu_time(tmp_path, text, limit):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text + "\n")
    assert cpu_limit(tmp_path) == limit
