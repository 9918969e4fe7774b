"""Runs on a Ray cluster of two machines, which are two raylets in a network of their own.

A network namespace keeps them from any other cluster, and others from them. What is tested is in `inside`. Ray is none
of what `make test` installs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"
IN_NETWORK = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'embodyrl[ray]'"),
]


def run_inside(marked: str) -> None:
    """Run the tests with these marks, all with the same two machines."""
    if subprocess.run([*IN_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("NO NETWORK NAMESPACE can be made here, so nothing about clusters is tested")
    # The contract's last test leaves other machines.
    files = [str(INSIDE / name) for name in ("test_runs.py", "test_contract.py")]
    assert sorted(files) == sorted(map(str, INSIDE.glob("test_*.py")))
    command = [sys.executable, str(INSIDE / "network.py"), "-m", "pytest", "-n", "0", "--durations=10", "-m", marked]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    done = subprocess.run(
        [*IN_NETWORK, *command, *files],
        env=environment | {"EMBODYRL_IN_NETWORK": "1"},
        cwd=INSIDE.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1450,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert re.search(r"\b[1-9]\d* passed", done.stdout)


def test_what_is_inside() -> None:
    """It costs as much as forty other tests, most of it for processes that Ray starts and that import torch."""
    run_inside("not by_hand")


@pytest.mark.by_hand(reason="runs on clusters cost minutes, and each part of this has a smaller test in the other one")
def test_more_of_what_is_inside() -> None:
    run_inside("by_hand")
