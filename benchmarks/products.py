"""Compare small vision-language-action models on a CPU with and without oneDNN's products (`models.products`).

    python benchmarks/products.py [--rounds 7] [--out benchmarks/results/products.json]

The models of the experiments tiny_*_grpo with random weights, in float32 on one thread: deciding for 16 envs, and the
forward and backward pass of 64 decisions. `plain` is the same policy with torch's own linear layers. Rounds are
interleaved and the CPU time of this process is compared. Beside them single layers, whose products torch leaves to MKL.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from turns import take_turns

from embodyrl.config import load_config
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models import Policy, PolicyObservation, build_policy
from embodyrl.models.products import onednn_is_faster, use_onednn

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("tiny_oft", "tiny_pi0", "tiny_smolvla", "tiny_gr00t", "tiny_gr00t_n17", "tiny_pi0_fast")
ENVS, DECISIONS = 16, 64
LAYERS = ((256, 128, 128), (4096, 64, 192), (4096, 256, 1024), (4096, 1024, 256))
"""Rows, inputs and outputs."""


def policy_of(experiment: str) -> tuple[Policy, Callable[[int], Observation]]:
    """The policy of an experiment with random weights, and its observations."""
    settings = ["model.checkpoint=null", "run.dir=runs/not-made"]
    settings += ["model.frozen=nothing"] if "smolvla" in experiment else []
    config: Any = load_config(f"{experiment}_grpo", settings).config
    side, cameras = tuple(config.env.image_size), tuple(config.env.cameras)
    arm = ActionField(name="arm", meaning="force", unit="N", low=(-1.0,) * 4, high=(1.0,) * 4)
    spec = SimulatorSpec(
        tasks={"reach": "reach the goal"},
        actions=(arm,),
        cameras=cameras,
        image_size=side,
        proprio_dim=4,
        max_episode_steps=100,
        control_frequency=10.0,
    )
    draw = np.random.default_rng(0)

    def observe(count: int) -> Observation:
        images = draw.integers(0, 256, (count, len(cameras), *side, 3), dtype=np.uint8)
        states = draw.normal(size=(count, 4)).astype(np.float32)
        return Observation(images=images, proprio=states, task_descriptions=["reach the goal"] * count)

    return build_policy(config.model, spec, chunk_size=config.rollout.chunk_size, seed=1).eval(), observe


def steps_of(policy: Policy, few: Observation, many: Observation) -> dict[str, Callable[[], object]]:
    """What is measured: acting and learning."""
    noise = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        acting = policy.preprocess(PolicyObservation.of(few))
        seen = policy.preprocess(PolicyObservation.of(many))
        decided = policy.act(seen, "train", noise).trace
    seen, trace = ({name: each.clone() for name, each in found.items()} for found in (seen, decided))

    def act() -> None:
        with torch.inference_mode():
            policy.act(acting, "train", noise)

    def learn() -> None:
        policy.zero_grad(set_to_none=True)
        output = policy.evaluate(seen, trace)
        value = 0.0 if output.values is None else output.values.square().mean()
        (output.logprobs.mean() + value).backward()

    return {"act": act, "learn": learn}


def compared(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU milliseconds of `plain` and `onednn`, and their ratio."""
    medians = {name: 1e3 * statistics.median(each) for name, each in take_turns(contenders, rounds).items()}
    return {name: round(each, 2) for name, each in medians.items()} | {
        "ratio": round(medians["plain"] / medians["onednn"], 2)
    }


def of_layer(rows: int, inputs: int, outputs: int, rounds: int) -> dict[str, float]:
    """Forward and backward pass of one layer."""
    plain = nn.Linear(inputs, outputs)
    quick = copy.deepcopy(plain)
    use_onednn(nn.Sequential(quick))
    seen = torch.randn(rows, inputs, requires_grad=True)

    def passes(layer: nn.Linear) -> None:
        for _ in range(20):
            layer(seen).sum().backward()

    return compared({"plain": functools.partial(passes, plain), "onednn": functools.partial(passes, quick)}, rounds)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "products.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"onednn_is_faster": onednn_is_faster(), "models": {}, "layers": {}}
    for model in MODELS:
        policy, observe = policy_of(model)
        few, many = observe(ENVS), observe(DECISIONS)
        quick = copy.deepcopy(policy)
        use_onednn(quick)
        plain_steps, quick_steps = steps_of(policy, few, many), steps_of(quick, few, many)
        result["models"][model] = {
            name: compared({"plain": plain_steps[name], "onednn": quick_steps[name]}, arguments.rounds)
            for name in plain_steps
        }
        print(model, result["models"][model], flush=True)
    for sizes in LAYERS:
        result["layers"]["x".join(map(str, sizes))] = found = of_layer(*sizes, arguments.rounds)
        print(sizes, found, flush=True)
    result |= {"envs": ENVS, "decisions": DECISIONS, "rounds": arguments.rounds, "torch": torch.__version__}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
