"""Decisions of the policy as CUDA graphs: one launch in place of thousands (11,548 kernels in a decision of pi0).

This has not run on a GPU yet, only on the tests' stand-in for one. Therefore every graph is compared with the policy
when it is recorded: if that fails, or if its numbers are not the same bit for bit, the run continues without graphs and
says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from embodyrl.models.policy import PLAN, ActOutput, Inputs, Policy

MOST = 8
"""Graphs at a time. Each holds the memory of a decision."""

Act = Callable[[], ActOutput]
"""Decides from tensors that stay in their place."""
MAYBE = ("values", "counted", "invalid", "plan")
"""Parts of a decision that not every policy gives."""
Key = tuple[object, ...]


class Graph(Protocol):
    """Work that is recorded once and repeated on the same memory."""

    def record(self, act: Act, generator: torch.Generator) -> ActOutput:
        """Record the work of `act`, which need not be done, and return the tensors that it writes to."""
        ...

    def replay(self) -> None:
        """Do the work again, with the generator's next numbers."""
        ...


class CudaGraph(Graph):
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, act: Act, generator: torch.Generator) -> ActOutput:
        """See `Graph`."""
        # A registered generator is asked for its offset at every replay, so that a replay draws what `act` would.
        self._graph.register_generator_state(generator)
        # Other threads may use the GPU meanwhile: a checkpoint is being saved.
        # Weights that autocast has converted for the decision before are gone when a replay would read them.
        torch.clear_autocast_cache()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                return act()
        finally:
            torch.clear_autocast_cache()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


@dataclasses.dataclass(kw_only=True)
class _Recorded:
    """A graph, and the memory that it reads from and writes to."""

    graph: Graph
    inputs: Inputs
    output: ActOutput
    generator: torch.Generator
    """Held, since a key names it by its id."""

    def act(self, inputs: Inputs) -> ActOutput:
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return _map(torch.clone, self.output)  # the next replay overwrites it


class Graphs:
    """Lets a policy act, and repeats it by a graph for each mode, random stream, and shape of the inputs.

    The first decision of a kind is the policy's own, which also lets libraries set themselves up; so is the second,
    which is then recorded; all others are replays. Graphs live within a block of `kept`, in which neither weights nor
    schedules change: updates, loading and offload happen outside.

    Args:
        policy: acts.
        make: makes an empty graph; None: no graphs.
    """

    def __init__(self, policy: Policy, make: Callable[[], Graph] | None) -> None:
        self.warning: str | None = None
        """Why the run continues without graphs, once it does."""
        self._policy = policy
        self._make = make
        self._kept = False
        self._seen: set[Key] = set()
        self._recorded: dict[Key, _Recorded] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep graphs for the length of a block, in which the policy does not change."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False
            self.forget()

    def forget(self) -> None:
        """Drop all graphs, since the policy has changed."""
        self._seen.clear()
        self._recorded.clear()

    def act(self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator) -> ActOutput:
        """Choose a chunk for each env; see `Policy.act`."""
        if self._make is None or not self._kept or PLAN in inputs:  # guidance takes gradients
            return self._policy.act(inputs, mode, generator)
        key = (mode, id(generator), *((name, each.shape, each.dtype, each.device) for name, each in inputs.items()))
        if key in self._recorded:
            return self._recorded[key].act(inputs)
        if key not in self._seen or len(self._recorded) == MOST:
            self._seen.add(key)
            return self._policy.act(inputs, mode, generator)
        before = generator.get_state()
        output = self._policy.act(inputs, mode, generator)
        self._record(key, inputs, mode, generator, before, output)
        return output

    def _record(
        self,
        key: Key,
        inputs: Inputs,
        mode: Literal["train", "eval"],
        generator: torch.Generator,
        before: Tensor,
        wanted: ActOutput,
    ) -> None:
        """Record a graph of the decision that was just made, and compare what it repeats.

        Args:
            key: of the graph.
            inputs: of the decision.
            mode: of the decision.
            generator: of the decision.
            before: the generator's state before it.
            wanted: the decision.
        """
        assert self._make is not None, "else nothing is recorded"
        after, own = generator.get_state(), {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            graph = self._make()
            output = graph.record(lambda: self._policy.act(own, mode, generator), generator)
            recorded = _Recorded(graph=graph, inputs=own, output=output, generator=generator)
            generator.set_state(before)
            found = recorded.act(inputs)
            if not _equal(found, wanted) or not torch.equal(generator.get_state(), after):
                raise RuntimeError("a replay came to other numbers")
        except Exception as error:  # of any kind: the decision is made already, and the run needs no graph to continue
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.warning = f"the policy acts without CUDA graphs, which is slower and the same otherwise: {first}"
            self._make = None
            self.forget()
        else:
            self._recorded[key] = recorded
        finally:
            generator.set_state(after)


def _tensors(output: ActOutput) -> dict[str, Tensor]:
    """Return all tensors of a decision by name."""
    named = {name: getattr(output, name) for name in ("actions", "logprobs", *MAYBE)}
    trace = {f"trace/{name}": tensor for name, tensor in output.trace.items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None} | trace


def _equal(left: ActOutput, right: ActOutput) -> bool:
    pairs = _tensors(left), _tensors(right)
    return pairs[0].keys() == pairs[1].keys() and all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])


def _map(function: Callable[[Tensor], Tensor], output: ActOutput) -> ActOutput:
    return ActOutput(
        actions=function(output.actions),
        logprobs=function(output.logprobs),
        trace={name: function(tensor) for name, tensor in output.trace.items()},
        **{name: None if (tensor := getattr(output, name)) is None else function(tensor) for name in MAYBE},
    )
