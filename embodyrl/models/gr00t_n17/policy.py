"""GR00T N1.7 and N1.6 as policies.

Shapes: `B` samples, `V` images of all times, `L` prompt tokens, images included, `E` width of the language model, `H`
actions of the horizon, `A` numbers of an action in the network, `C` actions that are executed, `D` their numbers, `S`
numbers of a state.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.flow.denoising import TimeGrid
from embodyrl.models.flow.policy import Denoised
from embodyrl.models.gr00t.config import ValueInput
from embodyrl.models.gr00t.flow import Gr00tFlow
from embodyrl.models.gr00t.head import Condition, Embodiment
from embodyrl.models.gr00t_n17.actions import ActionScale, StateScale
from embodyrl.models.gr00t_n17.check import incompatibilities, read_by
from embodyrl.models.gr00t_n17.checkpoint import CheckpointFiles
from embodyrl.models.gr00t_n17.config import Continuation, Gr00tN17Config, Qwen
from embodyrl.models.gr00t_n17.images import pixel_values
from embodyrl.models.gr00t_n17.network import UNUSED, Gr00tNetwork, Names
from embodyrl.models.gr00t_n17.prompts import PlacedPrompts
from embodyrl.models.policy import ACTION_WEIGHTS, PLAN, PLAN_WEIGHTS, Inputs, PolicyObservation
from embodyrl.models.saved import weight_layout, with_kept
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.processor import check_images, read_state
from embodyrl.models.weights import Naming, read_named, write_as_read, write_weights

RAW_STATE = "raw_state"
"""Name in inputs of the robot's state as it is, `[B, S]`, which actions may be relative to."""


