"""GR00T N1.5 as a policy.

Shapes: `B` samples, `V` images, `L` prompt tokens, images included, `H` actions of the horizon, `A` numbers of an
action in the network, `C` actions that are executed, `D` their numbers, `S` numbers of a state.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models import lerobot
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.flow.denoising import TimeGrid
from embodyrl.models.flow.policy import Denoised
from embodyrl.models.gr00t.check import incompatibilities, robot_of, writer
from embodyrl.models.gr00t.checkpoint import CheckpointFiles, NormStats, Robot
from embodyrl.models.gr00t.config import (
    Architecture,
    Gr00tConfig,
    Interpolation,
    Normalization,
    ValueInput,
    embodiment_number,
)
from embodyrl.models.gr00t.flow import Gr00tFlow
from embodyrl.models.gr00t.head import Condition, Embodiment
from embodyrl.models.gr00t.network import NAMING, Gr00tNetwork
from embodyrl.models.gr00t.prompts import Prompts
from embodyrl.models.lerobot import Scale
from embodyrl.models.policy import Inputs, PolicyObservation
from embodyrl.models.saved import with_kept
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.padding import causal_mask
from embodyrl.models.vla.processor import check_images
from embodyrl.models.weights import write_weights


class Gr00tPolicy(Gr00tFlow):
    """GR00T N1.5: a chunk of actions from images, a task description and a state.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null."""

    config: Gr00tConfig
    network: Gr00tNetwork
    files: CheckpointFiles
    prompts: Prompts
    num_images: int | None
    """Images of an observation; None: the first one tells, because neither simulator nor checkpoint does."""
    value_changes = False

    def __init__(self, config: Gr00tConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        if config.checkpoint is not None:
            config = with_kept(config, Path(config.checkpoint))
        super().__init__(config, simulator, chunk_size)
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        sizes = self.files.architecture
        robot = robot_of(self.files.metadata, self.files.origin, config)
        if robot.cameras is None and simulator is not None:
            self.files = self.files.with_cameras(robot.tag, simulator.cameras)
        self.num_images = _fit(robot, sizes, chunk_size, simulator)
        self.embodiment: Embodiment = embodiment_number(robot.tag, config.embodiment_id, sizes.embodiments)
        if config.checkpoint is None:
            self.network = Gr00tNetwork(sizes)
        else:
            self.network = Gr00tNetwork.on_meta(sizes)
        for parameter in self.network.parameters():  # not the rotary frequencies, which are no parameters
            parameter.data = parameter.data.to(self.dtype)
        self.network.backbone.eagle_model.freeze(vision=config.freeze_vision, language=config.freeze_language)
        scales = lerobot.Robot(
            states=scale_of(robot.state, config.state_normalization),
            actions=scale_of(robot.action, config.action_normalization),
        )
        remedy = "choose statistics (model.embodiment_tag, model.action_keys) of this robot"
        self.set_up_robot(scales, simulator, chunk_size, remedy)
        self.images = ImagePipeline(
            sizes.vision["image_size"], center_crop=config.center_crop, interpolation=config.interpolation
        )
        if simulator is None or self.images.resizes(simulator.image_size):
            self.reads_on_host = frozenset({"images"})
        self._tasks = [] if simulator is None else told_texts(simulator.tasks.values(), config.indicator)
        if self.num_images is not None:
            self.expect_images(self.num_images)
        sees_state = config.value_input is ValueInput.vl_and_state
        self.set_up_flow(
            TimeGrid.rising(config.denoising_steps),
            horizon=sizes.action_horizon,
            action_dim=sizes.max_action_dim,
            width=sizes.dit_outputs,
            value_width=sizes.width + sizes.dit.width * sees_state,
        )

    # ------------------------------------------------------------------------------------------------------- inputs

    def expect_images(self, count: int) -> None:
        """Set up prompts about so many images per observation."""
        self.num_images = count
        self.prompts = Prompts(
            self.files.companions,
            write=writer(self.config, count, self.network.sizes),
            image_token=self.network.sizes.image_token,
            images=count,
            tasks=self._tasks,
            length=self.config.prompt_length,
            padding=self.config.padding,
        )

    def read(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V, 3, h, h]`, `input_ids [B, L]`, `attention_mask [B, L]`, and `state [B, 1, S]`,
        normalised and padded.

        Raises:
            PolicyError: images or state are missing, or have another type, shape or number than the model takes.
        """
        device = self.start.device
        images = check_images(observation.images, self.num_images)
        if self.num_images is None:
            self.expect_images(images.shape[1])
        ids, mask = self.prompts.batch(observation.task_descriptions)
        return {
            "pixel_values": self.images(images, device),
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
            "state": self.padded_state(observation.proprio, len(ids), self.network.sizes.max_state_dim).unsqueeze(1),
        }

    # ------------------------------------------------------------------------------------------------------ denoising

    def condition(self, inputs: Inputs) -> Condition:
        """See `FlowPolicy.condition`."""
        images = inputs["pixel_values"].flatten(0, 1).to(self.dtype)
        features = self.network.backbone(images, inputs["input_ids"], causal_mask(inputs["attention_mask"]))
        return self.network.action_head.condition(features, inputs["state"].to(self.dtype), self.embodiment)

    def value_features(self, condition: Condition, denoised: Denoised) -> Tensor:
        """See `FlowPolicy.value_features`; the mean over all tokens of images and task description, and the state."""
        features = condition.context.mean(dim=1)
        if self.config.value_input is ValueInput.vl_and_state:
            features = torch.cat([features, condition.state.squeeze(1)], dim=-1)
        return features

    def learning_times(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.learning_times`."""
        scale = self.network.sizes.noise_scale
        time = (scale - draws) / scale
        return time, 1.0 - time

    # --------------------------------------------------------------------------------------------------------- outputs

    def sft_targets(self, actions: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.sft_targets`. If the horizon is longer than the demonstrated chunk, the last action is
        repeated and has weight 1, as in public training."""
        data = self.fill_horizon(self.actions.normalize(self.units.inverse(actions).float()))
        counts = torch.zeros_like(data)
        counts[..., : len(self.actions)] = 1.0
        return data, counts

    # ----------------------------------------------------------------------------------------------------------- parts

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`; tokens of the backbone, images included."""
        return int(self.prompts.batch([task])[0].shape[1])

    # ----------------------------------------------------------------------------------------------------------- files

    naming = NAMING

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """See `Policy.options_to_save`; the length of prompts was determined from the tasks."""
        assert isinstance(config, Gr00tConfig)
        length = config.prompt_length if self.num_images is None else self.prompts.length
        return dataclasses.replace(config, prompt_length=length)

    def write_network(self, folder: Path) -> None:
        """See `FlowPolicy.write_network`; NVIDIA's layout."""
        write_weights(self.network, folder, NAMING)


def _fit(robot: Robot, sizes: Architecture, chunk_size: int, simulator: SimulatorSpec | None) -> int | None:
    """Check that a checkpoint fits a simulator, and return the number of images per observation, if it is known.

    Raises:
        PolicyError: it does not fit, or there are no images.
    """
    cameras = robot.cameras if simulator is None else simulator.cameras
    images = None if cameras is None else len(cameras)
    if images == 0:
        raise PolicyError("the model needs images", "set env.cameras")
    for issue in incompatibilities(robot, sizes, chunk_size, images, SimulatorSizes.of(simulator)):
        raise PolicyError(f"{issue.message}: {issue.hint}")
    return images


CROP = 0.95
"""Share of the image's sides that a centre crop keeps."""


# ------------------------------------------------------------------------------------------------- processing of inputs


class ImagePipeline(nn.Module):
    """Crops, resizes and normalises images. Resizing always runs on the CPU and ends in whole numbers, so that rollouts
    and learning get the same pixels."""

    def __init__(self, side: int, *, center_crop: bool, interpolation: Interpolation) -> None:
        super().__init__()
        self.side, self._center_crop, self._mode = side, center_crop, interpolation

    def resizes(self, size: tuple[int, int] | None) -> bool:
        """Return whether images of a size (height, width) are resized."""
        return self._center_crop or size != (self.side, self.side)

    def forward(self, images: Tensor, device: torch.device) -> Tensor:
        """Convert `images [B, V, H, W, 3]` in uint8 to `pixel_values [B, V, 3, h, h]` in float32."""
        planes = images.flatten(0, 1).permute(0, 3, 1, 2)
        if self._center_crop:
            planes = _crop(planes)
        if planes.shape[-2:] != (self.side, self.side):
            planes = self._resize(planes.cpu())
        normalized = (planes.to(device).float() / 255.0 - 0.5) / 0.5
        return torch.unflatten(normalized, 0, images.shape[:2])

    def _resize(self, planes: Tensor) -> Tensor:
        """Resize `[M, 3, H, W]` to `[M, 3, h, h]`, both in uint8.

        Isaac-GR00T's bilinear resizing computes in fractions and truncates the result, so that images are half a grey
        level darker on average than rounded ones. Eagle's processor, which LeRobot uses for bicubic resizing, rounds.
        """
        fractions = self._mode is Interpolation.bilinear
        numbers = planes.contiguous().float() / 255.0 if fractions else planes  # a third faster than channels last
        size = (self.side, self.side)
        resized = functional.interpolate(numbers, size, mode=self._mode.value, antialias=True, align_corners=False)
        return (resized * 255).to(torch.uint8) if fractions else resized


def _crop(planes: Tensor) -> Tensor:
    """Return the centre crop of `[M, 3, H, W]`."""
    height, width = (int(CROP * side) for side in planes.shape[-2:])
    top, left = (round((side - kept) / 2) for side, kept in zip(planes.shape[-2:], (height, width), strict=True))
    return planes[..., top : top + height, left : left + width]


def scale_of(ranges: NormStats, mode: Normalization) -> Scale:
    """Return the normalisation of a robot's state or action.

    Args:
        ranges: its statistics.
        mode: min_max: -1 and 1 are the ends of the range. mean_std: mean 0, standard deviation 1.
    """
    low, high, mean, std = (
        np.array(column, np.float64) for column in (ranges.min, ranges.max, ranges.mean, ranges.std)
    )
    if mode is Normalization.mean_std:
        return Scale(mean, std, std)
    half_width = 0.5 * (high - low)
    return Scale(0.5 * (low + high), half_width, half_width)
