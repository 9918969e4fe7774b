"""Benchmark large models with random weights: chunks per second in rollouts, tokens per second and peak memory in
learning.

    python benchmarks/vla_real_size.py                        # OpenVLA-OFT 7B on a GPU, in bfloat16
    python benchmarks/vla_real_size.py --model pi0 --learn lora
    python benchmarks/vla_real_size.py --tiny                 # the same code with a tiny model, on a CPU

The device's matrix peak is measured first (one large product); every figure is given as a share of it too. The model's
arithmetic is counted by torch while the policy runs without memory, recomputation not included, as is usual for "model
FLOPs utilisation". A rollout is `HybridEngine.act` with images in main memory, so preparing them is part of it;
"graph" is `Policy.act` in evaluation, without preparing images, as one CUDA graph, beside the same call without a
graph. A training step is `HybridEngine.update` or `HybridEngine.sft_step` on one minibatch.

To add a model, add an entry to MODELS; the model's registry entry must say that a size was published.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from embodyrl.config.build import build_section
from embodyrl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig
from embodyrl.data.layout import Batch
from embodyrl.engine.compute import computing_in
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.learner import build_learner
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.methods.sft.config import SFTConfig
from embodyrl.models import Policy, PolicyObservation, build_policy
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import PUBLISHED
from embodyrl.planning.dry_run import SAMPLES, DryRun, give_bodies
from embodyrl.planning.shapes import Assuming, Shapes, ShapeTensor
from embodyrl.planning.weightless import build_weightless
from embodyrl.registry import SupportedModel

PPO = OnPolicyConfig(name="ppo", epochs=1, minibatches=1, value_coef=0.0)
TASK_DESCRIPTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"
LEARN = ["lora", "full", "sft"]
ASSUMED_PEAK = 790e12
"""FLOP/s for the bounds that are printed beside: a share of an H200's data sheet that large products reach."""

