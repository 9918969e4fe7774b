"""Runs on a Ray cluster of two machines, which are two raylets in a network of their own.

A network namespace keeps them from any other cluster, and others from them. What is tested is in `inside`: each file in
a network of its own, so that they run side by side.
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'embodyrl[ray]'")
@pytest.mark.parametrize("file", sorted(path.name for path in INSIDE.glob("test_*.py")))
def test_what_is_inside(file: str) -> None:
    if subprocess.run([*IN_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("NO NETWORK NAMESPACE can be made here, so nothing about clusters is tested")
    pytest_words = ["-m", "pytest", "-n", "0", "--durations=10", str(INSIDE / file)]
    command = [sys.executable, str(INSIDE / "network.py"), *pytest_words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    done = subprocess.run(
        [*IN_NETWORK, *command],
        env=environment | {"EMBODYRL_IN_NETWORK": "1"},
        cwd=INSIDE.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert re.search(r"\b[1-9]\d* passed", done.stdout)
