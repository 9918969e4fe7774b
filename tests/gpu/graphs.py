"""CUDA graphs on the stand-in: what can be recorded, what is refused, and what an engine does then.

    python tests/gpu/graphs.py

prints what came of each as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import cases
import numpy as np
import torch
from standin.device import gpu
from torch import Tensor

from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, ModelConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.models.policy import ActOutput, Inputs

Work = Callable[[Tensor, torch.Generator], Any]


def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Several kernels, among them one in place, one on a view, a number of the CPU, and random numbers."""
    y = (x * 2).t()
    y[0].add_(torch.tensor(1.0))
    return y + torch.randn(y.shape, generator=generator, device="cuda")


WORK: dict[str, Work] = {
    "a number is read": lambda x, _: x * float(x.sum()),
    "a tensor is copied from the CPU": lambda x, _: x + torch.ones(3, 2).to("cuda"),
    "a literal": lambda x, _: x + torch.tensor([1.0, 2.0], device="cuda"),
    "a mask": lambda x, _: x[x > 0],
    "a generator that is not registered": lambda x, _: (
        x + torch.randn(3, 2, device="cuda", generator=torch.Generator("cuda"))
    ),
}


def record(work: Work, x: Tensor, generator: torch.Generator) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.inference_mode(), torch.cuda.graph(graph):
        return graph, work(x, generator)


def replays() -> bool:
    """Record work on some numbers, replay it on others, and compare with the work itself."""
    x, generator = torch.zeros(3, 2, device="cuda"), torch.Generator("cuda").manual_seed(1)
    graph, output = record(drawn, x, generator)
    generator.manual_seed(2)
    found, wanted = [], []
    for number in range(3):
        x.copy_(torch.full((3, 2), float(number)))
        graph.replay()
        found.append(output.cpu())
    generator.manual_seed(2)
    for number in range(3):
        x.copy_(torch.full((3, 2), float(number)))
        wanted.append(drawn(x, generator).cpu())
    return all(map(torch.equal, found, wanted)) and not torch.equal(found[0], found[1])


def freed() -> str:
    """Replay a graph that reads memory which is there no more."""
    x, generator = torch.zeros(3, 2, device="cuda"), torch.Generator("cuda")
    graph, _ = record(lambda x, _: x + 1, x, generator)
    del x
    return said(graph.replay)


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing"


# ---- policies


class Waits(MLPPolicy):
    """Looks at its numbers."""

    def act(self, inputs: Inputs, mode: Any, generator: torch.Generator | None = None) -> ActOutput:
        assert float(inputs["proprio"].abs().sum()) > 0
        return super().act(inputs, mode, generator)


class Counts(MLPPolicy):
    """Has a number of Python's that changes."""

    calls = 0

    def act(self, inputs: Inputs, mode: Any, generator: torch.Generator | None = None) -> ActOutput:
        self.calls += 1
        output = super().act(inputs, mode, generator)
        output.actions = output.actions + self.calls
        return output


class Draws(MLPPolicy):
    """Has random numbers of its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.noise = torch.Generator("cuda").manual_seed(0)

    def act(self, inputs: Inputs, mode: Any, generator: torch.Generator | None = None) -> ActOutput:
        return super().act(inputs, mode, self.noise)


def decide(kind: type[MLPPolicy], graphs: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Actions for slots of several numbers, and what is said of graphs."""
    arm = ActionField(name="arm", meaning="force", unit="N", low=(-1.0,), high=(1.0,))
    spec = SimulatorSpec(tasks=cases.TASKS, actions=(arm,), proprio_dim=3, max_episode_steps=10, control_frequency=1.0)
    torch.manual_seed(0)
    engine = HybridEngine(
        kind(build_section(ModelConfig, {"name": "mlp"}), spec, 1),
        config=build_section(EngineConfig, {"device": "cuda", "cuda_graphs": graphs}),
        iterations=1,
        seed=1,
    )
    draw, actions = np.random.default_rng(0), []
    with engine.rollout_mode():
        for size in (3, 5, 3, 3, 5, 5, 3, 2):
            proprio = draw.normal(size=(size, 3)).astype(np.float32)
            seen = Observation(proprio=proprio, task_descriptions=cases.DESCRIPTIONS[:1] * size)
            actions.append(engine.act(seen, "train").actions.cpu())
        found = {"warning": engine.graphs.warning, "graphs": len(engine.graphs._recorded)}
    return actions, found


def main() -> None:
    """Record them all."""
    torch.set_num_threads(1)  # also for the first engine's weights, which are made before it sets this itself
    with gpu():
        x, generator = torch.ones(3, 2, device="cuda"), torch.Generator("cuda")
        found: dict[str, Any] = {"replays": replays(), "freed": freed()}
        found["refused"] = {
            name: said(lambda work=work: record(work, x, generator))  # type: ignore[misc]
            for name, work in WORK.items()
        }
        for kind in (MLPPolicy, Waits, Counts, Draws):
            actions, said_of = decide(kind, graphs=True)
            alike = all(map(torch.equal, actions, decide(kind, graphs=False)[0]))
            found[kind.__name__] = said_of | {"alike": alike}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