INITIAL_STD = 0.02
"""Standard deviation of random weights, as usual for language models."""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of attention on a CPU, which torch does not count by itself; arguments are shapes."""
    return int(sdpa_flop_count(query, key, value))


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def build_published(
    name: str, options: Mapping[str, Any], *, chunk_size: int, device: torch.device, seed: int = 0
) -> Policy:
    """Build a model of the published size with random weights on a device, for measuring speed and memory.

    Args:
        name: name of the model.
        options: options of its `model:` section, without `checkpoint`.
        chunk_size: actions per chunk.
        device: device of the weights.
        seed: seed of the weights.

    Raises:
        PolicyError: the model has no published size, or an option does not fit.
    """
    entry = SupportedModel.entry(name)
    if entry.published is None:
        raise PolicyError(f"no size of model {name!r} is known here: measure it with a checkpoint's shape")
    policy_type: Callable[..., Policy] = entry.load()
    config: Any = build_section(ModelConfig, {**options, "name": name})
    policy = policy_type(dataclasses.replace(config, checkpoint=PUBLISHED), None, chunk_size)
    policy.name = name
    generator = torch.Generator(device).manual_seed(seed)
    for module in policy.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made.normal_(std=INITIAL_STD, generator=generator)
                module.register_parameter(key, nn.Parameter(made, requires_grad=parameter.requires_grad))
    return policy.to(device)


def count_flops(policy: Policy, observe: Callable[[int], Observation]) -> tuple[float, float]:
    """Floating-point operations of matrix products for one sample: of a decision, and of scoring it again.

    Args:
        policy: from `build_weightless`.
        observe: observations of so many samples.
    """
    samples = SAMPLES[0]
    with Assuming():
        prepared = policy.preprocess(PolicyObservation.of(observe(samples)))
    give_bodies(policy)
    inputs = {name: ShapeTensor.like(tensor) for name, tensor in prepared.items()}
    run = DryRun(policy, inputs, inputs, samples, torch.float32)
    counts = []
    with Shapes(), torch.no_grad():
        for step in (run.decide, lambda: policy.evaluate(inputs, dict(run.decision.trace))):
            with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
                step()
            counts.append(counter.get_total_flops() / samples)
    return counts[0], counts[1]


@dataclass(frozen=True)
class Model:
    """A model to measure."""

    chunk: int
    images: int = 1
    side: int = 224
    options: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    """Options of the model that --tiny measures."""
    bound: float | None = None
    """Chunks per second at ASSUMED_PEAK, by hand: arithmetic of the large products alone."""


MODELS = {
    "openvla_oft": Model(chunk=8, bound=160.0),
    "openvla": Model(chunk=1, bound=174.0),  # at batch 64; at 1 it is 45, because weights are read for every entry
    "pi0": Model(chunk=10, images=3, bound=181.0),
    "pi05": Model(chunk=10, images=3),
    "pi0_fast": Model(chunk=10, images=3),
    "gr00t": Model(chunk=16, images=2),
    "gr00t_n17": Model(chunk=8, images=2, side=256),
}


@dataclass(frozen=True)
class Setup:
    """The measured model and its device."""

    model: str
    tiny: bool
    device: torch.device
    rounds: int

    @property
    def kind(self) -> Model:
        """The model's entry."""
        return MODELS[self.model]

    @property
    def side(self) -> int:
        """Side of the simulator's images [pixels]."""
        return 64 if self.tiny else self.kind.side

    @property
    def options(self) -> dict[str, Any]:
        """Of the section `model:`."""
        return self.kind.tiny if self.tiny else {"dtype": "bfloat16", **self.kind.options}

    @property
    def simulator(self) -> SimulatorSpec:
        """Spec of the simulator that the policy acts in."""
        arm = ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * 7, high=(1.0,) * 7)
        return SimulatorSpec(
            tasks={"task": TASK_DESCRIPTION},
            actions=(arm,),
            proprio_dim=8,
            max_episode_steps=100,
            control_frequency=20.0,
            cameras=tuple(f"camera{number}" for number in range(self.kind.images)),
            image_size=(self.side, self.side),
        )

    def observe(self, samples: int) -> Observation:
        """Observations of so many slots."""
        shape = (samples, self.kind.images, self.side, self.side, 3)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return Observation(
            images=images, proprio=np.zeros((samples, 8), np.float32), task_descriptions=[TASK_DESCRIPTION] * samples
        )

    def config(self) -> ModelConfig:
        """The model's options; of the published size unless --tiny."""
        SupportedModel.entry(self.model).load()
        checkpoint = {} if self.tiny else {"checkpoint": "<weights>"}
        built: ModelConfig = build_section(ModelConfig, {"name": self.model, **self.options, **checkpoint})
        return built

    def policy(self) -> Policy:
        """With random weights on the device."""
        if self.tiny:
            return build_policy(self.config(), self.simulator, chunk_size=self.kind.chunk, seed=0)
        return build_published(self.model, self.options, chunk_size=self.kind.chunk, device=self.device)

    def engine(self, **settings: Any) -> HybridEngine:
        """The policy in an engine with these settings."""
        engine: HybridEngine = self.learner(PPO, **settings).engine
        return engine

    def learner(self, algorithm: AlgorithmConfig, **settings: Any) -> Any:
        """A method that learns with the policy, in an engine with these settings."""
        return build_learner(
            self.policy(),
            algorithm,
            simulator=self.simulator,
            config=build_section(EngineConfig, {"device": self.device.type, **settings}),
            iterations=10,
            seed=0,
        )

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, step: Callable[[], object]) -> float:
        """Median time of a step that was done once before [s]."""
        step()
        times = []
        for _ in range(self.rounds):
            self.settle()
            start = time.perf_counter()
            step()
            self.settle()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def peak_memory(self) -> float | None:
        """Most memory since the last call [GB]; None on a CPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return peak


def matrix_peak(setup: Setup) -> float:
    """FLOP/s of one large matrix product, in the model's precision on a GPU and in float32 on a CPU."""
    side = 512 if setup.tiny else 8192
    dtype = torch.bfloat16 if setup.device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, dtype=dtype, device=setup.device) for _ in range(2))
    return 2 * side**3 / setup.seconds(lambda: left @ right)


