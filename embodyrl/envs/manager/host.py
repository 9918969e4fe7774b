"""SimulatorHost: the simulators of a process that plays on another machine.

It owns a plain EnvManager, or a MixedManager, and answers the calls of one RemoteManager, over one line
(`placement.transport.line`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import EnvConfig, Observe
from embodyrl.envs.manager.messages import Message, Results, of_error, own_memory
from embodyrl.envs.manager.mixed import start_env_manager
from embodyrl.envs.manager.pool import LONGEST_PAUSE_S
from embodyrl.envs.manager.simulators import Simulators
from embodyrl.envs.types import EpisodeSpec
from embodyrl.placement.plan import inventory
from embodyrl.placement.ranks import RankInfo, own_share
from embodyrl.placement.transport.line import Address, Line, LineError, Listener

FRAME_S = 30.0
"""Longest time for a message to come or to go, once it has begun [s]."""
PATIENCE_S = 7200.0
"""Longest time until a process of a run opens its line [s]: before that it joins the others, copies a checkpoint and
plans. Hosts of a run that has ended do not wait for so long: they end with the program that started them."""
CLOSE_S = 8.0
"""Longest time for the simulators to end when the host is closed [s]."""


def host_simulators(loaded: LoadedConfig, place: RankInfo, host: str, log_dir: Path | None) -> SimulatorHost:
    """Start the simulators of one of several processes that play.

    Args:
        loaded: config of the run.
        place: of that process; `local_rank` and `local_size` count the hosts of this machine.
        host: address of this machine to listen on.
        log_dir: folder for the output of simulator processes; None: kept only while they run.
    """
    config = loaded.config
    return SimulatorHost(
        own_share(config.env, place, inventory()),
        host,
        patience_s=PATIENCE_S,
        chunk_size=config.executed_actions,
        every_step=config.rollout.observe is Observe.every_step,
        plugins=config.plugins,
        plugin_path=str(loaded.plugin_dir),
        log_dir=log_dir,
    )


class SimulatorHost:
    """Simulators that serve the first line that is opened, and end with it. Built in a worker process.

    Args:
        config: see `EnvManager`.
        host: address of this machine to listen on.
        patience_s: time after which the simulators end if nobody has opened a line [s].
        manager: other arguments of `EnvManager`.

    Raises:
        UserError, WorkerError: see `EnvManager`.
        LineError: this machine does not have the address.
    """

    def __init__(self, config: EnvConfig, host: str, *, patience_s: float, **manager: Any) -> None:
        self._config, self._options = config, manager
        self._patience_s = patience_s
        self._listener = Listener(host)
        self._line: Line | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        # Simulator processes die with the thread that started them, and a manager belongs to one thread.
        self._thread = threading.Thread(target=self._run, name="simulators", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._listener.close()
            raise self._error

    def address(self) -> Address:
        """Return where it listens, for the RemoteManager."""
        return self._listener.address

    def _run(self) -> None:
        try:
            manager = start_env_manager(self._config, **self._options, on_restart=self._restarting)
        except BaseException as error:
            self._error = error
            return
        finally:
            self._started.set()
        with manager:
            try:
                with self._listener:
                    self._line = self._listener.accept(self._patience_s)
                with self._line:
                    _Server(manager, self._line, self._config).run()
            except LineError as error:
                print(f"the simulators end: {error}", flush=True)

    def _restarting(self) -> None:
        """Have the other side wait for a process to be replaced."""
        config = self._config
        assert self._line is not None, "processes are replaced only during a call"
        more_s = config.startup_timeout_s + LONGEST_PAUSE_S + config.step_timeout_s
        Message({"more_s": more_s}).send(self._line, timeout_s=FRAME_S)

    def close(self) -> None:
        """End the simulators. May be called again."""
        self._listener.close()
        if self._line is not None:
            self._line.interrupt()
        self._thread.join(CLOSE_S)


class _Server:
    """Answers the calls that come over a line.

    Args:
        manager: to call.
        line: to the RemoteManager.
        config: of the simulators, whose deadlines the other side needs.
    """

    def __init__(self, manager: Simulators, line: Line, config: EnvConfig) -> None:
        self._manager, self._line, self._config = manager, line, config
        self._results = Results(list(manager.spec.tasks.values()))
        self._episodes: dict[int, EpisodeSpec | None] = {}
        """Last one of each slot: it is not sent again until it changes."""
        self._methods: dict[str, Callable[[Message], Message]] = {
            "describe": self._describe,
            "reset": self._reset,
            "step": lambda asked: self._results.of_step(manager.step(*self._chunk(asked))),
            "send": self._send,
            "receive": lambda asked: self._results.of_step(manager.receive(_slots(asked))),
            "receive_ready": self._receive_ready,
            "step_recorded": self._step_recorded,
            "get_state": lambda asked: Message(blobs=manager.get_state(_slots(asked))),
            "set_state": self._set_state,
            "observe": lambda asked: self._results.of_observation(manager.observe(_slots(asked))),
            "render": lambda asked: Message(arrays={"images": manager.render(_slots(asked))}),
            "offload": lambda asked: Message({"value": manager.offload()}),
            "onload": self._onload,
            "take_deaths": lambda asked: Message({"value": [of_error(error) for error in manager.take_deaths()]}),
            "take_mismatches": lambda asked: Message({"value": manager.take_mismatches()}),
            "count_restarts": self._count_restarts,
            "take_work": lambda asked: Message({"value": manager.take_work()}),
        }

    def run(self) -> None:
        """Answer until the other side asks to close.

        Raises:
            LineLost: the other side has gone.
        """
        while self._line.wait(None):
            asked = Message.receive(self._line, timeout_s=FRAME_S, place=own_memory)
            method = asked.header.get("method")
            if method == "close":
                self._manager.close()
            try:
                answer = Message() if method == "close" else self._answer(method, asked)
            except LineError:
                raise
            except Exception as error:
                answer = Message({"error": of_error(error)})
            answer.send(self._line, timeout_s=FRAME_S)
            if method == "close":
                return

    def _answer(self, method: Any, asked: Message) -> Message:
        if not isinstance(method, str) or method not in self._methods:
            raise RuntimeError(f"a host of simulators has no method {method!r}")
        return self._methods[method](asked)

    def _describe(self, asked: Message) -> Message:
        manager, config = self._manager, self._config
        numbers = {"num_envs": manager.num_envs, "chunk_size": manager.chunk_size}
        deadlines = {"step_timeout_s": config.step_timeout_s, "startup_timeout_s": config.startup_timeout_s}
        return Message({"spec": dataclasses.asdict(manager.spec), **numbers, **deadlines})

    def _reset(self, asked: Message) -> Message:
        slots = _slots(asked)
        episodes: Any = self._named(slots, asked.header["episodes"])
        return self._results.of_observation(self._manager.reset(slots, episodes))

    def _send(self, asked: Message) -> Message:
        self._manager.send(*self._chunk(asked))
        return Message()

    def _receive_ready(self, asked: Message) -> Message:
        slots, result = self._manager.receive_ready(asked.header["at_least"])
        answer = self._results.of_step(result)
        answer.header["slots"] = slots.tolist()
        return answer

    def _step_recorded(self, asked: Message) -> Message:
        result, videos = self._manager.step_recorded(*self._chunk(asked))
        answer = self._results.of_step(result)
        answer.arrays |= {f"video_{number}": video for number, video in enumerate(videos)}
        return answer

    def _set_state(self, asked: Message) -> Message:
        states = [bytes(blob) for blob in asked.blobs]
        return Message({"value": self._manager.set_state(_slots(asked), states)})

    def _onload(self, asked: Message) -> Message:
        self._manager.onload()
        return Message()

    def _count_restarts(self, asked: Message) -> Message:
        self._manager.count_restarts(asked.header["restarts"])
        return Message()

    def _chunk(self, asked: Message) -> tuple[list[int], NDArray[np.float32], list[EpisodeSpec | None] | None]:
        """Return the arguments of `EnvManager.step`."""
        slots, episodes = _slots(asked), asked.header["episodes"]
        return slots, asked.arrays["actions"], None if episodes is None else self._named(slots, episodes)

    def _named(self, slots: Sequence[int], sent: Sequence[Any]) -> list[EpisodeSpec | None]:
        """Return the episodes of a message: its fields, null for none, true for the one that was sent last."""
        for slot, each in zip(slots, sent, strict=True):
            if each is not True:
                self._episodes[slot] = None if each is None else EpisodeSpec.from_plain(each)
        return [self._episodes[slot] for slot in slots]


def _slots(asked: Message) -> list[int]:
    slots: list[int] = asked.header["slots"]
    return slots
