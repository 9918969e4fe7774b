"""Steering: a small network chooses the noise that a frozen flow policy turns into actions, DSRL (Wagenmakers et al.
2025, arXiv:2506.15799).

The flow policy is a deterministic function from noise to actions, so that noise can be learned in place of actions. Its
weights stay, no gradient goes through them, and what it sees once it never has to see again: learning needs only its
features of an observation, which are stored.

Shapes: `B` samples, `H` actions of the horizon, `A` numbers of an action in the network, `C` actions and `D` numbers
that are executed; `R` rows of noise that are chosen, `N = R*A`; `F` features.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.config.schema import ModelConfig
from embodyrl.files import link_or_copy
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import SteeringConfig
from embodyrl.models.flow.denoising import prior
from embodyrl.models.flow.policy import HEADS_FILE, FlowPolicy, guidable
from embodyrl.models.mlp.network import MODULES, build_network
from embodyrl.models.mlp.options import Activation
from embodyrl.models.mlp.policy import ATANH_INSIDE
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Mode, ParallelPlan, PolicyObservation, SoftPolicy
from embodyrl.models.sampling import Squashed
from embodyrl.models.saved import STEERING_FILE, weight_files, write_description
from embodyrl.models.weights import read_heads, write_heads
from embodyrl.seeding import derive_seed

FEATURES, NOISE = "features", "noise"
"""Names in traces and replays."""
LARGEST = 6.0e4
"""Largest feature that is stored; float16 ends at 65504."""
SMALLEST_DEVIATION = 1.0e-3
"""Smallest standard deviation by which features are divided."""

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes features `[B, F]`; returns noise `[B, H, A]`, and log-probabilities of what was chosen of it `[B, N]`."""


class Steering(nn.Module):
    """The network that chooses noise: Gaussians over `N` numbers, squashed into -1 .. 1.

    Args:
        features: `F`.
        size: `N`.
        hidden_sizes: widths of its hidden layers.
    """

    def __init__(self, features: int, size: int, hidden_sizes: list[int]) -> None:
        super().__init__()
        self.normalizer = RunningNormalizer(features, SMALLEST_DEVIATION)
        # A standard deviation of 1 before tanh is about as wide as the noise that the flow policy was trained with.
        self.head = Squashed(size, log_std=0.0)
        self.actor = build_network([features, *hidden_sizes, self.head.outputs], MODULES[Activation.relu], 0.01)

    def forward(self, features: Tensor) -> Tensor:
        """Return the parameters of the Gaussians `[B, 2*N]` for features `[B, F]` as they are stored."""
        with torch.autocast(features.device.type, enabled=False):
            outputs: Tensor = self.actor(self.normalizer(features.float()))
        return outputs


