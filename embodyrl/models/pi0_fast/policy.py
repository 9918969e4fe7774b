"""pi0-FAST as a policy.

Shapes: `B` samples, `V` images, `L` prompt tokens, `T` tokens of an answer that are chosen, `H` actions of the horizon,
`C` actions and `D` numbers that are executed, `E` width of the language model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.denoising import ValueHead
from embodyrl.models.lerobot import Robot, unscaled
from embodyrl.models.pi.check import incompatibilities
from embodyrl.models.pi.checkpoint import robot_of
from embodyrl.models.pi.policy import REMEDY, WrittenStates, build_network, relative_origin
from embodyrl.models.pi.prompts import read_tokenizer
from embodyrl.models.pi0_fast.check import with_defaults, written_numbers
from embodyrl.models.pi0_fast.checkpoint import MATRICES, CheckpointFiles, Vocabulary
from embodyrl.models.pi0_fast.codes import ActionCodes
from embodyrl.models.pi0_fast.config import Convention, Decoding, LossMean, Pi0FastConfig, ValueFrom
from embodyrl.models.pi0_fast.network import PiFast, Read, initialize
from embodyrl.models.pi0_fast.prompts import Prompts
from embodyrl.models.policy import (
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
from embodyrl.models.sampling import Choice, TokenDistribution, known
from embodyrl.models.saved import weight_type, write_description
from embodyrl.models.vla.cameras import ABSENT, choose_cameras
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.folder import choose_key
from embodyrl.models.vla.processor import Normalizer, SimulatorUnits, convention_of, fitted, read_state, shown_images
from embodyrl.models.vla.prompts import padded
from embodyrl.models.vla.transformer import KeyValueCache
from embodyrl.models.weights import (
    DTYPES,
    FORMAT,
    Naming,
    read_heads,
    read_metadata,
    read_weights,
    write_heads,
    write_single_file,
)
from embodyrl.registry import SupportedModel

HEADS_FILE = "value_head.safetensors"
ABRIDGED = 3
"""Tokens of an answer that plans are made of."""


class Pi0FastPolicy(Policy):
    """pi0-FAST: a chunk of actions, token by token, from images, a task description and a state.

    Weights are on the meta device until `load` reads them, unless `config.checkpoint` is null. The trace of `act` has
    `tokens [B, T]`, ids of the vocabulary."""

    acts_on_device = True
    begin: Tensor
    given: Tensor

    def __init__(self, config: Pi0FastConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)  # type: ignore[arg-type]
        self.files = CheckpointFiles.of(config, simulator, chunk_size)
        self.config = config = with_defaults(config, self.files)
        self.dtype = DTYPES[weight_type(config)]
        self.architecture = sizes = self.files.architecture
        text, fast = read_tokenizer(*self.files.tokenizer), self.files.fast
        self.vocabulary = Vocabulary.of(text, sizes, fast.size)
        robot = self._choose_robot(simulator, chunk_size)
        self.network = build_network(partial(PiFast, sizes), initialize, random=config.checkpoint is None)
        self.network.to(self.dtype)
        self.network.vision.requires_grad_(not config.freeze_vision)
        self.value_head = ValueHead(sizes.language.width, config.value_sizes)
        self.states = Normalizer(unscaled(0) if robot.states is None else robot.states)
        self.actions = Normalizer(robot.actions)
        self.codes = ActionCodes(fast, sizes.horizon, len(self.actions))
        self.units = SimulatorUnits(convention_of(config), simulator, len(self.actions), REMEDY)
        self.spec = PolicySpec(
            kind="ar_token", chunk_size=chunk_size, action_dim=len(self.actions), proprio_dim=len(self.states)
        )
        self.cameras = choose_cameras(config.cameras, None if simulator is None else simulator.cameras, sizes.images)
        self._set_up_prompts(simulator)
        begin = [text.begin] if config.convention is Convention.lerobot else []
        given = [*begin, *self.vocabulary.prefix] if config.decoding is Decoding.codes else begin
        self.register_buffer("begin", torch.tensor(begin, dtype=torch.int64), persistent=False)
        self.register_buffer("given", torch.tensor(given, dtype=torch.int64), persistent=False)
        self._most_steps = math.inf
        self.stored: dict[str, torch.dtype] = {}
        self.metadata: Mapping[str, str] | None = FORMAT

    def _choose_robot(self, simulator: SimulatorSpec | None, chunk_size: int) -> Robot:
        """Return the robot in the statistics, after checking that it fits the simulator."""
        there, statistics = SimulatorSizes.of(simulator), self.files.statistics
        chosen = statistics[choose_key(statistics, self.config.unnorm_key)]
        robot = robot_of(chosen, self.config, self.files, there)
        horizon, relative = self.architecture.horizon, self.config.relative_action_dims
        for issue in incompatibilities(horizon, chunk_size, robot, there, relative):
            raise PolicyError(f"{issue.message}: {issue.hint}")
        return robot

    def _set_up_prompts(self, simulator: SimulatorSpec | None) -> None:
        config, openpi = self.config, self.config.convention is Convention.openpi
        length = config.prompt_length or self.architecture.prompt_length
        self.prompts = Prompts(self.vocabulary.text, length, lower=openpi)
        self.written: WrittenStates | None = None
        count = written_numbers(config, len(self.states))
        if count is not None:
            self.written = WrittenStates(copy.deepcopy(self.states), count)
            self.reads_on_host = frozenset({"proprio"})
        if simulator is not None:
            self.prompts.check(simulator.tasks.values(), count)
        # openpi shows absent images, black; LeRobot masks them, which gives the same numbers as leaving them out.
        self.black = tuple(place for place, name in enumerate(config.cameras) if openpi and name == ABSENT)

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return self.given.device

    @property
    def answer_length(self) -> int:
        """`T`."""
        prefix = 0 if self.config.decoding is Decoding.codes else len(self.vocabulary.prefix)
        return self.config.answer_length or min(self.architecture.decoding_steps, self.codes.numbers + 1 + prefix)

    # ------------------------------------------------------------------------------------------------------- inputs

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Return `pixel_values [B, V, 3, h, h]` in [-1, 1], `input_ids [B, L]`, `attention_mask [B, L]` and, if actions
        are relative to the state, `proprio [B, S]`.

        Raises:
            PolicyError: images or states are missing, or have another shape than the model takes.
        """
        images = shown_images(observation.images, self.cameras)
        for place in self.black:
            images = torch.cat([images[:, :place], torch.zeros_like(images[:, :1]), images[:, place:]], dim=1)
        written = None if self.written is None else self.written(observation.proprio)
        ids, mask = self.prompts.batch(observation.task_descriptions, written)
        inputs = {
            "pixel_values": fitted(images, self.architecture.image_size, self.device, centred=True),
            "input_ids": torch.from_numpy(ids).to(self.device),
            "attention_mask": torch.from_numpy(mask).to(self.device),
        }
        if self.config.relative_action_dims:
            inputs["proprio"] = read_state(observation.proprio, len(self.states), self.device)
        return inputs

    def read(self, inputs: Inputs, answer: Tensor, cache: KeyValueCache | None = None) -> Read:
        """Encode images, prompt and the ids `[B, M]` that an answer begins with."""
        images = inputs["pixel_values"].to(self.dtype)
        there = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
        return self.network.read(images, there, inputs["input_ids"], inputs["attention_mask"], answer, cache)

    # ------------------------------------------------------------------------------------------------------- tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., n]` of the tokens that may be chosen, for hidden states `[..., E]`."""
        if self.config.decoding is Decoding.all:
            return self.network.logits(hidden)
        return self.network.logits_of(hidden, self.vocabulary.lowest, self.vocabulary.first, self.vocabulary.stop)

    def ids(self, choices: Tensor) -> Tensor:
        """Return the ids of choices among the tokens that may be chosen."""
        if self.config.decoding is Decoding.all:
            return choices
        return torch.where(choices < self.vocabulary.codes, choices + self.vocabulary.lowest, self.vocabulary.stop)

    def choices(self, ids: Tensor) -> Tensor:
        """Return the inverse of `ids`."""
        if self.config.decoding is Decoding.all:
            return ids
        return torch.where(ids == self.vocabulary.stop, self.vocabulary.codes, ids - self.vocabulary.lowest)

    def distribution(self, logits: Tensor, chosen: Tensor | None = None) -> TokenDistribution:
        """Return the distribution over tokens, in rollouts (`chosen` None) and in learning."""
        config, most = self.config, logits.shape[-1]
        top_k = min(config.top_k, most)
        return TokenDistribution(logits, temperature=config.temperature, top_k=top_k, top_p=config.top_p, chosen=chosen)

    def counted(self, tokens: Tensor) -> Tensor:
        """Return which tokens `[B, T]` belong to an answer, bool: those through the first `|`."""
        stops = tokens == self.vocabulary.stop
        return stops.cumsum(1) - stops.long() == 0

    def decode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the tokens `[B, T]` of answers to normalised chunks `[B, H, D]`, and say which answers are exactly
        one chunk, bool `[B]`; see `ActionCodes`."""
        stops = tokens == self.vocabulary.stop
        there = stops.cumsum(1) == 0
        if self.config.decoding is Decoding.all:
            count = len(self.vocabulary.prefix)
            begun = torch.stack([tokens[:, place] == each for place, each in enumerate(self.vocabulary.prefix)]).all(0)
            there = there & ~functional.pad(begun[:, None].expand(-1, count), (0, tokens.shape[1] - count))
        chunks, whole = self.codes(self.vocabulary.first - tokens, there)
        return chunks, whole & stops.any(1)

    # ------------------------------------------------------------------------------------------------------- acting

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the tokens `[B, T]`, the end of the answer repeated behind it."""
        batch, steps = len(inputs["input_ids"]), self.answer_length
        patches = inputs["pixel_values"].shape[1] * self._patches
        cache = KeyValueCache(patches + inputs["input_ids"].shape[1] + len(self.given) + steps - 1)
        read = self.read(inputs, self.given.expand(batch, -1), cache)
        there = functional.pad(read.there, (0, len(self.given)), value=True)
        hidden = read.answer[:, -1] if len(self.given) else read.last
        chosen: list[Choice] = []
        while True:
            chosen.append(self.distribution(self.logits(hidden)).choose(mode, generator))
            if len(chosen) == min(steps, self._most_steps):
                break
            there = functional.pad(there, (0, 1), value=True)
            hidden = self.network.next(self.ids(chosen[-1].tokens), there, cache, read.last.dtype)
        choice = Choice.joined(chosen + chosen[-1:] * (steps - len(chosen)))
        tokens = self.ids(choice.tokens)
        counted = self.counted(tokens)
        tokens, logprobs = torch.where(counted, tokens, self.vocabulary.stop), choice.logprobs.where(counted, 0.0)
        chunks, valid = self.decode(tokens)
        actions = known(self.finish(chunks, inputs), logprobs.sum(1)[:, None, None])
        return ActOutput(
            actions=actions,
            logprobs=logprobs,
            values=self.value(read),
            trace={"tokens": tokens},
            counted=counted,
            invalid=~valid,
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`; one forward pass over all tokens of the answer."""
        tokens = trace["tokens"]
        read, hidden = self.predicting(inputs, self.given, tokens)
        chosen, counted = self.choices(tokens), self.counted(tokens)
        distribution = self.distribution(self.logits(hidden), chosen)
        return EvalOutput(
            logprobs=distribution.logprobs(chosen).where(counted, 0.0),
            entropy=distribution.entropy().where(counted, 0.0),
            values=self.value(read),
        )

    def predicting(self, inputs: Inputs, given: Tensor, tokens: Tensor) -> tuple[Read, Tensor]:
        """Encode observations and answers.

        Args:
            inputs: from `preprocess`.
            given: ids `[M]` that each answer begins with.
            tokens: ids `[B, T]` behind them.

        Returns:
            All outputs, and the hidden states `[B, T, E]` that predict the tokens.
        """
        read = self.read(inputs, torch.cat([given.expand(len(tokens), -1), tokens[:, :-1]], dim=1))
        if len(given):
            return read, read.answer[:, len(given) - 1 :]
        return read, torch.cat([read.last.unsqueeze(1), read.answer], dim=1)

    def value(self, read: Read) -> Tensor:
        """Return the critic's values `[B]`; what it reads has seen images and prompt, and no answer."""
        features = read.last.float()
        if self.config.value_from is ValueFrom.mean:
            there = read.there.unsqueeze(-1)
            features = (read.prefix.float() * there).sum(1) / there.sum(1)
        values: Tensor = self.value_head(features.detach() if self.config.detach_critic else features)
        return values

    def finish(self, chunks: Tensor, inputs: Inputs) -> Tensor:
        """Convert normalised chunks `[B, H, D]` to actions `[B, C, D]` for the simulator."""
        own = self.actions.unnormalize(chunks[:, : self.spec.chunk_size])
        actions: Tensor = self.units(own + relative_origin(inputs, self.config.relative_action_dims, own))
        return actions

    # ----------------------------------------------------------------------------------------------------- learning

    def answers(self, inputs: Inputs, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answers for demonstrated actions `[B, C, D]`, ids `[B, T]` padded with 0, and which of these are
        there: `Action: `, codes, `|` and `<eos>`; too long ones are cut, as public code does.

        Raises:
            PolicyError: chunks are shorter than those that the model writes.
        """
        if actions.shape[1] != self.codes.horizon:
            raise PolicyError(
                f"demonstrated chunks have {actions.shape[1]} actions, an answer of the model is a whole chunk of "
                f"{self.codes.horizon}",
                f"set rollout.chunk_size to {self.codes.horizon}",
            )
        own = self.units.inverse(actions).float()
        chunks = self.actions.normalize(own - relative_origin(inputs, self.config.relative_action_dims, own))
        vocabulary = self.vocabulary
        behind = [vocabulary.stop, vocabulary.end]
        encoded = [self.codes.fast.encode(chunk) for chunk in chunks.cpu().numpy()]
        rows = [[*vocabulary.prefix, *vocabulary.ids(codes), *behind] for codes in encoded]
        rows = [row[: self.architecture.answer_length - 1] for row in rows]
        ids, there = padded(rows, max(map(len, rows)))
        return torch.tensor(ids, device=self.device), torch.tensor(there, device=self.device)

    def sample_sizes(self, inputs: Inputs, actions: Tensor) -> Tensor | None:
        """See `Policy.sample_sizes`: the tokens of each answer, if the mean is over tokens."""
        if self.config.loss_mean is LossMean.samples:
            return None
        return self.answers(inputs, actions)[1].sum(1).float()

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`: cross-entropy of the answers over the whole vocabulary, each sample's mean."""
        tokens, there = self.answers(inputs, actions)
        _, hidden = self.predicting(inputs, self.begin, tokens)
        losses = functional.cross_entropy(self.network.logits(hidden).flatten(0, 1), tokens.flatten(), reduction="none")
        summed = (losses.view_as(there) * there).sum(1)
        return mean_over_samples(summed / there.sum(1), inputs)

    # ----------------------------------------------------------------------------------------------------------- parts

    @property
    def _patches(self) -> int:
        return (self.architecture.image_size // int(self.architecture.vision["patch_size"])) ** 2

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """See `Policy.abridged`: every token but the first two takes as long and as much memory as the second."""
        kept, self._most_steps = self._most_steps, ABRIDGED
        try:
            yield
        finally:
            self._most_steps = kept

    def tokens_per_observation(self, task: str) -> int:
        """See `Policy.tokens_per_observation`: images, prompt and answer."""
        images = len(self.cameras.order) + len(self.black)
        return images * self._patches + self.prompts.length + len(self.given) + self.answer_length - 1

    def cache_bytes(self, task: str) -> int:
        """See `Policy.cache_bytes`: a key and a value for every position in every layer."""
        sizes = self.architecture.language
        width = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim
        return width * self.dtype.itemsize * self.tokens_per_observation(task)

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are the layers of both transformers; adapters go to the language model,
        and the critic is trained in full beside them."""
        return ParallelPlan(
            blocks=self.modules_named(r"network\..*layers\.\d+"),
            adaptable=self.linear_layers("network.language."),
            heads=self.parts_beside("network"),
            root="network",
        )

    # ----------------------------------------------------------------------------------------------------------- files

    @property
    def naming(self) -> Naming:
        """Names of weights in the files that the model was built from."""
        return Naming(public=self.files.layout.public, own=self.files.layout.own)

    def load(self, folder: Path) -> None:
        """Read weights in the public layout; a vocabulary matrix that is missing is the other one. A missing critic
        keeps its weights.

        Raises:
            PolicyError: files are missing or damaged, or names or shapes of weights differ (they are named).
        """
        self.stored = read_weights(self.network, folder, self.naming, alike=tuple(MATRICES))
        self.metadata = read_metadata(folder)
        read_heads({"value_head": self.value_head}, folder / HEADS_FILE)

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write the layout that the weights were read from into an existing folder, and the critic beside it. Weights
        are in the types of the files that they were read from, unless they have learned digits that these would lose;
        one vocabulary matrix is written if the files had one and both are still equal."""
        self.files.write(folder)
        held = self.files.layout.matrices
        matrices = [self.network.get_parameter(name) for name in MATRICES]
        same = len(held) == 1 and torch.equal(*matrices)
        write_single_file(
            self.network,
            folder,
            self.naming,
            types=self.stored,
            metadata=self.metadata,
            without=tuple(name for name in MATRICES if same and name not in held),
        )
        write_heads({"value_head": self.value_head}, folder / HEADS_FILE)
        write_description(folder, self.options_to_save(config), self.spec)

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """See `Policy.options_to_save`; conventions come from the files of the model."""
        kept = SupportedModel.entry(config.name).kept
        return dataclasses.replace(config, **{name: getattr(self.config, name) for name in kept})
