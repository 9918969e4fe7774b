"""The clients that robots and benchmarks have, as their projects publish them, each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

import embodyrl

STATES = [[0.1 * number, 0.5 - 0.1 * number, 0.3 * number] for number in range(5)]
OPENPI = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="secret")
assert policy.get_server_metadata()["chunk_size"] == 3
states = [np.array(state, np.float32) for state in json.loads(sys.argv[2])]
print(json.dumps([policy.infer({"observation/state": state, "prompt": "go"})["actions"].tolist() for state in states]))
"""
VLA_EVAL = """
import asyncio, json, sys
import numpy as np
from vla_eval.connection import Connection

async def play():
    async with Connection(f"ws://127.0.0.1:{sys.argv[1]}") as connection:
        found = []
        for state in json.loads(sys.argv[2]):
            await connection.start_episode({"task": {"name": "swing up"}})
            observation = {"states": np.array(state, np.float32), "task_description": "go"}
            found.append([(await connection.act(observation))["actions"].tolist() for _ in range(3)])
            await connection.end_episode({"success": False})
        print(json.dumps(found))

asyncio.run(play())
"""


def environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--retries", "0", *packages], capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        pytest.skip(f"cannot install {' '.join(packages)} here: {(done.stderr.splitlines() or ['?'])[-1]}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "program", "packages"),
    [
        ("openpi", OPENPI, ("openpi-client==0.1.2", "numpy<2", "typing_extensions")),
        ("vla-eval", VLA_EVAL, ("vla-eval==0.8.0",)),
    ],
)
def test_published_clients_get_what_the_policy_does_bit_for_bit(
    protocol: str,
    program: str,
    packages: tuple[str, ...],
    server: Callable[..., embodyrl.PolicyServer],
    policy: embodyrl.LoadedPolicy,
    tmp_path: Path,
) -> None:
    if sys.version_info >= (3, 13) and protocol == "openpi":
        pytest.skip("openpi-client needs numpy < 2, which this Python has no build of")
    python = environment(tmp_path / "environment", *packages)
    there = server(protocol=protocol, token="secret" if protocol == "openpi" else None)
    command = [python, "-c", program, str(there.port), json.dumps(STATES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for found, state in zip(json.loads(done.stdout), STATES, strict=True):
        proprio = np.array([state], np.float32)
        wanted = policy.act(embodyrl.Observation(proprio=proprio, task_descriptions=["go"]))[0]
        assert np.array_equal(np.array(found, np.float32), wanted)