class Gr00tN17Policy(Gr00tFlow):
    """GR00T N1.7 or N1.6: a chunk of actions from images, a task description and a state.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null."""

    config: Gr00tN17Config
    network: Gr00tNetwork
    files: CheckpointFiles
    states: StateScale
    actions: ActionScale
    value_changes = False

    def __init__(self, config: Gr00tN17Config, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        if config.checkpoint is not None:
            config = with_kept(config, Path(config.checkpoint))
        super().__init__(config, simulator, chunk_size)
        self.unused: dict[str, Tensor] = {}
        """Weights of the checkpoint that nothing uses, by their names there."""
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        sizes, robot = self.files.architecture, read_by(self.files.robot, config.state)
        for issue in incompatibilities(
            self.files,
            robot,
            chunk_size,
            None if simulator is None else simulator.cameras,
            SimulatorSizes.of(simulator),
        ):
            raise PolicyError(f"{issue.message}: {issue.hint}")
        if robot.cameras is None and simulator is not None:
            self.files = self.files.with_cameras(simulator.cameras)
        cameras = robot.cameras if simulator is None else simulator.cameras
        if cameras is not None and not cameras:
            raise PolicyError("the model needs images", "set env.cameras")
        self.num_cameras: int | None = None if cameras is None else len(cameras)
        """None: the first observation tells, because neither simulator nor checkpoint does."""
        self.frames = robot.frames
        self.embodiment: Embodiment = self.files.embodiment(config.embodiment_id)
        self.network = Gr00tNetwork(sizes) if config.checkpoint is None else Gr00tNetwork.on_meta(sizes)
        self.network.to(self.dtype)
        self.network.freeze(vision=config.freeze_vision, language=config.freeze_language)
        remedy = "choose statistics (model.embodiment_tag, model.statistics) of this robot"
        self.set_up_scales(StateScale(robot), ActionScale(robot), simulator, chunk_size, remedy)
        self.geometry = self.files.geometry
        if simulator is None or simulator.image_size is None or self.geometry.steps(*simulator.image_size):
            self.reads_on_host = frozenset({"images"})
        self._tasks = [] if simulator is None else told_texts(simulator.tasks.values(), config.indicator)
        self._prompts: dict[tuple[int, int], PlacedPrompts] = {}
        self._image_size = None if simulator is None else simulator.image_size
        if self._image_size is not None:
            self.prompts_for(self._image_size)
        sees_state = config.value_input is ValueInput.vl_and_state
        self.set_up_flow(
            TimeGrid.rising(config.denoising_steps),
            horizon=sizes.action_horizon,
            action_dim=sizes.head.max_action_dim,
            width=sizes.head.dit_outputs,
            value_width=sizes.width + sizes.head.dit.width * sees_state,
        )

    # ------------------------------------------------------------------------------------------------------- inputs

    def prompts_for(self, size: tuple[int, int]) -> PlacedPrompts:
        """Return the prompts about images of a size (height, width)."""
        if size not in self._prompts:
            assert self.num_cameras is not None, "an observation has been seen"
            images, length = self.num_cameras * self.frames, self.config.prompt_length
            self._prompts[size] = self.files.prompts(size, images, self._tasks, length)
        return self._prompts[size]

    def read(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V, 3, h, w]`, `input_ids [B, L]`, `attention_mask [B, L]`, of N1.7 `places [B, 3,
        L]`, `state [B, 1, A]`, normalised and padded, and `raw_state [B, S]`.

        A model that reads several frames of each camera gets the newest one as often.

        Raises:
            PolicyError: images or state are missing, or have another type, shape or number than the model takes.
        """
        device = self.start.device
        images = check_images(observation.images, self.num_cameras)
        if self.num_cameras is None:
            self.num_cameras = images.shape[1]
        prompts = self.prompts_for((images.shape[2], images.shape[3]))
        ids, mask = prompts.batch(observation.task_descriptions)
        places = {"places": prompts.places(ids, mask)} if isinstance(self.network.sizes.vlm, Qwen) else {}
        arrays = {"input_ids": ids, "attention_mask": mask, **places}
        state = self.padded_state(observation.proprio, len(ids), self.network.sizes.head.max_state_dim)
        if self.config.state is StateInput.none:
            state = torch.zeros_like(state)
        return {
            # All cameras of one time follow each other.
            "pixel_values": pixel_values(images, self.geometry, device).repeat(1, self.frames, 1, 1, 1),
            "state": state.unsqueeze(1),
            RAW_STATE: self._raw_state(observation, len(ids)),
            **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
        }

    def _raw_state(self, observation: PolicyObservation, batch: int) -> Tensor:
        if not len(self.states):
            return self.start.new_zeros(batch, 0)
        return read_state(observation.proprio, len(self.states), self.start.device)

    # ------------------------------------------------------------------------------------------------------ denoising

    def condition(self, inputs: Inputs) -> Condition:
        """See `FlowPolicy.condition`."""
        typed = {name: inputs[name].to(self.dtype) for name in ("pixel_values", "state")}
        return self.network.condition(inputs | typed, self.embodiment)

    def value_features(self, condition: Condition, denoised: Denoised) -> Tensor:
        """See `FlowPolicy.value_features`; the mean over the tokens of images and task description, without padding,
        and the state."""
        assert condition.valid is not None
        valid = condition.valid.unsqueeze(-1)
        features = condition.context.masked_fill(~valid, 0.0).sum(1) / valid.sum(1)
        if self.config.value_input is ValueInput.vl_and_state:
            features = torch.cat([features, condition.state.squeeze(1)], dim=-1)
        return features

    def learning_times(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.learning_times`."""
        time = (1.0 - draws) * self.network.sizes.noise_scale
        return time, 1.0 - time

    # --------------------------------------------------------------------------------------------------------- outputs

    def finish(self, x: Tensor, inputs: Inputs) -> Tensor:
        """See `FlowPolicy.finish`; relative actions are added to the state in which the chunk was chosen."""
        numbers = x[:, : self.spec.chunk_size, : self.spec.action_dim]
        actions: Tensor = self.units(self.actions.unnormalize(numbers, inputs[RAW_STATE]))
        return actions

    # ----------------------------------------------------------------------------------------------------------- plans

    def planned(self, x: Tensor, inputs: Inputs) -> Tensor:
        """See `FlowPolicy.planned`; actions of the robot, because numbers of relative ones depend on state and step."""
        return self._padded(self.actions.unnormalize(x[..., : self.spec.action_dim], inputs[RAW_STATE], clip=False))

    def recalled(self, plan: Tensor, inputs: Inputs) -> Tensor:
        """See `FlowPolicy.recalled`."""
        return self._padded(self.actions.normalize(plan[..., : self.spec.action_dim], inputs[RAW_STATE], clip=False))

    def begun(self, x: Tensor, inputs: Inputs) -> Tensor:
        """See `FlowPolicy.begun`; what was planned, if it is blended in."""
        if self.config.rtc_method is Continuation.guided:
            return x
        return torch.where(inputs[PLAN_WEIGHTS].unsqueeze(-1) > 0.0, inputs[PLAN], x)

    def guided(self, condition: Condition, x: Tensor, time: Tensor, share: Tensor, inputs: Inputs) -> Denoised:
        """See `FlowPolicy.guided`; or the velocity, the smaller the more a step is held to its plan."""
        if self.config.rtc_method is Continuation.guided:
            return super().guided(condition, x, time, share, inputs)
        denoised = self.denoise(condition, x, time)
        return Denoised(denoised.velocity * (1.0 - inputs[PLAN_WEIGHTS].unsqueeze(-1)), denoised.hidden)

    def _padded(self, numbers: Tensor) -> Tensor:
        """Fill actions `[B, C, D]` with zeros to `[B, H, A]`."""
        horizon, width = self.start.shape
        return functional.pad(numbers, (0, width - numbers.shape[2], 0, horizon - numbers.shape[1]))

    # -------------------------------------------------------------------------------------------------------- learning

    def counted(self, entries: Tensor, result: Tensor) -> Tensor:
        """See `FlowPolicy.counted`; 0 for numbers that decoding clips, because what lies beyond the range acts as its
        end does."""
        executed = super().counted(entries, result)
        if self.config.count_clipped:
            return executed
        beyond = (result.abs() > 1.0)[:, : self.spec.chunk_size, : self.spec.action_dim] & self.actions.clipped
        return executed.masked_fill(beyond.flatten(1), 0.0)

    def sft_targets(self, actions: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.sft_targets`. Weights are 0 for steps beyond the demonstrated ones and beyond the end of an
        episode, and for the zeros that pad an action, as in public training."""
        own = self.units.inverse(actions).float()
        data = self.actions.normalize(own, inputs[RAW_STATE])
        known = inputs.get(ACTION_WEIGHTS, actions.new_ones(actions.shape[:2]))
        counts = (known > 0).to(data.dtype).unsqueeze(-1).expand_as(data)
        return self._padded(data), self._padded(counts)

    # ----------------------------------------------------------------------------------------------------------- parts

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`; tokens of the backbone, images included."""
        return int(self.prompts_for(self._image_size or self.geometry.target).batch([task])[0].shape[1])

    # ----------------------------------------------------------------------------------------------------------- files

    @property
    def names(self) -> Names:
        """Names of weights in the files."""
        return Names(self.network.sizes.vlm, self.files.prefix)

    @property
    def naming(self) -> Naming:
        """See `FlowPolicy.naming`."""
        return self.names.naming

    def load(self, folder: Path) -> None:
        """See `FlowPolicy.load`; also keeps weights that nothing uses.

        Raises:
            PolicyError: see `FlowPolicy.load`; or the output layer of the language model is not its table.
        """
        super().load(folder)
        names = self.names
        there = weight_layout(folder).all_shapes
        self.unused = read_named(folder, {each for each in there if each.removeprefix(names.prefix).startswith(UNUSED)})
        both = {names.table, names.output}
        if both <= there.keys() and not torch.equal(*read_named(folder, both).values()):
            raise PolicyError(
                f"weights in {folder}: {names.output} differs from {names.table}, to which it is tied in this model",
                "remove one of the two, or download the checkpoint again",
            )

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """See `Policy.options_to_save`; the length of prompts was determined from the tasks."""
        assert isinstance(config, Gr00tN17Config)
        length = config.prompt_length
        if self._image_size is not None:
            length = self.prompts_for(self._image_size).length
        return dataclasses.replace(config, prompt_length=length)

    def write_network(self, folder: Path) -> None:
        """See `FlowPolicy.write_network`. Weights are in the types of the files that they were read from, unless they
        have learned digits that these would lose."""
        if self.files.layout is None:
            write_weights(self.network, folder, self.naming)
            return
        write_as_read(self.network, folder, self.naming, self.files.layout, types=self.stored, others=self.unused)
