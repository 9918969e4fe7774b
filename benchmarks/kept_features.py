"""Compare an update of a SmolVLA with frozen vision and language that reads what traces keep of images with the same
update that reads the images.

    python benchmarks/kept_features.py [--rounds 9] [--out benchmarks/results/kept_features.json]

Both learn from the same decisions of the same weights, with PPO's loss, critic and epochs, on one thread, interleaved;
the CPU time of this process is compared. Timed apart are the parts of a decision, so that it can be seen what share
vision has at this shape.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from turns import take_turns

from embodyrl.config import load_config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.learner import build_learner
from embodyrl.models import build_policy
from embodyrl.models.policy import PolicyObservation
from embodyrl.models.smolvla.config import ScratchConfig, SmolVLAConfig

SIDE, CHUNK, ACTION, STATE = 128, 10, 7, 8
SHAPE = ScratchConfig(
    image_size=SIDE,
    patch_size=16,
    shuffle=2,
    vision_size=192,
    vision_layers=6,
    hidden_size=128,
    layers=4,
    expert_width=0.75,
)
"""Sizes of a SmolVLA between tiny and published; the published vision tower has 80 % of a decision's cost."""
TASK_DESCRIPTION = "put the bowl on the plate"


def learner_of(*, keeps: bool) -> Any:
    """An engine whose traces hold what the vision tower makes of images, or not."""
    arm = ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * ACTION, high=(1.0,) * ACTION)
    spec = SimulatorSpec(
        tasks={"bowl": TASK_DESCRIPTION},
        actions=(arm,),
        proprio_dim=STATE,
        max_episode_steps=50,
        control_frequency=20.0,
        cameras=("front",),
        image_size=(SIDE, SIDE),
    )
    overrides = ["algorithm.target_kl=null", "engine.device=cpu", "engine.threads=1", "algorithm.minibatches=4"]
    config = load_config(None, [*overrides, "algorithm.epochs=2"]).config
    policy = build_policy(SmolVLAConfig(name="smolvla", scratch=SHAPE), spec, chunk_size=CHUNK, seed=1)
    policy.trace_holds_images = keeps
    return build_learner(
        policy,
        config.algorithm,
        simulator=spec,
        config=config.engine,
        iterations=10**6,
        seed=1,
    )


def observed(samples: int) -> Observation:
    """Random observations."""
    draw = np.random.default_rng(0)
    return Observation(
        images=draw.integers(0, 256, (samples, 1, SIDE, SIDE, 3), dtype=np.uint8),
        proprio=draw.normal(size=(samples, STATE)).astype(np.float32),
        task_descriptions=[TASK_DESCRIPTION] * samples,
    )


def batch_of(engine: HybridEngine, samples: int) -> dict[str, Any]:
    """The engine's own decisions, with random advantages; images only where traces do not hold them."""
    observation, draw = observed(samples), torch.Generator().manual_seed(0)
    decided = engine.act(observation, "train")
    columns: dict[str, Any] = {
        "proprio": torch.from_numpy(observation.proprio),
        "task_index": torch.zeros(samples, dtype=torch.int64),
        "trace": {name: tensor.clone() for name, tensor in decided.trace.items()},
        "version": torch.zeros(samples, dtype=torch.int64),
        "sequence": torch.arange(samples),
        "executed": torch.ones(samples, CHUNK, dtype=torch.bool),
        "valid": torch.ones(samples, dtype=torch.bool),
        "weights": torch.full((samples,), 1 / samples),
        "advantages": torch.randn(samples, generator=draw),
        "returns": torch.randn(samples, generator=draw),
        "old_values": decided.values.clone(),  # type: ignore[union-attr]
        "old_logprobs": decided.logprobs.sum(1),
    }
    if not engine.policy.trace_holds_images:
        columns["images"] = torch.from_numpy(observation.images)
    return columns


def seconds(call: Callable[[], object], rounds: int = 5) -> float:
    """Median CPU time of a call [s]."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return statistics.median(spent)


@torch.inference_mode()
def parts_of_a_decision(engine: HybridEngine, samples: int) -> dict[str, float]:
    """CPU time of vision, language and one step of the expert for so many samples [s]."""
    policy: Any = engine.policy
    network = policy.network
    inputs = policy.preprocess(PolicyObservation.of(observed(samples)))
    seen, prefix = policy.see(inputs), policy.condition(inputs)
    x, moment = torch.randn(samples, CHUNK, ACTION), torch.ones(samples)
    return {
        "vision": seconds(lambda: network.see(inputs["pixel_values"])),
        "language": seconds(lambda: policy.condition(inputs | {"seen": seen})),
        "expert_step": seconds(lambda: network(prefix, x, moment)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=64, help="decisions of an update")
    parser.add_argument("--out", type=Path, help="write the numbers there as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept, images = learner_of(keeps=True), learner_of(keeps=False)
    batches = {id(learner): batch_of(learner.engine, arguments.samples) for learner in (kept, images)}

    def update(learner: Any) -> Callable[[], object]:
        return lambda: learner.update(batches[id(learner)], [TASK_DESCRIPTION])

    times = take_turns({"kept": update(kept), "images": update(images)}, arguments.rounds)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    parts = parts_of_a_decision(kept.engine, arguments.samples // 4)
    numbers = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "samples": arguments.samples,
        "update_s": medians,
        "ratio": medians["kept"] / medians["images"],
        "parts_of_a_minibatch_s": parts,
        "bytes_of_a_trace": int(batches[id(kept)]["trace"]["seen"][0].nbytes),
        "bytes_of_an_image": SIDE * SIDE * 3,
    }
    print(json.dumps(numbers, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
