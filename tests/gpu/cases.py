"""What a run does with an engine, for each kind of model and each kind of setting, and the numbers that come of it.

Shapes: `M` chunks, `C` actions in a chunk.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from standin import events
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # where `learning` is

from learning import LearningEngine, learning_engine

from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, Level, ModelConfig
from embodyrl.data.layout import Batch
from embodyrl.engine.exchange import ADDRESS
from embodyrl.engine.lora import merge, save_policy
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import PolicyObservation, build_policy
from embodyrl.registry import SupportedModel

SIZE, CHUNK, IMAGE = 4, 2, 32
TASKS = {"push": "push the cube", "pull": "pull it"}
DESCRIPTIONS = list(TASKS.values())


@dataclass(frozen=True)
class Family:
    """A kind of model, tiny."""

    options: dict[str, Any]
    cameras: tuple[str, ...] = ("front",)
    chunk: int = CHUNK
    samples: bool = True
    """Whether it learns by RL; otherwise from demonstrations only."""
    imitates: bool = True
    layered: bool = True
    """Whether it has blocks to recompute and to adapt, and a type of weights."""
    module: str | None = None
    """Of examples/, which registers it."""
    lr: float = 0.03
    """Of steps in proportion to gradients: large enough that a step left out exceeds the tolerance."""


PRISMATIC = {"scratch": {"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48}}
L1 = {"action_head": "l1", "num_images": 2, "use_proprio": True}
PI = {"scratch": {"layers": 2}}
GR00T = {"scratch": {"layers": 1, "action_layers": 2, "action_horizon": 4}}
GR00T_N17 = {"scratch": {"layers": 1, "action_layers": 3, "action_horizon": 4}}
SMOLVLA = {"scratch": {"layers": 2, "vision_layers": 1}}
ACT = {"scratch": {"backbone_width": 4, "hidden_size": 16, "heads": 2, "feedforward_size": 24, "style_layers": 1}}
FAMILIES = {
    "mlp": Family({"name": "mlp"}, (), 1, layered=False),
    "openvla": Family({"name": "openvla"} | PRISMATIC, chunk=1, lr=0.01),
    "openvla_oft": Family({"name": "openvla_oft"} | PRISMATIC, lr=0.01),
    "openvla_oft_l1": Family({"name": "openvla_oft"} | PRISMATIC | L1, ("front", "wrist"), samples=False),
    "pi0": Family({"name": "pi0", "denoising_steps": 2} | PI, lr=0.01),
    "pi0_fast": Family({"name": "pi0_fast"} | PI, lr=0.01),
    "smolvla": Family(
        {"name": "smolvla", "denoising_steps": 2, "noise_method": "flow_noise", "joint_logprob": True} | SMOLVLA,
    ),
    "act": Family({"name": "act"} | ACT, lr=0.01),
    "cnn": Family({"name": "cnn", "encoder": "test_resnet"}, layered=False),
    "gr00t": Family({"name": "gr00t", "denoising_steps": 2, "noise_method": "flow_cps"} | GR00T),
    "gr00t_n17": Family({"name": "gr00t_n17", "denoising_steps": 2} | GR00T_N17),
    "linear": Family({"name": "linear"}, (), 1, imitates=False, layered=False, module="custom_model"),
    "text": Family({"name": "text"}, (), imitates=False, layered=False, module="custom_text_model"),
    "conv": Family({"name": "conv"}, chunk=1, imitates=False, layered=False, module="custom_image_model"),
}


@dataclass(frozen=True)
class Setting:
    """A way to compute."""

    engine: dict[str, Any]
    algorithm: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    """Largest difference from the CPU's numbers, of 1 or of the number if that is larger."""
    proportional: bool = False
    """Whether steps are nearly in proportion to gradients: with a small eps AdamW moves a weight whose gradient is
    nothing but rounding as far as any other, and processors round 16 bits to other signs."""
    layered: bool = False
    """Whether it asks for blocks."""
    apart: bool = False
    """Whether images and traces wait in main memory until they are learned from, as with several ranks."""


