"""Measure what a step costs when the simulators are behind a socket.

32 envs with one 224 x 224 image each, simulators without any cost of their own, one action per step. Contenders take
turns within one run, and medians are printed:

- EnvManager in this process;
- RemoteManager, whose SimulatorHost is another process of this machine, over loopback;
- the bytes alone: a process that answers a byte with as many bytes as the images have, over a plain socket.

Loopback shows what the software adds: a network of 10 Gbit/s adds 3.9 ms for the 4.8 MB.

    python benchmarks/remote_step.py [--rounds 21] [--steps 20] [--json benchmarks/results/remote_step.json]
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

sys.path.append(str(Path(__file__).parent))

from zero_cost_simulator import ACTION, SIZE, ZeroCostConfig

from embodyrl.envs.manager import EnvManager, Simulators
from embodyrl.envs.manager.host import SimulatorHost
from embodyrl.envs.manager.remote import RemoteManager
from embodyrl.envs.types import EpisodeSpec
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec

HERE = str(Path(__file__).parent)
ENVS = 32
BYTES = ENVS * SIZE * SIZE * 3
HOST = "127.0.0.3"
LOCAL, REMOTE, RAW = "EnvManager", "RemoteManager", "plain socket"
TARGET_MS = 5.0
"""Most that a remote step may take longer than a local one [ms]."""

Step = Callable[[], object]


def stepping(manager: Simulators) -> Step:
    """Return a step of all envs."""
    slots = list(range(ENVS))
    episodes = [EpisodeSpec(task="nothing", start_state=0, seed=0)] * ENVS
    manager.reset(slots, episodes)
    actions = np.zeros((ENVS, 1, ACTION), np.float32)
    return lambda: manager.step(slots, actions, episodes)


@contextmanager
def remote(config: ZeroCostConfig) -> Iterator[RemoteManager]:
    """Start a host and open its simulators."""
    options: dict[str, Any] = {"chunk_size": 1, "plugins": ["zero_cost_simulator"], "plugin_path": HERE}
    launcher = LocalLauncher(plugins=["zero_cost_simulator"], plugin_path=HERE)
    try:
        factory = functools.partial(SimulatorHost, patience_s=60.0, **options)
        [worker] = launcher.start(
            [WorkerSpec(role="simulators", rank=0)], factory, [(config, HOST)], timeout=config.startup_timeout_s
        )
        with RemoteManager(launcher.gather([worker.request("address")], timeout=10.0)[0]) as manager:
            yield manager
    finally:
        launcher.close()


def answer_with_bytes(server: socket.socket) -> None:
    """Answer every byte with as many as the images have."""
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = np.ones(BYTES, np.uint8)
    while connection.recv(1):
        connection.sendall(data.data)


@contextmanager
def plain_socket() -> Iterator[Step]:
    """Return a round trip of the bytes of the images, into memory that has been used before."""
    with socket.create_server((HOST, 0)) as server:
        process = multiprocessing.get_context("spawn").Process(target=answer_with_bytes, args=(server,), daemon=True)
        process.start()
        connection = socket.create_connection(server.getsockname())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(BYTES))

    def step() -> None:
        connection.sendall(b"?")
        received = 0
        while received < BYTES:
            received += connection.recv_into(memory[received:])

    yield step
    connection.close()
    process.join()


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the times of every contender's rounds, medians over their steps [ms]."""
    config = ZeroCostConfig(num_envs=ENVS, workers=2, cameras=["front"])
    with ExitStack() as stack:
        here = stack.enter_context(EnvManager(config, chunk_size=1, plugins=["zero_cost_simulator"], plugin_path=HERE))
        contenders = {
            LOCAL: stepping(here),
            REMOTE: stepping(stack.enter_context(remote(config))),
            RAW: stack.enter_context(plain_socket()),
        }
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name, step in contenders.items():
                times = []
                for _ in range(steps):
                    start = time.perf_counter()
                    step()
                    times.append(1e3 * (time.perf_counter() - start))
                if number:  # the first round warms up
                    taken[name].append(median(times))
    return taken


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="turns per contender")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians here, too")
    options = parser.parse_args()
    load = psutil.getloadavg()[0]
    taken = measure(options.rounds, options.steps)
    medians = {name: round(median(times), 2) for name, times in taken.items()}
    added = round(median(np.subtract(taken[REMOTE], taken[LOCAL]).tolist()), 2)
    print(f"load average at the start: {load:.1f}; {ENVS} envs, {BYTES / 1e6:.1f} MB of images in a step")
    for name, each in medians.items():
        print(f"{name:16}{each:8.2f} ms, rounds {min(taken[name]):.2f} .. {max(taken[name]):.2f}")
    print(f"a remote step takes {added:.2f} ms longer; the target is at most {TARGET_MS:g} ms")
    if options.json is not None:
        conditions = {"envs": ENVS, "bytes": BYTES, "rounds": options.rounds, "steps": options.steps}
        machine = {"cpus": psutil.cpu_count(), "load": round(load, 1)}
        found = {"median_ms": medians, "added_ms": added, "target_ms": TARGET_MS}
        options.json.write_text(json.dumps(conditions | machine | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
