"""ACT as a policy: a Gaussian around the predicted chunk.

Shapes: `B` samples, `V` images, `H` actions that are predicted, `C` actions and `D` numbers that are executed, `S`
numbers of the robot's state, `U` of the environment's, `Z` of the latent variable, `N = C*D`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention
from embodyrl.models.act.check import incompatibilities, state_parts
from embodyrl.models.act.checkpoint import PREFIX, CheckpointFiles, own_name
from embodyrl.models.act.config import ACTConfig, Architecture, with_options
from embodyrl.models.act.network import ACT, ResNet, initialize
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.denoising import ValueHead
from embodyrl.models.lerobot import Scale
from embodyrl.models.policy import (
    ACTION_WEIGHTS,
    ActOutput,
    EvalOutput,
    Inputs,
    Mode,
    ParallelPlan,
    Policy,
    PolicyObservation,
    PolicySpec,
    mean_over_samples,
)
from embodyrl.models.sampling import Gaussian
from embodyrl.models.saved import PUBLISHED, write_description
from embodyrl.models.vla.cameras import Cameras, choose_cameras
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.processor import Normalizer, SimulatorUnits, read_state, shown_images
from embodyrl.models.weights import (
    FORMAT,
    Naming,
    read_heads,
    read_metadata,
    read_weights,
    write_heads,
    write_single_file,
)

HEADS_FILE = "act_heads.safetensors"
NAMING = Naming(public=lambda name: PREFIX + name, own=own_name)


class ACTPolicy(Policy):
    """ACT: a chunk of actions from images and states, the robot's and the environment's.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null. Actions are drawn around
    the chunk that the network predicts with a latent variable of zero, with a spread that is learned and does not
    depend on the observation; the critic reads the mean of the encoder's output."""

    acts_on_device = True

    def __init__(self, config: ACTConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)  # type: ignore[arg-type]
        self.config = config
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        self.architecture = sizes = with_options(self.files.architecture, config)
        scales = self.files.scales()
        for issue in incompatibilities(sizes, scales, config, chunk_size, simulator):
            raise PolicyError(f"{issue.message}: {issue.hint}")
        self.network = _build_network(sizes, random=config.checkpoint is None)
        self.stored: dict[str, torch.dtype] = {}
        """Types of the weights in the files that they were read from."""
        self.metadata: Mapping[str, str] | None = FORMAT
        """That of these files."""
        self.images = Normalizer(_stacked(scales.images)) if sizes.images else None
        self.states = None if scales.states is None else Normalizer(scales.states)
        self.environment = None if scales.environment is None else Normalizer(scales.environment)
        self.parts = state_parts(sizes, simulator)
        self.actions = Normalizer(scales.actions)
        self.cameras: Cameras | None = None
        """None: the published size, which is planned for as many images as there are, or it reads no images."""
        if config.checkpoint != PUBLISHED and sizes.images:
            there = None if simulator is None else simulator.cameras
            self.cameras = choose_cameras(config.cameras, there, sizes.images)
        self._reads_robot = self.states is not None and config.state is StateInput.token
        reads = self._reads_robot or self.environment is not None
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=sizes.action_dim,
            proprio_dim=self.parts.size if reads else 0,
        )
        remedy = "choose statistics (model.statistics) of this robot, or its matching controller"
        self.units = SimulatorUnits(ActionConvention(), simulator, sizes.action_dim, remedy)
        self.exploration = Gaussian(sizes.action_dim, config.log_std_init)
        self.value_head = ValueHead(sizes.width, config.value_sizes)

    # ------------------------------------------------------------------------------------------------------- inputs

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Return `images [B, V, 3, h, w]`, `state [B, S]` and `environment [B, U]`, normalised; those of them that the
        network reads.

        Raises:
            PolicyError: images or states are missing, or have another shape than the model takes.
        """
        device = self.exploration.log_std.device
        inputs: dict[str, Tensor] = {}
        if self.images is not None:
            # Not left in the layout of the simulator's images, in which a published ResNet took 1.5 times as long.
            colours = self.images.normalize(self._shown(observation).to(device).float() / 255.0)
            inputs["images"] = colours.permute(0, 1, 4, 2, 3).contiguous()
        proprio = None
        if self.spec.proprio_dim:
            proprio = read_state(observation.proprio, self.parts.size, device)
        if self.states is not None and self._reads_robot and proprio is not None:
            inputs["state"] = self.states.normalize(proprio[:, list(self.parts.robot)])
        elif self.states is not None:
            inputs["state"] = self.exploration.log_std.new_zeros(len(observation.task_descriptions), len(self.states))
        if self.environment is not None and proprio is not None:
            inputs["environment"] = self.environment.normalize(proprio[:, list(self.parts.environment)])
        return inputs

    def _shown(self, observation: PolicyObservation) -> Tensor:
        """Return the images `[B, V, h, w, 3]` that the network reads, in its order."""
        images = shown_images(observation.images, self.cameras)
        size = self.architecture.image_size
        if tuple(images.shape[2:4]) != size:
            raise PolicyError(
                f"the model takes images of {size[0]} x {size[1]} pixels, got {images.shape[2]} x {images.shape[3]}: "
                "it never resizes"
            )
        return images

    # ------------------------------------------------------------------------------------------- acting and learning

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the normalised chunk `sample [B, C, D]`."""
        means, values = self._look(inputs)
        sample = self.exploration.sample(means, generator) if mode == "train" else means
        return ActOutput(
            actions=self.units(self.actions.unnormalize(sample)),
            logprobs=self.exploration.logprobs(means, sample).flatten(1),
            values=values,
            trace={"sample": sample},
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`."""
        means, values = self._look(inputs)
        return EvalOutput(
            logprobs=self.exploration.logprobs(means, trace["sample"]).flatten(1),
            entropy=self.exploration.entropy(means).flatten(1),
            values=values,
        )

    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the normalised chunk `[B, C, D]` and the critic's values `[B]`."""
        if self.network.training:
            self.network.eval()  # nothing is dropped here; see `_dropping`
        # No demonstration is read here, so the latent variable is that of the prior's mean, zero (Zhao et al., 2023).
        chunk, memory = self._predict(inputs)
        features = memory.float().mean(1)
        values = self.value_head(features.detach() if self.config.detach_critic else features)
        return chunk[:, : self.spec.chunk_size].float(), values

    def _predict(self, inputs: Inputs, style: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the network's chunk and memory, see `ACT.forward`."""
        found: tuple[Tensor, Tensor] = self.network(
            inputs.get("images"), inputs.get("state"), style, inputs.get("environment")
        )
        return found

    def imitation_draws(self, samples: int, generator: torch.Generator) -> Inputs:
        """Draw the noise of latent variables, `style [samples, Z]`, and seeds of what is dropped, `dropout [samples]`;
        see `Policy.imitation_draws`."""
        sizes, device = self.architecture, generator.device
        style = torch.randn(samples, sizes.style_size, generator=generator, device=device)
        return {"style": style, "dropout": torch.randint(2**62, (samples,), generator=generator, device=device)}

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """Mean absolute error, and the latent variable's KL divergence from a standard normal distribution; see
        `Policy.sft_loss`.

        Actions beyond the demonstrated ones, and those beyond the end of an episode, are neither read nor learned.
        """
        count = actions.shape[1]
        weights = inputs.get(ACTION_WEIGHTS, actions.new_ones(actions.shape[:2]))
        wanted = self.actions.normalize(self.units.inverse(actions).float())
        with self._dropping(draws["dropout"]):
            style, divergences = self._style(wanted, inputs.get("state"), weights == 0, draws["style"])
            chunk, _ = self._predict(inputs, style)
        errors = (chunk[:, :count].float() - wanted).abs() * weights.unsqueeze(-1)
        # The weights have a mean of 1 over the minibatch, of which this may be a part.
        divergence = self.architecture.kl_weight * mean_over_samples(divergences, inputs)
        return mean_over_samples(errors, inputs) + divergence

    def _style(
        self, wanted: Tensor, state: Tensor | None, hidden: Tensor, noise: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the latent variable of demonstrated chunks, None if the model has none, and its divergences `[B]`."""
        if not self.architecture.style_layers:
            return None, wanted.new_zeros(len(wanted))
        # The encoder takes whole horizons: what was not demonstrated is zero, and hidden from its attention.
        rest = self.architecture.horizon - wanted.shape[1]
        style = self.network.infer_style(
            functional.pad(wanted, (0, 0, 0, rest)), state, functional.pad(hidden, (0, rest), value=True)
        )
        return style.sample(noise), style.divergence().float()

    @contextmanager
    def _dropping(self, seeds: Tensor) -> Iterator[None]:
        """Drop numbers at random in a block. What is dropped depends on the demonstrations of a micro-batch alone, so
        that a resumed run drops the same.

        The network continues to do so until it acts or scores the next time: gradient checkpointing computes it again
        after the block, with the random numbers of the first time.
        """
        if not self.architecture.dropout:
            yield
            return
        # Dropout draws from torch's global generator, which is put back: other draws of the run must not shift.
        devices = [seeds.device] if seeds.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(seeds[0]))
            self.network.train()
            yield

    # ----------------------------------------------------------------------------------------------------------- parts

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`; tokens of the encoder: latent variable, states and the images' cells."""
        height, width = (-(-side // ResNet.STRIDE) for side in self.architecture.image_size)
        images = 1 if self.cameras is None else len(self.cameras.used)
        return 1 + (self.states is not None) + (self.environment is not None) + images * height * width

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are those of the ResNet and the transformers' layers. Projections inside
        of attention cannot be adapted, because torch does not call them as layers."""
        return ParallelPlan(
            blocks=self.modules_named(r"network\.(backbone\.layer\d|(vae_encoder|encoder|decoder)\.layers)\.\d+"),
            adaptable=tuple(name for name in self.linear_layers("network.") if not name.endswith(".out_proj")),
            heads=self.parts_beside("network"),
            root="network",
        )

    # ----------------------------------------------------------------------------------------------------------- files

    def _heads(self) -> dict[str, nn.Module]:
        """Return the parts that public checkpoints do not contain."""
        return {"value_head": self.value_head, "exploration": self.exploration}

    def load(self, folder: Path) -> None:
        """Read weights under LeRobot's names. A missing critic or spread keeps its weights.

        Raises:
            PolicyError: files are missing or damaged, or names or shapes of weights differ (they are named).
        """
        self.stored, self.metadata = read_weights(self.network, folder, NAMING), read_metadata(folder)
        read_heads(self._heads(), folder / HEADS_FILE)

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write LeRobot's layout into an existing folder, and critic and spread beside it."""
        self.files.write(folder)
        buffers = {name: torch.from_numpy(numbers) for name, numbers in self.files.buffers.items()}
        write_single_file(self.network, folder, NAMING, types=self.stored, others=buffers, metadata=self.metadata)
        write_heads(self._heads(), folder / HEADS_FILE)
        write_description(folder, self.options_to_save(config), self.spec)


def _build_network(sizes: Architecture, *, random: bool) -> ACT:
    """Build the network with random weights, or with parameters on the meta device."""
    if random:
        network = ACT(sizes)
        initialize(network)
        return network
    with torch.device("meta"):
        return ACT(sizes)


def _stacked(scales: Sequence[Scale]) -> Scale:
    """Return the normalisation of images `[B, V, h, w, 3]` for that of each."""
    origin, divisor, factor = (
        np.stack([getattr(each, name) for each in scales])[:, None, None] for name in ("origin", "divisor", "factor")
    )
    return Scale(origin, divisor, factor, shift=scales[0].shift)
