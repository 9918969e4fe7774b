"""Simulators behind queues of tensors, as some stacks for embodied RL run them; for `transport.py`.

Reproduces the design, not any code: one process per group of environments and a pair of
torch.multiprocessing queues. A command is a dictionary with a method and its arguments, the answer one with a status
and data, and observations are torch tensors, which travel by handing file descriptors over and are cloned on receipt so
that the caller owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.multiprocessing as mp

_TIMEOUT_S = 60.0


class Group:
    """Environments that one process steps one after the other."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], count: int) -> None:
        """Build `count` environments."""
        self.envs = [make() for _ in range(count)]

    def reset(self) -> dict[str, Any]:
        """First observations of all environments."""
        return _observations([env.reset()[0] for env in self.envs])

    def step(self, actions: torch.Tensor) -> dict[str, Any]:
        """One step of all environments, `actions [n, D]`."""
        rows = [env.step(action.numpy()) for env, action in zip(self.envs, actions, strict=True)]
        return {
            "observations": _observations([row[0] for row in rows]),
            "rewards": torch.tensor([float(row[1]) for row in rows]),
            "terminated": torch.tensor([row[2] for row in rows]),
            "truncated": torch.tensor([row[3] for row in rows]),
            "infos": {"success": torch.tensor([False for _ in rows])},
        }


class QueueManager:
    """Runs groups in processes of their own."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int, processes: int) -> None:
        """Start `processes`, which share `num_envs` environments evenly."""
        context = mp.get_context("spawn")
        self._share = num_envs // processes
        self._queues = [(context.Queue(), context.Queue()) for _ in range(processes)]
        self.processes = [
            context.Process(target=_serve, args=(commands, results, make, self._share), daemon=True)
            for commands, results in self._queues
        ]
        for process in self.processes:
            process.start()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Call a method of every group; what it returned is the caller's own."""
        for (commands, _), args in zip(self._queues, arguments, strict=True):
            commands.put({"method": method, "args": args})
        answers = [results.get(timeout=_TIMEOUT_S) for _, results in self._queues]
        return [_cloned(answer["data"]) for answer in answers]

    def reset(self) -> list[dict[str, Any]]:
        """First observations, by group."""
        return self.call("reset", [()] * len(self._queues))

    def step(self, actions: torch.Tensor) -> list[dict[str, Any]]:
        """One step of all environments, `actions [B, D]`; results by group."""
        return self.call("step", [(part,) for part in actions.split(self._share)])

    def close(self) -> None:
        """End the processes."""
        for commands, _ in self._queues:
            commands.put(None)
        for process in self.processes:
            process.join(10.0)


def _serve(commands: Any, results: Any, make: Callable[[], gymnasium.Env[Any, Any]], count: int) -> None:
    torch.set_num_threads(1)
    group = Group(make, count)
    while (command := commands.get()) is not None:
        results.put({"status": "success", "data": getattr(group, command["method"])(*command["args"])})


def _observations(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def _cloned(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.clone()
    if isinstance(data, dict):
        return {name: _cloned(value) for name, value in data.items()}
    return data
