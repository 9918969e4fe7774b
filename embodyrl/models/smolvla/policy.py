"""SmolVLA as a policy.

Shapes: `B` samples, `V` images, `P` tokens of an image, `E` width of the language model, `L` tokens of a task
description, `T` actions of the horizon, `A` numbers of an action in the network, `C` actions and `D` numbers that are
executed, `S` numbers of a state in the network.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.flow.denoising import TimeGrid
from embodyrl.models.flow.policy import Denoised, FlowPolicy
from embodyrl.models.policy import (
    ACTION_WEIGHTS,
    SAMPLE_WEIGHTS,
    ActOutput,
    Inputs,
    Mode,
    ParallelPlan,
    PolicyObservation,
)
from embodyrl.models.saved import PUBLISHED
from embodyrl.models.smolvla.check import incompatibilities
from embodyrl.models.smolvla.checkpoint import CheckpointFiles, own_name, public_name
from embodyrl.models.smolvla.config import SmolVLAConfig
from embodyrl.models.smolvla.network import Prefix, SmolVLA, initialize, keep_wide
from embodyrl.models.smolvla.prompts import Prompts
from embodyrl.models.vla.cameras import Cameras, choose_cameras
from embodyrl.models.vla.config import Frozen
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.processor import fitted, shown_images
from embodyrl.models.weights import Naming, write_single_file

REMEDY = "choose statistics (model.statistics) of this robot, or its matching controller"
SEEN = "seen"
"""Name in inputs and traces of what the vision tower made of the images, `[B, V, P, E]`."""


class SmolVLAPolicy(FlowPolicy):
    """SmolVLA: a chunk of actions from images, a task description and a state.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null."""

    config: SmolVLAConfig
    network: SmolVLA
    files: CheckpointFiles

    def __init__(self, config: SmolVLAConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        self.architecture = sizes = self.files.architecture
        robot = self.files.robot(config)
        for issue in incompatibilities(sizes, robot, config, chunk_size, SimulatorSizes.of(simulator)):
            raise PolicyError(f"{issue.message}: {issue.hint}")
        self.network = _build_network(self.files, self.dtype, random=config.checkpoint is None)
        self.trace_holds_images = config.frozen is Frozen.language
        self.set_up_robot(robot, simulator, chunk_size, REMEDY)
        self.cameras: Cameras | None = None
        """None: the published size, which is planned for as many images as there are."""
        if config.checkpoint != PUBLISHED:
            there = None if simulator is None else simulator.cameras
            self.cameras = choose_cameras(config.cameras, there, sizes.images)
        texts = [] if simulator is None else told_texts(simulator.tasks.values(), config.indicator)
        self.prompts = Prompts(
            self.files.tokenizer,
            pad=sizes.pad_token,
            length=config.prompt_length or sizes.prompt_length,
            tasks=texts if simulator is not None and sizes.pads_to_longest else None,
        )
        for text in texts:
            self.prompts.ids(text)
        self.set_up_flow(
            TimeGrid.falling(config.denoising_steps, summed=False),
            horizon=sizes.horizon,
            action_dim=sizes.action_dim,
            width=sizes.expert.width,
            value_width=sizes.expert.width,
        )
        # Drawn for the whole horizon first, so that the noise of the first actions does not depend on `horizon`.
        self.start = self.start[: config.horizon or chunk_size].clone()
        self._freeze()

    def _freeze(self) -> None:
        """Freeze the parts that the options name, and weights that affect neither actions nor values."""
        last = f"text.layers.{len(self.architecture.crosses) - 1}."
        unused = (f"{last}self_attn.q", f"{last}self_attn.o", f"{last}post", f"{last}mlp", "text.norm", "lm_head")
        chosen = {Frozen.nothing: (), Frozen.vision: ("vision.",), Frozen.language: ("vision.", "connector.", "text.")}[
            self.config.frozen
        ]
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not name.startswith((*unused, *chosen)))

    # ------------------------------------------------------------------------------------------------------- inputs

    def read(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V, 3, h, h]` in [-1, 1], `input_ids [B, L]`, `attention_mask [B, L]` and `state
        [B, S]`, normalised and padded. Without images, which traces may replace, there are no `pixel_values`.

        Raises:
            PolicyError: images or states are missing, or have another shape than the model takes.
        """
        device = self.start.device
        descriptions = observation.task_descriptions
        ids, mask = self.prompts.batch(descriptions)
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
            "state": self.padded_state(observation.proprio, len(descriptions), self.architecture.state_dim),
        }
        if observation.images is None and self.trace_holds_images:
            return inputs
        images = shown_images(observation.images, self.cameras)
        return inputs | {"pixel_values": fitted(images, self.architecture.vision.image_size, device, centred=False)}

    # ------------------------------------------------------------------------------------------- acting and learning

    def act(
        self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None, *, start: Tensor | None = None
    ) -> ActOutput:
        """See `FlowPolicy.act`. If vision and language are frozen, the trace has `seen`, what the vision tower made of
        the images; 16-bit floats as the whole numbers with the same bits."""
        seen = self.see(inputs)
        decision = super().act(inputs | {SEEN: seen}, mode, generator, start=start)
        if self.trace_holds_images:
            # Rollouts are kept as numpy arrays, which know no bfloat16.
            decision.trace[SEEN] = seen.view(torch.int16) if seen.dtype is torch.bfloat16 else seen
        return decision

    def traced(self, inputs: Inputs, trace: Inputs) -> Inputs:
        """See `FlowPolicy.traced`; the vision tower runs only if the trace does not have its output."""
        if SEEN not in trace:
            return inputs
        kept = trace[SEEN]
        return inputs | {SEEN: kept.view(torch.bfloat16) if kept.dtype is torch.int16 else kept}

    def see(self, inputs: Inputs) -> Tensor:
        """Return what the network makes of the images, `[B, V, P, E]`.

        Raises:
            PolicyError: there are no images.
        """
        if SEEN in inputs:
            return inputs[SEEN]
        if "pixel_values" not in inputs:
            raise PolicyError("the model needs images, and the observation has none", "set env.cameras")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.trace_holds_images):
            return self.network.see(inputs["pixel_values"])

    def condition(self, inputs: Inputs) -> Prefix:
        """See `FlowPolicy.condition`."""
        seen = self.see(inputs)
        # Only the state's token depends on weights that learn, if vision and language are frozen.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.trace_holds_images):
            shown = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
            embedded, mask = self.network.embed(seen, shown, inputs["input_ids"], inputs["attention_mask"])
            memory = self.network.read(embedded, mask)
        return self.network.add_state(memory, mask, inputs["state"])

    def denoise(self, condition: Prefix, x: Tensor, time: Tensor) -> Denoised:
        """See `FlowPolicy.denoise`."""
        velocity, hidden = self.network(condition, x, time)
        return Denoised(velocity.float(), hidden)

    def value_features(self, condition: Prefix, denoised: Denoised) -> Tensor:
        """Return the mean of the action expert's outputs for the actions that are executed."""
        return denoised.hidden[:, : self.spec.chunk_size].float().mean(1)

    def sft_targets(self, actions: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.sft_targets`. Weights are 0 for actions beyond the demonstrated ones, for those beyond the
        end of an episode, and for the zeros that pad an action; those of a sample that counts for more are larger."""
        data = self.fill_horizon(self.actions.normalize(self.units.inverse(actions).float()))
        counts = torch.zeros_like(data)
        counts[:, : actions.shape[1], : self.spec.action_dim] = inputs.get(
            ACTION_WEIGHTS, actions.new_ones(actions.shape[:2])
        ).unsqueeze(-1)
        if SAMPLE_WEIGHTS in inputs:
            counts *= inputs[SAMPLE_WEIGHTS][:, None, None]
        return data, counts

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `FlowPolicy.sft_loss`; the mean over demonstrated actions and their real numbers."""
        data, counts = self.sft_targets(actions, inputs)
        time, share = self.learning_times(draws["time"])
        errors = self.flow_errors(self.condition(inputs), data, draws["noise"], time, share)
        # The weights have a mean of 1 over the minibatch, of which this may be a part.
        return (errors * counts).sum() / (actions[..., 0].numel() * self.spec.action_dim)

    # ----------------------------------------------------------------------------------------------------------- parts

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`; tokens of the language model: images, task description and state."""
        images = 1 if self.cameras is None else len(self.cameras.used)
        return images * self.architecture.vision.tokens + self.prompts.length + 1

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are the layers of the three transformers. Adapters go to queries and
        values of the action expert and to the projections of states and actions, as in LeRobot, unless others are
        asked for; critic and noise network are trained in full beside them."""
        layers = self.linear_layers("network.")
        added = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out")
        usual = (
            *(f"network.{name}" for name in added),
            *(name for name in layers if ".expert." in name and name.endswith((".q_proj", ".v_proj"))),
        )
        return ParallelPlan(
            blocks=self.modules_named(r"network\..*layers\.\d+"),
            adaptable=layers,
            adapted=usual,
            heads=self.parts_beside("network"),
            root="network",
        )

    # ----------------------------------------------------------------------------------------------------------- files

    naming = Naming(public=public_name, own=own_name)

    def write_network(self, folder: Path) -> None:
        """See `FlowPolicy.write_network`. Weights are in the types of the files that they were read from, unless they
        have learned digits that these would lose."""
        buffers = {name: torch.from_numpy(numbers) for name, numbers in self.files.buffers.items()}
        write_single_file(self.network, folder, self.naming, types=self.stored, others=buffers)


def _build_network(files: CheckpointFiles, dtype: torch.dtype, *, random: bool) -> SmolVLA:
    """Build the network with random weights, or with parameters on the meta device."""
    if random:
        network = SmolVLA(files.architecture)
        initialize(network)
    else:
        with torch.device("meta"):
            network = SmolVLA(files.architecture, head=files.has_head)
    network.to(dtype)
    keep_wide(network)
    return network