KL = {"kl_coef": 0.1, "target_kl": 1e6}
PARTS = {"precision": "float32", "offload": "all", "micro_batch_size": 1}
SETTINGS = {
    # Sums are made in another order by attention's formula, by norms of gradients, and by optimisers of one tensor.
    "float32": Setting({"precision": "float32"}),
    # Autocast has other lists of operations for a GPU than for the CPU, so that results are rounded elsewhere: by
    # 2^-8 of a number, several times over.
    "bf16": Setting(
        {"precision": "bfloat16", "gradient_checkpointing": True},
        model={"dtype": "bfloat16"},
        tolerance=0.05,
        proportional=True,
    ),
    "lora": Setting(PARTS | {"gradient_checkpointing": True, "lora": {"rank": 4}}, KL, layered=True),
    "full": Setting(PARTS, KL, apart=True),
}
"""bf16 has float32 copies of the weights (`master_weights`); lora and full have KL penalty, offloading, micro-batches;
full keeps its reference policy as a second set of weights."""


@dataclass
class Counted:
    """Synchronisations and copies."""

    syncs: int
    copies: int
    lines: list[str]

    @classmethod
    def since(cls, before: Counter[Any]) -> Counted:
        seen = events.since(before)
        return cls(*events.totals(seen), events.lines(seen))


@dataclass
class Result:
    """What came of a case: numbers by name, and what was counted in each part of it."""

    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, Counted] = field(default_factory=dict)

    def take(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.numbers[name] = tensor.detach().cpu().double().numpy().copy()

    def metrics(self, name: str, metrics: dict[str, float]) -> None:
        # The largest ratio and its error are those of one entry: they say nothing that the others do not.
        self.numbers[name] = np.array([metrics[each] for each in sorted(metrics)])


def names(family: Family) -> list[str]:
    """Return the settings that a family can have."""
    return [
        name
        for name, setting in SETTINGS.items()
        if (family.layered or not setting.layered) and (family.samples or "kl_coef" not in setting.algorithm)
    ]


def make_engine(family: Family, setting: Setting, device: str, folder: Path, saved: Path | None = None) -> Any:
    """Return the model's config and an engine."""
    simulator = SimulatorSpec(
        tasks=TASKS,
        actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0)),),
        cameras=family.cameras,
        image_size=(IMAGE, IMAGE) if family.cameras else None,
        proprio_dim=3,
        max_episode_steps=10,
        control_frequency=1.0,
    )
    config = build_section(ModelConfig, family.options | (setting.model if family.layered else {}))
    engine = setting.engine | {"device": device}
    # With the default eps AdamW moves a weight whose gradient is nothing but rounding as far as any other.
    engine["optimizer"] = {"eps": 1.0, "lr": family.lr} if setting.proportional else {"eps": 1e-2, "lr": 1e-3}
    if not family.layered:
        engine.pop("gradient_checkpointing", None)
    if device == "cpu":
        engine.pop("offload", None)  # changes no number, and on the CPU wants a disk that is no memory
    made = learning_engine(
        build_policy(config, simulator, chunk_size=family.chunk, seed=1),
        config=build_section(EngineConfig, engine),
        algorithm=OnPolicyConfig(
            name="ppo", epochs=2, minibatches=2, logprob_level=Level.token, entropy_coef=0.01, **setting.algorithm
        ),
        iterations=4,
        seed=1,
        saved=saved,
        folder=folder,
    )
    return config, made


def observe(family: Family) -> Observation:
    draw, images = np.random.default_rng(0), None
    if family.cameras:
        images = draw.integers(0, 256, (SIZE, len(family.cameras), IMAGE, IMAGE, 3), dtype=np.uint8)
    return Observation(
        images=images,
        proprio=draw.normal(size=(SIZE, 3)).astype(np.float32),
        task_descriptions=[DESCRIPTIONS[i % 2] for i in range(SIZE)],
    )


