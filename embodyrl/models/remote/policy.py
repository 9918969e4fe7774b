"""A policy that a server holds.

Shapes: `B` rows, `V` cameras, `S` numbers of the state, `L` bytes of a task description, `C` actions in a chunk, `D`
action dims.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodyrl.envs import Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import (
    ActOutput,
    EvalOutput,
    Inputs,
    Mode,
    Policy,
    PolicyObservation,
    PolicySpec,
    check_tensor,
)
from embodyrl.models.remote.client import RemotePolicy
from embodyrl.models.remote.options import RemoteConfig
from embodyrl.screen import counted
from embodyrl.servers import TOKEN


class ServedPolicy(Policy):
    """Acts through a policy server; it has no weights, log-probs or values.

    Raises:
        PolicyError: what the server says of its policy does not fit the simulator.
        RunError: nobody answers there in time.
    """

    reads_on_host = frozenset({"images", "proprio"})

    def __init__(self, config: RemoteConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if config.url is None:
            raise PolicyError("model.url is null", "name a server, ws://host:port")
        self._url = config.url
        try:
            self._server = RemotePolicy(
                config.url,
                token=os.environ.get(TOKEN),
                keys=config.keys,
                deadline_s=config.deadline_s,
                cameras=simulator.cameras,
            )
        except UserError as error:  # of its keys, which are settings here
            raise PolicyError(str(error), "see model.keys and env.cameras") from error
        weakref.finalize(self, self._server.close)
        self.spec = PolicySpec(
            kind="remote", chunk_size=chunk_size, action_dim=simulator.action_dim, proprio_dim=simulator.proprio_dim
        )
        if faults := list(self._misfits(simulator)):
            self.close()
            raise PolicyError(f"the policy at {config.url} does not fit: {'; '.join(faults)}")
        told = self._server.metadata.get("chunk_size")
        if isinstance(told, int) and told > chunk_size:
            self.remarks = (
                f"{config.url} decides {told} actions at a time, of which rollout.chunk_size = {chunk_size} are used",
            )
        # Engines ask a policy for the device and type of its parameters.
        self.nothing = nn.Parameter(torch.zeros(1), requires_grad=False)

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """See `Policy.preprocess`; task descriptions are UTF-8, uint8 `[B, L]`, filled up with zeros."""
        parts = {"images": observation.images, "proprio": observation.proprio}
        inputs = {name: check_tensor(part, name).cpu() for name, part in parts.items() if part is not None}
        return inputs | {"descriptions": _as_bytes(observation.task_descriptions)}

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the server is asked for all rows at once.

        Raises:
            PolicyError: actions are to be drawn, or those of the server do not fit.
            RunError: the server refuses, is gone, or takes too long.
        """
        if mode == "train":
            raise PolicyError(
                f"the server at {self._url} chooses the actions, and none can be drawn here: leave out --sample"
            )
        images, proprio = inputs.get("images"), inputs.get("proprio")
        seen = Observation(
            images=None if images is None else images.numpy(),
            proprio=None if proprio is None else proprio.numpy(),
            task_descriptions=_as_texts(inputs["descriptions"]),
        )
        chunks = self._server.act(seen)
        if faults := list(self._short(chunks.shape[1], chunks.shape[2])):
            raise PolicyError(f"the policy at {self._url} does not fit: {'; '.join(faults)}")
        actions = torch.from_numpy(np.ascontiguousarray(chunks[:, : self.spec.chunk_size])).to(self.nothing.device)
        return ActOutput(actions=actions, logprobs=actions.new_zeros(len(actions), 0), values=None)

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Refuse: the server tells no log-probs.

        Raises:
            PolicyError: always.
        """
        raise PolicyError(f"the server at {self._url} tells no log-probs of its actions: it can only act")

    def close(self) -> None:
        """See `Policy.close`."""
        self._server.close()

    def _misfits(self, simulator: SimulatorSpec) -> Iterator[str]:
        """Yield what the server says of its policy, as far as it says something, that the simulator does not show or
        take."""
        told = self._server.metadata
        size, shown, state = told.get("image_size"), [*simulator.image_size], told.get("state_dim")
        if told.get("cameras") and isinstance(size, list) and size != shown:
            yield f"it sees images of {size!r:.40} pixels, and env.image_size is {shown}: set that to {size!r:.40}"
        if _is_count(state) and state and state != simulator.proprio_dim:
            there = simulator.proprio_dim
            yield (
                f"it reads a state of {counted(state, 'number')}, and the simulator's has {there}: choose env options "
                "with which it has those that the policy was trained with"
            )
        chunk, dims = told.get("chunk_size"), told.get("action_dim")
        yield from self._short(chunk if _is_count(chunk) else None, dims if _is_count(dims) else None)

    def _short(self, chunk: int | None, dims: int | None) -> Iterator[str]:
        """Yield what is wrong with chunks of so many actions of so many numbers; None: it is not known."""
        if chunk is not None and chunk < self.spec.chunk_size:
            yield (
                f"it decides {counted(chunk, 'action')} at a time, and rollout.chunk_size is {self.spec.chunk_size}: "
                f"set that to {chunk} or less"
            )
        if dims is not None and dims != self.spec.action_dim:
            yield (
                f"its actions have {counted(dims, 'number')}, and those of the simulator {self.spec.action_dim}: "
                "choose the simulator and the env options that it was trained for, or let its server convert them"
            )


def _as_bytes(texts: Sequence[str]) -> Tensor:
    coded = [text.encode() for text in texts]
    rows: NDArray[np.uint8] = np.zeros((len(coded), max(map(len, coded), default=0)), np.uint8)
    for row, code in enumerate(coded):
        rows[row, : len(code)] = np.frombuffer(code, np.uint8)
    return torch.from_numpy(rows)


def _as_texts(rows: Tensor) -> list[str]:
    return [row.tobytes().rstrip(b"\0").decode() for row in rows.numpy()]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
