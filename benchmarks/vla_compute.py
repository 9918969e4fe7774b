"""Measure the gain of bfloat16, action columns and recomputing for a small vision-language-action model on the CPU.

    python benchmarks/vla_compute.py [--rounds 7] [--batch 8] [--shapes tiny,small]

Contenders take turns, on one thread, and the CPU time of this process is what is compared:

- learning (forward and backward of `evaluate`) in float32 and in bfloat16;
- `evaluate` with logits of the 256 action tokens only, and with those of a whole vocabulary of 32,064 from which the
  action tokens are then taken;
- learning with layers that are computed again in the backward pass (`engine.gradient_checkpointing`), and the bytes
  that are kept without and with it.

Shapes: `tiny` is that of the experiment tiny_oft_sft (0.56M parameters), `small` has 6 layers of width 256 and sees 256
patches, as large as the transformer that docs/performance.md speaks of.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from turns import take_turns

from embodyrl.config.schema import Precision
from embodyrl.engine.compute import choose_precision, computing_in, recompute_blocks
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models import PolicyObservation, build_policy
from embodyrl.models.openvla_oft.config import OpenVLAOFTConfig
from embodyrl.models.prismatic.config import ScratchConfig

RESULTS = Path(__file__).resolve().parent / "results"
VOCABULARY = 32_064
SHAPES = {
    "tiny": ScratchConfig(),
    "small": ScratchConfig(image_size=256, hidden_size=256, layers=6, heads=4, mlp_size=704),
}
CPU = torch.device("cpu")


class Subject:
    """A policy with random weights, and a batch that it decided on."""

    def __init__(self, shape: str, batch: int) -> None:
        side = SHAPES[shape].image_size
        arm = ActionField(name="arm", meaning="force", unit="N", low=(-1.0,) * 4, high=(1.0,) * 4)
        spec = SimulatorSpec(
            tasks={"reach": "reach the goal"},
            actions=(arm,),
            cameras=("front",),
            image_size=(side, side),
            proprio_dim=0,
            max_episode_steps=10,
            control_frequency=10.0,
        )
        config = OpenVLAOFTConfig(name="openvla_oft", scratch=SHAPES[shape])
        policy: Any = build_policy(config, spec, chunk_size=8, seed=1)
        self.policy: Any = policy.eval()
        language: Any = self.policy.network.language_model
        language.lm_head = nn.Linear(language.lm_head.in_features, VOCABULARY, bias=False)
        draw = np.random.default_rng(0)
        images = draw.integers(0, 256, (batch, 1, side, side, 3), dtype=np.uint8)
        seen = Observation(images=images, task_descriptions=["reach the goal"] * batch)
        self.inputs = self.policy.preprocess(PolicyObservation.of(seen))
        with torch.no_grad():
            self.trace = self.policy.act(self.inputs, "train", torch.Generator().manual_seed(0)).trace

    @property
    def parameters(self) -> int:
        """Without the vocabulary, which is the benchmark's own."""
        return sum(each.numel() for name, each in self.policy.named_parameters() if "lm_head" not in name)

    def score(self, precision: Precision = Precision.float32) -> Any:
        """Log-probs of the batch."""
        with computing_in(choose_precision(precision, self.policy, CPU), CPU):
            return self.policy.evaluate(self.inputs, self.trace)

    def learn(self, precision: Precision = Precision.float32) -> None:
        """Forward and backward."""
        self.policy.zero_grad(set_to_none=True)
        output = self.score(precision)
        (output.logprobs.mean() + output.values.square().mean()).backward()

    def kept(self) -> int:
        """Bytes that a forward pass keeps for the backward pass."""
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self.score()  # noqa: F841 - holds what is counted
            return sum(seen.values())


def of_the_whole_vocabulary(subject: Subject) -> None:
    """Have a policy compute all logits and take those of action tokens."""
    network = subject.policy.network
    first, bins = network.architecture.first_action_token, network.architecture.bins

    def logits(hidden: Tensor) -> Tensor:
        return functional.linear(hidden, network.language_model.lm_head.weight)[..., first : first + bins].float()

    network.action_logits = logits


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each."""
    return {name: statistics.median(seconds) for name, seconds in take_turns(contenders, rounds).items()}


def measure(shape: str, batch: int, rounds: int) -> dict[str, Any]:
    """All comparisons for one shape."""
    plain, whole, recomputing = (Subject(shape, batch) for _ in range(3))
    of_the_whole_vocabulary(whole)
    kept = plain.kept()
    recompute_blocks(recomputing.policy)

    def scoring(subject: Subject) -> Callable[[], object]:
        return torch.no_grad()(subject.score)

    learning = medians(
        {
            "float32": plain.learn,
            "bfloat16": lambda: plain.learn(Precision.bfloat16),
            "recomputing": recomputing.learn,
        },
        rounds,
    )
    evaluating = medians({"action_columns": scoring(plain), "whole_vocabulary": scoring(whole)}, rounds)
    return {
        "parameters": plain.parameters,
        "cpu_s": {name: round(value, 4) for name, value in (learning | evaluating).items()},
        "bfloat16_speedup": round(learning["float32"] / learning["bfloat16"], 3),
        "action_columns_speedup": round(evaluating["whole_vocabulary"] / evaluating["action_columns"], 3),
        "recomputing_cost": round(learning["recomputing"] / learning["float32"], 3),
        "bytes_kept": kept,
        "bytes_kept_recomputing": recomputing.kept(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--output", type=Path, default=RESULTS / "vla_compute.json")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {shape: measure(shape, chosen.batch, chosen.rounds) for shape in chosen.shapes.split(",")}
    result = found | {"batch": chosen.batch, "rounds": chosen.rounds, "torch": torch.__version__}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
