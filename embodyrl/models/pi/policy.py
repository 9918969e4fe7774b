"""pi0 and pi0.5 as policies.

Shapes: `B` samples, `V` images, `L` prompt tokens, `H` actions of the horizon, `A` numbers of an action in the
network, `C` actions and `D` numbers that are executed, `S` proprio dims.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.flow.denoising import TimeGrid
from embodyrl.models.flow.policy import Denoised, FlowPolicy
from embodyrl.models.lerobot import Robot
from embodyrl.models.pi.check import incompatibilities, with_defaults, written_numbers
from embodyrl.models.pi.checkpoint import CheckpointFiles, robot_of
from embodyrl.models.pi.config import DenoisingTimes, PiConfig, StateInput, ValueFrom
from embodyrl.models.pi.network import PaliGemma, Pi, Prefix, initialize
from embodyrl.models.pi.prompts import Prompts, read_tokenizer
from embodyrl.models.policy import Inputs, ParallelPlan, PolicyObservation
from embodyrl.models.vla.cameras import choose_cameras
from embodyrl.models.vla.config import Frozen
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.folder import CONFIG, choose_key, described_by
from embodyrl.models.vla.processor import Normalizer, read_state, shown_images
from embodyrl.models.vla.resize import resize
from embodyrl.models.weights import Naming, write_single_file
from embodyrl.registry import SupportedModel

Network = TypeVar("Network", bound=PaliGemma)
REMEDY = "choose statistics (model.unnorm_key) of this robot, or its matching controller"


@dataclass(frozen=True)
class EncodedPrefix:
    """Encoded observation, the input of every denoising step."""

    prefix: Prefix
    state: Tensor
    """`[B, S]`, normalised and padded."""


class PiPolicy(FlowPolicy):
    """pi0 or pi0.5: a chunk of actions from images, a task description and a state.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null."""

    config: PiConfig
    network: Pi
    files: CheckpointFiles

    def __init__(self, config: PiConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        self.config = config = with_defaults(config, self.files)
        self.architecture = self.files.architecture(config.name)
        robot = self._choose_robot(simulator, chunk_size)
        make = partial(Pi, self.architecture)
        self.network = build_network(make, initialize, random=config.checkpoint is None).to(self.dtype)
        self.set_up_robot(robot, simulator, chunk_size, REMEDY)
        self.cameras = choose_cameras(
            config.cameras, None if simulator is None else simulator.cameras, self.architecture.images
        )
        self.prompts = Prompts(
            read_tokenizer(*self.files.tokenizer), config.prompt_length or self.architecture.prompt_length
        )
        written = written_numbers(config, len(self.states), self.architecture.state_dim)
        self.written: WrittenStates | None = None
        if written is not None:
            self.written = WrittenStates(copy.deepcopy(self.states), written)
            self.reads_on_host = frozenset({"proprio"})
        if simulator is not None:
            self.prompts.check(told_texts(simulator.tasks.values(), config.indicator), written)
        width, seen = self.architecture.expert.width, self.architecture.language.width
        self.set_up_flow(
            TimeGrid.falling(config.denoising_steps, summed=config.denoising_times is DenoisingTimes.summed),
            horizon=self.architecture.horizon,
            action_dim=self.architecture.action_dim,
            width=width,
            value_width=width if config.value_from is ValueFrom.expert else seen,
        )
        self._freeze()

    def _choose_robot(self, simulator: SimulatorSpec | None, chunk_size: int) -> Robot:
        """Return the robot in the statistics, after checking that it fits the simulator."""
        there, statistics = SimulatorSizes.of(simulator), self.files.statistics
        chosen = statistics[choose_key(statistics, self.config.unnorm_key)]
        robot = robot_of(chosen, self.config, self.files, there)
        horizon, most = self.architecture.horizon, (self.architecture.state_dim, self.architecture.action_dim)
        relative = self.config.relative_action_dims
        for issue in incompatibilities(horizon, chunk_size, robot, there, relative, most):
            raise PolicyError(f"{issue.message}: {issue.hint}")
        return robot

    def _freeze(self) -> None:
        """Freeze the parts that the options name, and weights that affect neither actions nor values."""
        network, frozen = self.network, self.config.frozen
        reads_prefix = self.config.value_from is ValueFrom.prefix and not self.config.detach_critic
        for name, parameter in network.named_parameters():
            last = f"language.layers.{self.architecture.language.layers - 1}."
            after = (f"{last}self_attn.q", f"{last}self_attn.o", f"{last}post", f"{last}mlp", "language.norm")
            still = (
                name.startswith("expert_lm_head")
                or (name == "state_proj.weight" and self.config.state is StateInput.none)
                or (name.startswith(after) and not reads_prefix)
                or (frozen is not Frozen.nothing and name.startswith("vision."))
                or (frozen is Frozen.language and name.startswith(("projector.", "embed_tokens.", "language.")))
            )
            parameter.requires_grad_(not still)

    # ------------------------------------------------------------------------------------------------------- inputs

    def read(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V, 3, h, h]` in [-1, 1], `input_ids [B, L]`, `attention_mask [B, L]`, `state [B, S]`
        normalised and padded, and, if actions are relative to it, `proprio [B, S]`.

        Raises:
            PolicyError: images or states are missing, or have another shape than the model takes.
        """
        device = self.start.device
        images = shown_images(observation.images, self.cameras)
        descriptions = observation.task_descriptions
        state = self.padded_state(observation.proprio, len(descriptions), self.architecture.state_dim)
        written = None if self.written is None else self.written(observation.proprio)
        ids, mask = self.prompts.batch(descriptions, written)
        inputs = {
            "pixel_values": pixel_values(images, self.architecture.image_size, device),
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
            "state": torch.zeros_like(state) if self.config.state is StateInput.none else state,
        }
        if self.config.relative_action_dims:
            inputs["proprio"] = read_state(observation.proprio, len(self.states), device)
        return inputs

    # ----------------------------------------------------------------------------------------------------- the network

    def condition(self, inputs: Inputs) -> EncodedPrefix:
        """See `FlowPolicy.condition`."""
        images = inputs["pixel_values"]
        there = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.frozen is not Frozen.language):
            prefix = self.network.read(
                images.to(self.dtype), there, inputs["input_ids"], inputs["attention_mask"].bool()
            )
        return EncodedPrefix(prefix, inputs["state"].to(self.dtype))

    def denoise(self, condition: EncodedPrefix, x: Tensor, time: Tensor) -> Denoised:
        """See `FlowPolicy.denoise`."""
        velocity, hidden = self.network(condition.prefix, x.to(self.dtype), time, condition.state)
        return Denoised(velocity.float(), hidden)

    def value_features(self, condition: EncodedPrefix, denoised: Denoised) -> Tensor:
        """Return the mean of the action expert's outputs, or of the language model's outputs for the prefix."""
        if self.config.value_from is ValueFrom.expert:
            return denoised.hidden.float().mean(1)
        # A mean over real tokens: padding would pull the features of short prompts towards 0.
        there = condition.prefix.mask.unsqueeze(-1)
        return (condition.prefix.hidden.float() * there).sum(1) / there.sum(1)

    # --------------------------------------------------------------------------------------------------------- actions

    def finish(self, x: Tensor, inputs: Inputs) -> Tensor:
        """See `FlowPolicy.finish`."""
        own = self.actions.unnormalize(x[:, : self.spec.chunk_size, : self.spec.action_dim])
        actions: Tensor = self.units(own + relative_origin(inputs, self.config.relative_action_dims, own))
        return actions

    def sft_targets(self, actions: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.sft_targets`. Repeated actions at the end of the horizon have weight 0; zeros that pad an
        action have weight 1, because public code trains them as well."""
        own = self.units.inverse(actions).float()
        # Public statistics of relative actions are those of the differences, so the state is taken off first.
        normalized = self.actions.normalize(own - relative_origin(inputs, self.config.relative_action_dims, own))
        data = self.fill_horizon(normalized)
        counts = torch.ones_like(data)
        counts[:, actions.shape[1] :] = 0.0
        return data, counts

    # ----------------------------------------------------------------------------------------------------------- parts

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`; tokens of the language model: images and prompt."""
        patches = (self.architecture.image_size // int(self.architecture.vision["patch_size"])) ** 2
        return len(self.cameras.used) * patches + self.prompts.length

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are the layers of the three transformers; adapters go to the language
        model, and the action expert is trained in full beside them."""
        return ParallelPlan(
            blocks=self.modules_named(r"network\..*layers\.\d+"),
            adaptable=self.linear_layers("network.language."),
            heads=self.parts_beside(
                *(f"network.{part}" for part in ("vision", "projector", "embed_tokens", "language"))
            ),
            root="network",
        )

    # ----------------------------------------------------------------------------------------------------------- files

    @property
    def naming(self) -> Naming:
        """See `FlowPolicy.naming`."""
        return Naming(public=self.files.layout.public, own=self.files.layout.own)

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """See `Policy.options_to_save`; conventions of prompts and times come from the files of the model."""
        assert isinstance(config, PiConfig)
        kept = SupportedModel.entry(config.name).kept
        return dataclasses.replace(config, **{name: getattr(self.config, name) for name in kept})

    def write_network(self, folder: Path) -> None:
        """See `FlowPolicy.write_network`."""
        write_single_file(self.network, folder, self.naming)


def build_network(make: Callable[[], Network], fill: Callable[[Network], None], *, random: bool) -> Network:
    """Build a network with the random weights that `fill` draws, or with parameters on the meta device."""
    if random:
        network = make()
        fill(network)
        return network
    with torch.device("meta"), described_by(CONFIG):
        network = make()
    positions = network.vision.embeddings.position_ids  # not a parameter, so not in checkpoints
    network.vision.embeddings.position_ids = torch.arange(positions.shape[-1]).view(positions.shape)
    return network


def relative_origin(inputs: Inputs, entries: int, actions: Tensor) -> Tensor | float:
    """Return the state (`proprio`) that the first `entries` numbers of actions `[B, C, D]` are relative to."""
    if entries == 0:
        return 0.0
    return functional.pad(inputs["proprio"][:, None, :entries], (0, actions.shape[2] - entries))


def letterbox(images: Tensor, side: int) -> Tensor:
    """Resize `images [M, H, W, 3]` in uint8 to fit a black square, centred: `[M, side, side, 3]`."""
    ratio = max(images.shape[1:3]) / side
    height, width = (int(length / ratio) for length in images.shape[1:3])
    resized = resize(images, (height, width), Image.Resampling.BILINEAR)
    left, top = (side - width) // 2, (side - height) // 2
    return functional.pad(resized, (0, 0, left, side - width - left, top, side - height - top))


def pixel_values(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, side, side]` float32 in [-1, 1]."""
    flat = letterbox(images.flatten(0, 1).to(device), side)
    numbers = flat.permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
    return torch.unflatten(numbers, 0, images.shape[:2])


# ------------------------------------------------------------------------------------------------- processing of inputs


class WrittenStates:
    """States as prompts contain them. Computed on the CPU, where tokenizers are, wherever the policy is: this is no
    module, so that its numbers stay where they were made.

    Args:
        ranges: normalizes them.
        width: numbers in a prompt; zeros follow the state.
    """

    def __init__(self, ranges: Normalizer, width: int) -> None:
        self._ranges, self._width = ranges, width

    def __call__(self, proprio: Tensor | None) -> list[NDArray[np.float32]]:
        """Return `B` normalised states `[width]`.

        Raises:
            PolicyError: the states are missing, or have another size.
        """
        state = self._ranges.normalize(read_state(proprio, len(self._ranges), self._ranges.origin.device))
        return [*functional.pad(state, (0, self._width - state.shape[1])).cpu().numpy()]