def measure_rollout(setup: Setup, batches: list[int], flops: float, peak: float) -> list[dict[str, Any]]:
    """Chunks per second by the slots that are decided for at once."""
    engine, rows = setup.engine(), []
    setup.peak_memory()
    for batch in batches:
        observation = setup.observe(batch)
        with engine.rollout_mode():
            seconds = setup.seconds(partial(engine.act, observation, "train"))
        rows.append(
            {
                "batch": batch,
                "seconds": seconds,
                "chunks_per_s": batch / seconds,
                "actions_per_s": batch * setup.kind.chunk / seconds,
                "share_of_peak": batch * flops / seconds / peak,
                "peak_gb": setup.peak_memory(),
            }
        )
    return rows


def measure_graph(setup: Setup, batches: list[int]) -> list[dict[str, Any]]:
    """The most likely decision kernel by kernel and as one CUDA graph: what launching costs. Empty without a GPU."""
    if setup.device.type != "cuda":
        return []
    engine, rows = setup.engine(), []
    for batch in batches:
        with engine.rollout_mode(), torch.inference_mode(), computing_in(engine.precision, setup.device):
            inputs = engine.policy.preprocess(PolicyObservation.of(setup.observe(batch)))
            decide = partial(engine.policy.act, inputs, "eval")
            plain = setup.seconds(decide)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    decide()
            except RuntimeError as error:  # a model that looks at its numbers on the way cannot be captured
                rows.append({"batch": batch, "failed": str(error).splitlines()[0]})
                continue
            seconds = setup.seconds(graph.replay)
        rows.append({"batch": batch, "seconds": seconds, "plain_seconds": plain, "chunks_per_s": batch / seconds})
    return rows


def measure_learning(
    setup: Setup, what: str, options: argparse.Namespace, flops: float, tokens: int, peak: float
) -> dict[str, Any]:
    """One training step: by reinforcement with LoRA (twice the arithmetic of scoring: activations' gradients) or in
    full (three times), or on demonstrations in full (sft)."""
    settings: dict[str, Any] = {
        "micro_batch_size": options.micro_batch,
        "gradient_checkpointing": not options.keep_activations,
    }
    if what == "lora":
        settings["lora"] = {"rank": 32}
    row: dict[str, Any] = {"what": what, "samples": options.samples, "micro_batch": options.micro_batch}
    try:
        learner = setup.learner(SFTConfig(name="sft") if what == "sft" else PPO, **settings)
        engine = learner.engine
        observation = setup.observe(options.samples)
        batch = decisions(engine, observation)
        shape = (options.samples, setup.kind.chunk, engine.policy.spec.action_dim)
        demonstrations = [Batch(observation=observation, actions=np.zeros(shape, np.float32))]
        steps = {"sft": lambda: learner.imitation.learn(demonstrations)}
        setup.peak_memory()
        with engine.train_mode():
            seconds = setup.seconds(steps.get(what, lambda: learner.update(batch, [TASK_DESCRIPTION])))
    except torch.cuda.OutOfMemoryError as error:
        return row | {"failed": str(error).splitlines()[0]}
    return row | {
        "seconds": seconds,
        "samples_per_s": options.samples / seconds,
        "tokens_per_s": options.samples * tokens / seconds,
        "share_of_peak": (2 if what == "lora" else 3) * flops * options.samples / seconds / peak,
        "peak_gb": setup.peak_memory(),
    }


