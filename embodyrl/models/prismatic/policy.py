"""Base class of the OpenVLA and OpenVLA-OFT policies.

Shapes: `B` samples, `P` image tokens (and the proprio token, if any), `L` prompt tokens, `E` width of the language
model, `C` actions in a chunk, `D` action dims, `N = C*D`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import (
    ActOutput,
    EvalOutput,
    Inputs,
    Mode,
    ParallelPlan,
    Policy,
    PolicyObservation,
    PolicySpec,
)
from embodyrl.models.prismatic.checkpoint import CheckpointFiles, Range, read_range
from embodyrl.models.prismatic.config import Architecture, Gripper, PrismaticConfig
from embodyrl.models.prismatic.network import (
    NAMING,
    PrismaticNetwork,
    ValueHead,
    add_adapter,
    heads_beside,
    read_head,
    write_head,
)
from embodyrl.models.prismatic.processor import ActionBins, Bounds, ImagePipeline, NormRange
from embodyrl.models.prismatic.prompts import Prompts
from embodyrl.models.sampling import Choice, TokenDistribution, known
from embodyrl.models.saved import weight_type, write_description
from embodyrl.models.vla.config import ActionUnits
from embodyrl.models.vla.folder import choose_key
from embodyrl.models.vla.processor import SimulatorUnits, check_images
from embodyrl.models.weights import DTYPES, fill, load_strictly, read_tensors, read_weights, write_weights
from embodyrl.screen import counted

VALUE_FILE = "value_head.safetensors"
UNITS_REMEDY = "choose statistics (model.unnorm_key) of this robot, or its matching controller"


class PrismaticPolicy(Policy):
    """A policy whose actions are tokens of a language model, given images and a task description.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null."""

    kind: ClassVar[str]
    range_epsilon: ClassVar[float]
    acts_on_device = True
    num_images = 1

    def __init__(self, config: PrismaticConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)  # type: ignore[arg-type]
        self.config = config
        self.dtype = DTYPES[weight_type(config)]
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        architecture = Architecture.from_config(self.files.config)
        if config.checkpoint is None:
            self.network = PrismaticNetwork.with_random_weights(architecture)
        else:
            self.network = PrismaticNetwork.on_meta(architecture)
        for parameter in self.network.parameters():  # buffers stay float32: positions need its digits
            parameter.data = parameter.data.to(self.dtype)
        self.value_head = ValueHead(self.network.width)
        self.action_range = NormRange(self.read_range("action"), self.range_epsilon)
        self.bins = ActionBins(architecture.bins)
        self.units = SimulatorUnits(self._convention(), simulator, len(self.action_range), UNITS_REMEDY)
        self.images = ImagePipeline(self.files.preprocessing, config.center_crop, config.interpolation)
        self._check_simulator(simulator, architecture)
        self.spec = PolicySpec(
            kind=self.kind, chunk_size=chunk_size, action_dim=len(self.action_range), proprio_dim=self.proprio_dim
        )
        tasks = [] if simulator is None else simulator.tasks.values()
        self.prompts = Prompts(self.files.tokenizer, self._room_for_prompts(), tasks)
        self.network.vision_backbone.freeze(everything=config.freeze_vision)

    @property
    def entries(self) -> int:
        """`N`."""
        return self.spec.chunk_size * self.spec.action_dim

    @property
    def proprio_dim(self) -> int:
        """`S`, or 0 if states are not used."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """Statistics that are mapped to -1 and 1."""
        return "q99"

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return self.bins.centres.device

    def read_range(self, part: str) -> Range:
        """Return the range of actions (`action`) or states (`proprio`) in the statistics that the options choose.

        Raises:
            PolicyError: they are missing or damaged.
        """
        statistics = self.files.statistics
        return read_range(statistics, choose_key(statistics, self.config.unnorm_key), part, self.bounds)

    def _room_for_prompts(self) -> int:
        """Return the positions that images, state, actions and stop token leave for the prompt."""
        images = self.num_images * self.network.vision_backbone.patches
        longest: int = self.network.language_model.config.max_position_embeddings
        return longest - images - bool(self.proprio_dim) - self.entries - 1

    def _convention(self) -> ActionConvention:
        """Return the convention of unnormalized actions."""
        config = self.config
        raw = not bool(self.action_range.mask[-1])
        opens = config.gripper is Gripper.one_opens or (config.gripper is Gripper.auto and raw)
        return ActionConvention(
            metric=config.action_units is ActionUnits.metric,
            gripper=(1.0, 0.0) if opens else None,
            binary_gripper=config.binary_gripper,
        )

    def _check_simulator(self, simulator: SimulatorSpec | None, architecture: Architecture) -> None:
        if simulator is None:
            return
        if len(simulator.cameras) != self.num_images:
            cameras = ", ".join(simulator.cameras) or "none"
            raise PolicyError(
                f"the model takes {counted(self.num_images, 'image')}, the simulator has "
                f"{counted(len(simulator.cameras), 'camera')} ({cameras}): set env.cameras to {self.num_images} of them"
            )
        if self.proprio_dim and simulator.proprio_dim != self.proprio_dim:
            raise PolicyError(
                f"the model takes a state of {self.proprio_dim} numbers, the simulator has {simulator.proprio_dim}: "
                "set model.use_proprio=false, or choose other states (env.proprio)"
            )

    # ------------------------------------------------------------------------------------------------------- inputs

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V*channels, h, h]`, `input_ids [B, L]`, `attention_mask [B, L]` and, if states are
        used, `proprio [B, S]` in [-1, 1].

        Raises:
            PolicyError: images are missing, or have another type, shape or number than the model takes.
        """
        images = check_images(observation.images, self.num_images)
        ids, mask = self.prompts.batch(observation.task_descriptions)
        return {
            "pixel_values": self.images(images),
            "input_ids": torch.from_numpy(ids).to(self.device),
            "attention_mask": torch.from_numpy(mask).to(self.device),
        }

    def embed_images(self, inputs: Inputs) -> Tensor:
        """Return the embeddings between the first and the second token of the prompt, `[B, P, E]`."""
        return self.network.embed_images(inputs["pixel_values"].to(self.dtype))

    def assemble(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Concatenate first token, images and rest of the prompt: embeddings `[B, P+L, E]`, and a mask that is False
        for padding."""
        tokens = self.network.embed_tokens(inputs["input_ids"])
        images = self.embed_images(inputs)
        mask = inputs["attention_mask"]
        # The first token begins every prompt, and public checkpoints were trained with the images right after it.
        seen = mask.new_ones(images.shape[:2])
        return (
            torch.cat([tokens[:, :1], images, tokens[:, 1:]], dim=1),
            torch.cat([mask[:, :1], seen, mask[:, 1:]], dim=1),
        )

    # ------------------------------------------------------------------------------------------------------ outputs

    def distribution(self, logits: Tensor, chosen: Tensor | None = None) -> TokenDistribution:
        """Return the distribution over action tokens, in rollouts (`chosen` None) and in learning."""
        config = self.config
        return TokenDistribution(
            logits, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, chosen=chosen
        )

    def draw(self, logits: Tensor, mode: Mode, generator: torch.Generator | None) -> Choice:
        """Sample tokens `[...]` from logits `[..., bins]`, or take the most likely ones."""
        return self.distribution(logits).choose(mode, generator)

    def finish(self, normalized: Tensor) -> Tensor:
        """Convert numbers in [-1, 1] `[B, N]` to actions `[B, C, D]` for the simulator."""
        chunks = torch.unflatten(normalized.float(), 1, (self.spec.chunk_size, -1))
        actions: Tensor = self.units(self.action_range.unnormalize(chunks))
        return actions

    def normalize(self, actions: Tensor) -> Tensor:
        """Convert actions `[B, C, D]` to numbers in [-1, 1] `[B, N]`; the inverse of `finish`, for supervised
        learning."""
        return self.action_range.normalize(self.units.inverse(actions).float()).flatten(1)

    def acted(self, choice: Choice, hidden: Tensor) -> ActOutput:
        """Return the output for tokens `[B, N]`; the critic reads the hidden state `[B, E]` that predicts the first."""
        return ActOutput(
            actions=self.finish(known(self.bins.decode(choice.tokens), choice.logprobs)),
            logprobs=choice.logprobs,
            values=self.value_head(hidden),
            trace={"tokens": choice.tokens},
        )

    def scored(self, hidden: Tensor, tokens: Tensor) -> EvalOutput:
        """Score stored tokens `[B, N]` under the hidden states `[B, N, E]` that predict them."""
        distribution = self.distribution(self.network.action_logits(hidden), chosen=tokens)
        # The state that predicts the first token has seen images and prompt, and no action: a value of the observation.
        return EvalOutput(
            logprobs=distribution.logprobs(tokens),
            entropy=distribution.entropy(),
            values=self.value_head(hidden[:, 0]),
        )

    # ---------------------------------------------------------------------------------------------------------- parts

    @property
    def positions_of_answer(self) -> int:
        """Positions after the prompt."""
        raise NotImplementedError

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`."""
        images = self.num_images * self.network.vision_backbone.patches
        return images + bool(self.proprio_dim) + len(self.prompts.encode(task)) + self.positions_of_answer

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are the transformer layers of towers and language model. Adapters go to
        every linear layer except the output layer, as in the published LoRA recipes ("all-linear"); all else are
        heads."""
        return ParallelPlan(
            blocks=self.modules_named(r"network\..*\.(blocks|layers)\.\d+"),
            adaptable=tuple(name for name in self.linear_layers("network.") if not name.endswith("lm_head")),
            heads=self.parts_beside("network"),
            root="network",
        )

    # ---------------------------------------------------------------------------------------------------------- files

    def heads(self) -> dict[str, nn.Module]:
        """Return parts that the public layout keeps in separate files, by the prefix of the file."""
        return {}

    def start_from(self, folder: Path) -> None:
        """Read weights in the public layout, and the adapter if one is set, with the heads that were trained beside it;
        see `load` and `add_adapter`."""
        self.load(folder)
        if self.config.adapter is None:
            return
        adapter = Path(self.config.adapter)
        add_adapter(self.network, adapter)
        if heads := heads_beside(adapter):
            fill(self.head_tensors(), read_tensors(heads), heads)

    def load(self, folder: Path) -> None:
        """Read weights in the public layout. A missing value head keeps its weights.

        Raises:
            PolicyError: files are missing or damaged, or names or shapes of weights differ (they are named).
        """
        read_weights(self.network, folder, NAMING)
        for name, head in self.heads().items():
            load_strictly(head, read_head(folder, name), name)
        if (folder / VALUE_FILE).is_file():
            load_strictly(self.value_head, read_tensors(folder / VALUE_FILE), VALUE_FILE)

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write the public layout into an existing folder, and the value head beside it."""
        self.files.write(folder)
        write_weights(self.network, folder, NAMING)
        for name, head in self.heads().items():
            write_head(head, folder, name)
        save_file({key: value.contiguous() for key, value in self.value_head.state_dict().items()}, folder / VALUE_FILE)
        write_description(folder, config, self.spec)