def make_batch(engine: LearningEngine, observation: Observation) -> dict[str, Any]:
    """Return decisions of the engine's own policy as a rollout's batch, on the CPU."""
    output, chunk = engine.act(observation, "train"), engine.policy.spec.chunk_size
    # Log-probs that belong to whole chunks count like those of as many actions.
    counts = torch.ones(SIZE, chunk, dtype=torch.bool) if output.counted is None else output.counted.cpu().clone()
    entries = (*counts.shape, output.logprobs.shape[1] // counts.shape[1])
    columns = {
        "task_index": torch.arange(SIZE) % 2,
        "trace": {name: value.cpu().clone() for name, value in output.trace.items()},
        "version": torch.full((SIZE,), engine.version),
        "sequence": torch.arange(SIZE),
        "executed": counts,
        "valid": counts.unsqueeze(2).expand(entries).clone(),
        "weights": torch.full(entries, 1 / (SIZE * chunk)),
        "advantages": torch.linspace(-1, 1, SIZE)[:, None, None].expand(entries).clone(),
        "returns": torch.ones(SIZE),
        "old_logprobs": output.logprobs.cpu().view(entries).clone(),
        "old_values": output.values.cpu().clone(),
        "proprio": torch.from_numpy(observation.proprio),
    }
    if observation.images is not None:
        columns["images"] = torch.from_numpy(observation.images)
    return columns


def leave_large(engine: LearningEngine, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose images and traces are fetched when they are learned from."""
    large = {f"trace/{name}": column for name, column in batch["trace"].items()}
    large |= {"images": batch["images"]} if "images" in batch else {}
    others = {name: column for name, column in batch.items() if name not in ("images", "trace")}
    return others | {ADDRESS: engine.exchange.put(large)}


def play(family: Family, setting: Setting, device: str, folder: Path) -> Result:
    """Act, learn, save, resume and export."""
    if family.module is not None:
        sys.path.append(str(events.REPOSITORY / "examples"))
        importlib.import_module(family.module)
    folder.mkdir()
    result = Result()
    config, engine = make_engine(family, setting, device, folder)
    observation = observe(family)
    act(engine, observation, result, ["train", "eval"] if family.samples else ["eval"])
    if family.samples:
        batch = make_batch(engine, observation)
        update(engine, leave_large(engine, batch) if setting.apart and device == "cuda" else batch, result)
    if family.imitates:
        # By a policy of its own where there was RL: a run does either.
        learner = make_engine(family, setting, device, folder)[1] if family.samples else engine
        actions = np.random.default_rng(3).uniform(-1, 1, (SIZE, engine.policy.spec.chunk_size, 2))
        result.metrics(
            "sft", learner.learner.imitation.learn([Batch(observation=observation, actions=actions.astype(np.float32))])
        )
        for name, parameter in learner.policy.named_parameters():
            result.take(f"imitating {name}", parameter)

    saved, exported = folder / "saved", folder / "exported"
    saved.mkdir()
    exported.mkdir()
    save_policy(engine.full_policy(), saved, config)
    _, resumed = make_engine(family, setting, device, folder, saved)
    resumed.load_state_dict(engine.state_dict())
    resumed.load_noise(engine.noise_state())
    for name, each in {"act": engine, "act, resumed": resumed}.items():
        result.take(f"{name} after", each.act(observation, "train" if family.samples else "eval").actions)
    check_places(resumed, device)
    # Adapters are merged into the weights.
    merge(resumed.policy)
    resumed.policy.save(exported, config)
    for file in sorted(exported.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            result.take(f"exported {name}", tensor)
    return result


def act(engine: LearningEngine, observation: Observation, result: Result, modes: list[Any]) -> None:
    """Choose actions: by the engine, and by the policy alone, which is what a CUDA graph would record."""
    for mode in modes:
        before = events.SEEN.copy()
        output = engine.act(observation, mode)
        result.counts["decision"] = Counted.since(before)
        for name in ("actions", "logprobs", "values"):
            result.take(f"{name} {mode}", getattr(output, name))
        with engine.rollout_mode(), torch.inference_mode(), engine.computing:
            inputs = engine.policy.preprocess(PolicyObservation.of(observation))
            generator = torch.Generator(engine.device).manual_seed(5)
            before = events.SEEN.copy()
            engine.policy.act(inputs, mode, generator)
            result.counts[f"Policy.act {mode}"] = Counted.since(before)
    roll_out(engine, observation, result, modes[0])


def roll_out(engine: LearningEngine, observation: Observation, result: Result, mode: Any) -> None:
    """Make decisions one after the other. On a GPU the second is recorded as a graph, and the third is its replay."""
    noise = torch.Generator(engine.device).manual_seed(7)
    with engine.rollout_mode():
        for number in range(3):
            seen = observation.take(np.roll(np.arange(SIZE), number))
            output = engine.act(seen, mode, noise)
            if engine.precision is torch.float32:  # probabilities that are rounded elsewhere can draw another token
                result.take(f"actions {mode} of decision {number}", output.actions)
                result.take(f"logprobs {mode} of decision {number}", output.logprobs)
        if engine.device.type == "cuda" and engine.policy.acts_on_device:
            assert engine.graphs.warning is None, engine.graphs.warning
            assert len(engine.graphs._recorded) == 1


def update(engine: LearningEngine, batch: dict[str, Any], result: Result) -> None:
    """Make an update. An optimiser step is counted from the end of the backward pass before it to the end of its own:
    what an update does once is not part of it."""
    begins: list[Counter[Any]] = []
    step = engine.optimizer_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        begins.append(events.SEEN.copy())
        return step(*args, **kwargs)

    engine.optimizer_step = counted
    before = events.SEEN.copy()
    result.metrics("update", engine.learner.update(batch, DESCRIPTIONS))
    result.counts["update"] = Counted.since(before)
    seen = begins[-1] - begins[-2]
    result.counts["optimiser step"] = Counted(*events.totals(seen), events.lines(seen))


def check_places(engine: LearningEngine, device: str) -> None:
    """Raise an error if a part of the policy is not where the engine is."""
    for name, tensor in [*engine.policy.named_parameters(), *engine.policy.named_buffers()]:
        if tensor.device.type != device:
            raise RuntimeError(f"{name} is on {tensor.device}, not on {device}")


def difference(one: Result, other: Result) -> tuple[float, str]:
    """Return the largest difference, of 1 or of the number if that is larger, and of which numbers it is."""
    assert one.numbers.keys() == other.numbers.keys()
    worst = (0.0, "nothing")
    for name, numbers in one.numbers.items():
        distance = np.abs(numbers - other.numbers[name]) / np.maximum(1.0, np.abs(other.numbers[name]))
        assert np.isfinite(distance).all(), f"{name} is not finite"
        worst = max(worst, (float(distance.max(initial=0.0)), name))
    return worst


def modules(chosen: list[str]) -> list[str]:
    """Return what these families need. Some libraries look for GPUs when they are imported, so it must be before there
    is one."""
    needed = ["torch._dynamo", "torch.distributed.fsdp", "torch.optim"]
    if any(FAMILIES[name].layered for name in chosen):
        needed += ["embodyrl.models.libraries", "peft", "torch._inductor.utils"]
    names = [FAMILIES[name].options["name"] for name in chosen if FAMILIES[name].module is None]
    return needed + [str(SupportedModel.entry(name).target).partition(":")[0] for name in names]


def load_families(chosen: list[str]) -> None:
    """Import it."""
    for name in modules(chosen):
        importlib.import_module(name)