def decisions(engine: HybridEngine, observation: Observation) -> dict[str, Any]:
    """A batch to learn from: the engine's own decisions, all equally good."""
    samples = len(observation.task_descriptions)
    decided = engine.act(observation, "train")
    columns: dict[str, Any] = {
        "images": torch.from_numpy(observation.images),
        "proprio": torch.from_numpy(observation.proprio),
        "task_index": torch.zeros(samples, dtype=torch.int64),
        "trace": {name: tensor.clone().cpu() for name, tensor in decided.trace.items()},
        "version": torch.zeros(samples, dtype=torch.int64),
        "sequence": torch.arange(samples),
        "executed": torch.ones(samples, engine.policy.spec.chunk_size, dtype=torch.bool),
        "valid": torch.ones(samples, dtype=torch.bool),
        "weights": torch.full((samples,), 1 / samples),
        "advantages": torch.ones(samples),
        "old_logprobs": decided.logprobs.sum(1).cpu(),
    }
    return columns


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="openvla_oft")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on a CPU")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="slots decided for at once")
    parser.add_argument("--learn", nargs="*", choices=LEARN, default=LEARN)
    parser.add_argument("--samples", type=int, default=32, help="decisions of a training step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no CUDA device here: run it on a GPU, or try it out with --tiny")
    setup = Setup(options.model, options.tiny, device, options.rounds)
    blank, origin = build_weightless(setup.config(), setup.simulator, chunk_size=setup.kind.chunk)
    parameters, tokens = (
        sum(each.numel() for each in blank.parameters()),
        blank.tokens_per_observation(TASK_DESCRIPTION),
    )
    deciding, scoring = count_flops(blank, setup.observe)
    peak = matrix_peak(setup)
    print(f"{options.model} ({origin}): {parameters / 1e9:.3f} billion parameters, {tokens} tokens")
    print(f"arithmetic: {deciding / 1e12:.4g} TFLOP per decision; one large product: {peak / 1e12:.3g} TFLOP/s")
    print(f"bound at that rate: {peak / deciding:.1f} chunks/s" + by_hand(setup))
    result = {
        "model": options.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": parameters,
        "tokens": tokens,
        "flop_per_decision": deciding,
        "matrix_peak": peak,
        "rollout": measure_rollout(setup, options.batches, deciding, peak),
    }
    for row in result["rollout"]:
        print(row_text(f"rollout, batch {row['batch']}", row, "chunks_per_s"))
    result["graph"] = measure_graph(setup, options.batches)
    for row in result["graph"]:
        text = row.get("failed") or f"{row['chunks_per_s']:.1f} chunks/s, {row['plain_seconds'] / row['seconds']:.2f} x"
        print(f"{'graph, batch ' + str(row['batch']):<22} {text}")
    result["learning"] = []
    for what in options.learn:
        row = measure_learning(setup, what, options, scoring, tokens, peak)
        result["learning"].append(row)
        print(row_text(f"{what} step of {options.samples}", row, "tokens_per_s"))
    if options.json is not None:
        options.json.write_text(json.dumps(result | {"setup": asdict(setup.kind)}, indent=2) + "\n")


def by_hand(setup: Setup) -> str:
    """The bound that was worked out by hand, for the published size."""
    bound = setup.kind.bound
    return (
        "" if setup.tiny or bound is None else f"; by hand at {ASSUMED_PEAK / 1e12:.0f} TFLOP/s: {bound:.0f} chunks/s"
    )


def row_text(title: str, row: dict[str, Any], rate: str) -> str:
    """One line of the table."""
    if "failed" in row:
        return f"{title:<22} failed: {row['failed']}"
    memory = "" if row["peak_gb"] is None else f"   {row['peak_gb']:.1f} GB"
    share = f"{100 * row['share_of_peak']:.1f} % of the matrix peak"
    return f"{title:<22} {row[rate]:>10.1f} {rate.replace('_per_', '/')}   {share}{memory}"


if __name__ == "__main__":
    main()
