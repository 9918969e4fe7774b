"""A Ray cluster of two machines on this one: two raylets at addresses of the loopback device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
ADDRESS = f"{HEAD}:6399"
LABELS = {HEAD: "a", OTHER: "b"}
_PORTS = {HEAD: (20000, 20200), OTHER: (21000, 21200)}
_ATTEMPTS = 3
_COMMON = ["--num-cpus=4", "--object-store-memory=80000000", "--disable-usage-stats"]


class Raylets:
    """Both machines. `close` ends them by process id and leaves nothing."""

    def __init__(self) -> None:
        # Short, because a socket's path has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
        self._before = {process.pid for process in psutil.process_iter()}
        try:
            self._start(
                HEAD,
                *("--head", f"--node-ip-address={HEAD}", f"--port={ADDRESS.rpartition(':')[2]}"),
                *("--include-dashboard=false", f"--temp-dir={self.folder}"),
            )
            self.add_other()
        except BaseException:
            self.close()
            raise

    def _start(self, host: str, *arguments: str) -> None:
        low, high = _PORTS[host]
        ports = [f"--min-worker-port={low}", f"--max-worker-port={high}", f"--labels=embodyrl={LABELS[host]}"]
        # Its shared memory in our folder: in /dev/shm nobody could tell it from that of another cluster.
        ports.append(f"--plasma-directory={self.folder}")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *ports, *_COMMON]
        # Ray gives its workers a niceness of 15: beside other tests they would hardly ever be computed.
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        # Ray gives a node half a minute to start, which a machine that is busy with other tests may exceed.
        for attempt in range(_ATTEMPTS):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd="/tmp")
            if done.returncode == 0:
                return
            assert attempt < _ATTEMPTS - 1, done.stdout + done.stderr
            self._end(host)

    def add_other(self, *, gpus: int = 0) -> None:
        """Start the second machine."""
        self._start(OTHER, f"--address={ADDRESS}", f"--node-ip-address={OTHER}", f"--num-gpus={gpus}")

    def raylet(self, host: str) -> psutil.Process:
        """Return the process that makes a machine part of the cluster."""
        [found] = [
            process
            for process in self._own()
            if process.name() == "raylet" and f"--node_ip_address={host}" in process.cmdline()
        ]
        return found

    def kill_other(self) -> float:
        """Take the second machine away; returns `time.monotonic()` of that moment."""
        raylet = self.raylet(OTHER)
        rest = raylet.children(recursive=True)
        raylet.kill()
        moment = time.monotonic()
        psutil.wait_procs([raylet, *rest], timeout=60)
        return moment

    def _end(self, host: str) -> None:
        """End what an attempt to start a machine has left."""
        left = [each for each in self._own() if f"={host}" in " ".join(each.cmdline())]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=60)

    def _own(self) -> list[psutil.Process]:
        """Return the processes of the cluster."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                is_one = str(self.folder) in " ".join(words)
                # Its server of clients does not name the folder; another network may have the same address.
                is_one = is_one or (f"--address={ADDRESS}" in words and _is_in_this_network(process.pid))
                if process.pid not in self._before and is_one:
                    found.append(process)
            except (psutil.NoSuchProcess, FileNotFoundError, PermissionError):
                continue
        return found

    def close(self) -> None:
        """End everything."""
        while own := self._own():
            for process in own:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(own, timeout=60)
        shutil.rmtree(self.folder)


def _is_in_this_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")


def of_runs() -> list[psutil.Process]:
    """Return the actors and the processes of runs in this network; those of other tests are in another one."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            is_one = "embodyrl.placement.child" in words or words.startswith("ray::WatchedRayActor")
            if is_one and _is_in_this_network(process.pid):
                found.append(process)
        except (psutil.NoSuchProcess, FileNotFoundError, PermissionError):
            continue
    return found


def left_over() -> list[psutil.Process]:
    """Return those that are left a moment after the end of a run."""
    deadline = time.monotonic() + 240
    while (found := of_runs()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