class SteeredPolicy(SoftPolicy):
    """A frozen flow policy whose noise is chosen. Until it begins to learn, it is that policy: noise is what that one
    would draw, or in evaluation take.

    The trace of `act` has `features [B, F]`, float16, and `noise [B, R, A]`: the decision.

    Args:
        base: changed in place: no weight of it requires gradients any more.
        config: of the network that chooses.

    Raises:
        PolicyError: more rows are to be chosen than there are.
    """

    decided = NOISE
    scaled = FEATURES
    trace_holds_images = True
    keeps_features = True

    def __init__(self, base: FlowPolicy, config: SteeringConfig) -> None:
        super().__init__(config, None, base.spec.chunk_size)  # type: ignore[arg-type]
        self.base = base.requires_grad_(False)
        self.name, self.spec, self.config = base.name, base.spec, config
        self.acts_on_device, self.reads_on_host = base.acts_on_device, base.reads_on_host
        self.noise_shape = base.sizes.noise(config, self.spec.chunk_size)
        if self.noise_shape[0] > base.sizes.horizon:
            raise PolicyError(
                f"algorithm.off_policy.steering.rows = {self.noise_shape[0]}, but model {self.name!r} has a horizon of "
                f"{base.sizes.horizon} actions: set it to that number or less"
            )
        self.plan_shape = base.plan_shape
        self.feature_dim = base.sizes.features(self.spec.chunk_size, self.spec.action_dim)
        self.steering = Steering(self.feature_dim, self.decision_size, config.hidden_sizes)
        self.has_begun = False
        """Whether there are statistics of features, by which noise is chosen."""

    # ---- acting

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """See `Policy.preprocess`; what the flow policy needs, or without images, which features replace, nothing."""
        return {} if observation.images is None else self.base.preprocess(observation)

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; denoising has no random step, in training neither."""
        if not self.has_begun:
            return self._decide(inputs, lambda seen: self._of_base(len(seen), mode, generator))
        return self._decide(inputs, lambda seen: self._chosen(seen, mode, generator))

    def explore(self, inputs: Inputs, generator: torch.Generator) -> ActOutput:
        """See `SoftPolicy`: chunks of the flow policy, for noise as it draws it."""
        return self._decide(inputs, lambda seen: self._of_base(len(seen), "train", generator))

    def _decide(self, inputs: Inputs, choose: Choose) -> ActOutput:
        """Choose noise and denoise it; images are encoded once."""
        with guidable(inputs) as inputs:
            condition = self.base.contrasted(inputs)
            seen = self._look(condition, inputs)
            noise, logprobs = choose(seen)
            decision = self.base.decide(condition, inputs, "eval", start=noise)
        chosen = noise[:, : self.noise_shape[0]]
        return ActOutput(
            actions=decision.actions,
            logprobs=logprobs,
            values=None,
            trace={FEATURES: seen, NOISE: chosen},
            plan=decision.plan,
        )

    def _look(self, condition: Any, inputs: Inputs) -> Tensor:
        """Return features as they are stored, float16 `[B, F]`; acting rounds them, too."""
        seen = self.base.features(condition, len(next(iter(inputs.values()))))
        return seen.clamp(-LARGEST, LARGEST).half()

    def _of_base(self, batch: int, mode: Mode, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the noise of the flow policy's own; see `Choose`."""
        noise = self.base.starting_noise(batch, mode, generator)
        chosen = noise[:, : self.noise_shape[0]]
        return noise, prior(chosen).logprob(chosen).flatten(1)

    def _chosen(self, seen: Tensor, mode: Mode, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the noise that steering chooses; see `Choose`."""
        head, outputs = self.steering.head, self.steering(seen)
        sample = head.sample(outputs, generator) if mode == "train" else head.mode(outputs)
        return self.fill(self.config.limit * sample.tanh()), head.logprobs(outputs, sample)

    def fill(self, chosen: Tensor) -> Tensor:
        """Return the noise of the whole horizon `[B, H, A]` for numbers `[B, N]` that were chosen: the last row is
        repeated."""
        rows = chosen.view(-1, *self.noise_shape)
        return torch.cat([rows, rows[:, -1:].expand(-1, self.base.sizes.horizon - rows.shape[1], -1)], 1)

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`; only the trace is read. Log-probs are those of `act` but for the rounding of tanh."""
        head, outputs = self.steering.head, self.steering(trace[FEATURES])
        sample = self.to_unit(trace[NOISE]).clamp(-ATANH_INSIDE, ATANH_INSIDE).atanh()
        return EvalOutput(logprobs=head.logprobs(outputs, sample), entropy=head.entropy(outputs), values=None)

    # ---- learning

    @property
    def decision_size(self) -> int:
        """See `SoftPolicy`: numbers of noise."""
        rows, numbers = self.noise_shape
        return rows * numbers

    @property
    def learns_from_replay(self) -> bool:
        """See `SoftPolicy`."""
        return True

    @property
    def scaling(self) -> RunningNormalizer:
        """See `SoftPolicy`."""
        return self.steering.normalizer

    def encode(self, inputs: Inputs) -> Tensor:
        """See `SoftPolicy`; runs the flow policy's network up to the first step of denoising, unless features are among
        the inputs."""
        return self.encode_stored(inputs if FEATURES in inputs else {FEATURES: self.stored_features(inputs)})

    def stored_features(self, inputs: Inputs) -> Tensor:
        """Return the features of observations as they are stored, float16 `[B, F]`."""
        return self._look(self.base.contrasted(inputs), inputs)

    def encode_stored(self, stored: Inputs) -> Tensor:
        """See `SoftPolicy`."""
        seen: Tensor = self.steering.normalizer(stored[FEATURES].float())
        return seen

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See `SoftPolicy`."""
        return self.steering.head.draw(self.steering.actor(features), noise)

    def mode(self, features: Tensor) -> Tensor:
        """See `SoftPolicy`."""
        return self.steering.head.mode(self.steering.actor(features)).tanh()

    def errors(self, features: Tensor, actions: Tensor) -> Tensor:
        """See `SoftPolicy`.

        Raises:
            PolicyError: always, because nobody has demonstrated noise.
        """
        raise PolicyError("a policy that is steered through its noise cannot imitate actions: use sft before")

    def to_unit(self, decided: Tensor) -> Tensor:
        """See `SoftPolicy`. Noise of the flow policy's own may lie outside of -1 .. 1."""
        return (decided / self.config.limit).flatten(1)

    def update_statistics(self, inputs: Inputs) -> None:
        """Add `features [M, F]` to the statistics that scale them."""
        self.steering.normalizer.update(inputs[FEATURES])
        self.has_begun = True

    # ---- parts

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: the layers of the flow policy; what learns is a head."""
        blocks = tuple(f"base.{name}" for name in self.base.parallel_plan().blocks)
        return ParallelPlan(blocks=blocks, heads=("steering",))

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`."""
        return self.base.tokens_per_observation(task)

    def cache_bytes(self, task: str) -> int:
        """See `Policy.cache_bytes`."""
        return self.base.cache_bytes(task)

    # ---- files

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """See `Policy.options_to_save`."""
        return self.base.options_to_save(config)

    def save(self, folder: Path, config: ModelConfig, before: Path | None = None) -> None:
        """Write the flow policy's public layout into an existing folder, and beside it `steering.safetensors`, which
        `policy.json` describes. The weights of the flow policy are the files that it was read from, byte for byte.

        Args:
            folder: to write into.
            config: options of the flow policy.
            before: folder that this policy was saved in before; large files are linked to it, not copied again.
        """
        self.base.files.write(folder)
        if before is not None and before.is_dir():
            _carry(before, folder, link_or_copy)
        elif self.base.config.checkpoint is not None:
            _carry(Path(self.base.config.checkpoint), folder, shutil.copyfile)
        else:
            self.base.write_network(folder)
            self.base.save_heads(folder)
        write_heads({"steering": self.steering}, folder / STEERING_FILE)
        steering = dataclasses.asdict(dataclasses.replace(self.config, rows=self.noise_shape[0]))
        write_description(folder, self.options_to_save(config), self.spec, steering=steering)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; see `FlowPolicy.load` and `load_steering`."""
        self.base.load(folder)
        self.load_steering(folder)

    def load_steering(self, folder: Path) -> None:
        """Read the small network.

        Raises:
            PolicyError: it is missing, or its shapes differ.
        """
        if not (folder / STEERING_FILE).is_file():
            raise PolicyError(
                f"{folder} holds no {STEERING_FILE}, which its policy.json describes: give the `policy` "
                "folder of a checkpoint"
            )
        read_heads({"steering": self.steering}, folder / STEERING_FILE)
        self.weights_replaced()

    def weights_replaced(self) -> None:
        """See `Policy`: whether there are statistics of features."""
        self.has_begun = bool(self.steering.normalizer.count)


def _carry(source: Path, folder: Path, bring: Callable[[Path, Path], object]) -> None:
    """Bring the files of weights from one folder to another, and those of critic and noise network if it has any."""
    for path in [*weight_files(source), source / HEADS_FILE]:
        if path.is_file():
            bring(path, folder / path.name)


def steered(policy: Any, config: SteeringConfig, seed: int) -> SteeredPolicy:
    """Return a flow policy with a network that chooses its noise, which has random weights from `seed`.

    Raises:
        PolicyError: the policy is no flow policy.
    """
    if not isinstance(policy, FlowPolicy):
        raise PolicyError(f"model {policy.name!r} is no flow policy, so there is no noise to be chosen")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "steering"))
        return SteeredPolicy(policy, config)
