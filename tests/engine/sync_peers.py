"""Processes that send and receive weights, for the tests of weight sync.

They are forked from a process that has imported torch and nothing else that starts threads, so that each costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from engines import make_batch, make_engine, make_policy
from numpy.typing import NDArray
from torch import nn

from embodyrl.engine.sync import SharedReceiver, SharedSender, SyncError, shared
from embodyrl.envs import Observation
from embodyrl.models import Policy, PolicyObservation

PATIENCE_S = 60.0
"""For whatever should take a moment."""
UPDATES = 3

Outcome = Any
"""What a process found, or the type and text of the error that it raised."""


class Peer:
    """A process that runs one function, and a line to it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "numpy", "tensordict"])
        self.line, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_run, args=(theirs, function, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def get(self) -> Any:
        """What the process says next."""
        assert self.line.poll(PATIENCE_S), "the process says nothing"
        return self.line.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.line.close()


@contextmanager
def peers(*calls: tuple[Any, ...]) -> Iterator[list[Peer]]:
    """Processes that run `(function, *arguments)`, killed in the end."""
    started: list[Peer] = []
    try:
        started += [Peer(*call) for call in calls]
        yield started
    finally:
        for each in started:
            each.end()


def _run(line: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        line.send(function(line, *arguments))
    except SyncError as error:
        line.send((type(error).__name__, str(error)))
    except BaseException:
        line.send(("crash", traceback.format_exc()))


def outcome(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """What a function returns, or the type and text of the error that it raises."""
    try:
        return function(*arguments)
    except SyncError as error:
        return type(error).__name__, str(error)


def decide(policy: Policy) -> NDArray[np.float32]:
    """What a policy does in fixed situations, with fixed noise: actions, log-probs and values in one vector."""
    seen = Observation(proprio=np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3), task_descriptions=["push"] * 8)
    with torch.inference_mode():
        out = policy.act(policy.preprocess(PolicyObservation.of(seen)), "train", torch.Generator().manual_seed(5))
    assert out.values is not None
    return torch.cat([out.actions.flatten(), out.logprobs.flatten(), out.values.flatten()]).numpy()


def other_policy() -> Policy:
    """A policy like the trainer's, with other weights."""
    policy = make_policy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    return policy


def share_training(line: Connection) -> Outcome:
    """Train, and offer every version; goes on to the next one when told."""
    engine = make_engine()
    sender = SharedSender(engine.policy, timeout_s=PATIENCE_S)
    line.send(sender.address)
    for version in range(UPDATES + 1):
        sender.send(version)
        line.send(decide(engine.policy))
        line.recv()
        engine.learner.update(make_batch(engine), ["push"])
    return "done"


def die_while_writing(line: Connection) -> Outcome:
    """Send version 0, and be killed while version 1 is half written."""
    policy = make_policy()
    sender = SharedSender(policy, timeout_s=PATIENCE_S)
    sender.send(0)
    line.send(sender.address)
    line.recv()
    shared.checksum = lambda data: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    nn.init.ones_(policy.critic[0].weight)  # type: ignore[index,operator]
    sender.send(1)
    return "lived"


def stop_while_copying(line: Connection, address: str) -> Outcome:
    """Hang in the middle of taking a version."""
    receiver = SharedReceiver(other_policy(), address, timeout_s=PATIENCE_S)
    shared.checksum = lambda data: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    line.send("stops")
    receiver.receive(0)
    return "went on"


class Adapted(nn.Module):
    """A large layer that stays and a small one that learns, in a type of their own each."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.full((300, 300), value, dtype=dtype), requires_grad=False)
        self.adapter = nn.Parameter(torch.full((300, 2), value, dtype=dtype))
        self.register_buffer("count", torch.tensor([int(value)]))
        self.gain = nn.Parameter(torch.full((), value))


class Numbers(nn.Module):
    """Many tensors that all hold the same number."""

    def __init__(self, count: int = 40, size: int = 5000) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(count))

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for part in self.parts:
            part.fill_(value)

    def value(self) -> float:
        """The number, which must be the same everywhere."""
        values = {float(each) for part in self.parts for each in part.detach().unique()}
        assert len(values) == 1, f"a mixture of {values}"
        return values.pop()


def share_numbers(line: Connection) -> Outcome:
    """Offer version after version as fast as possible, until told to end."""
    module = Numbers()
    sender = SharedSender(module, timeout_s=PATIENCE_S)
    line.send(sender.address)
    version = 0
    while not line.poll():
        module.fill(float(version))
        sender.send(version)
        version += 1
    return "done"
