"""Base class of flow-matching policies: a chunk of actions is denoised in a few steps, of which one or all are random.

Shapes: `B` samples, `K` denoising steps, `H` actions of the network's horizon, `A` numbers of an action in the network,
of which the first `C` actions and the first `D` numbers are executed; `E` width of the action network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowConfig, FlowSizes, NoiseMethod
from embodyrl.models.flow.denoising import (
    NoiseNetwork,
    TimeGrid,
    Transition,
    ValueHead,
    deterministic,
    euler,
    flow_cps,
    flow_noise,
    flow_sde,
    guidance_weight,
    prior,
)
from embodyrl.models.lerobot import Robot, unscaled
from embodyrl.models.policy import (
    PLAN,
    PLAN_WEIGHTS,
    SAMPLE_WEIGHTS,
    ActOutput,
    EvalOutput,
    Inputs,
    Mode,
    Policy,
    PolicyObservation,
    PolicySpec,
)
from embodyrl.models.saved import weight_type, write_description
from embodyrl.models.vla.folder import CheckpointFolder
from embodyrl.models.vla.processor import Normalizer, SimulatorUnits, convention_of, read_state
from embodyrl.models.weights import DTYPES, Naming, read_heads, read_weights, write_heads

HEADS_FILE = "flow_heads.safetensors"
PLAIN = "plain/"
"""Prefix of inputs of a prompt without words about actions."""
EVALUATION_SEED = 0
"""Seed of the initial noise in evaluation, which is the same for every chunk."""


@dataclass(frozen=True)
class Denoised:
    """Output of a network for noisy actions."""

    velocity: Tensor
    """`[B, H, A]` float32, from data to noise."""
    hidden: Tensor
    """`[B, H, E]`, the hidden states that the velocity is computed from."""


@dataclass(frozen=True)
class Contrasted:
    """What a network knows of observations with words about actions, and without them."""

    told: Any
    plain: Any


def told_of(condition: Any) -> Any:
    """Return a condition, of two the one with words."""
    return condition.told if isinstance(condition, Contrasted) else condition


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Velocities of a network at `T` points between each of `B` chunks and noise, of the `N` executed numbers."""

    velocities: Tensor
    """`[B, T, N]`, what the network says, from data to noise."""
    wanted: Tensor
    """`[B, T, N]`, noise minus chunk."""
    shares: Tensor
    """`[B, T]`, share of the noise in each point."""


@dataclass(frozen=True)
class Judged:
    """Scores of one denoising step of a chunk, or of all."""

    logprob: Tensor
    """`[B, H, A]`"""
    entropy: Tensor
    """`[B, H, A]`"""
    value: Tensor
    """`[B]`"""


@contextmanager
def guidable(inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs of a decision for the length of a block, in which gradients can be taken if they have a plan."""
    if PLAN not in inputs:
        yield inputs
        return
    with torch.inference_mode(False), torch.no_grad():
        yield {name: each.clone() for name, each in inputs.items()}  # those of inference mode have no gradients


class FlowPolicy(Policy):
    """Base of the model families. A subclass calls `set_up_flow` once it knows its sizes, and implements the abstract
    methods.

    The trace of `act` has `chain [B, K+1, H, A]` (noise first), `step [B]` (index of the random step) and
    `noise_level [B]` (with which it was drawn). `evaluate` needs nothing else besides the observation.
    """

    config: FlowConfig
    files: CheckpointFolder
    """Of the checkpoint, beside the weights."""
    acts_on_device = True
    network: nn.Module
    start: Tensor
    value_changes: bool = True
    """Whether `value_features` depends on the denoising step; if not, `act` evaluates the critic once."""

    def __init__(self, config: FlowConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)  # type: ignore[arg-type]
        self.config = config
        self.dtype = DTYPES[weight_type(config)]
        self.noise_level = config.noise_level
        self.stored: dict[str, torch.dtype] = {}
        """Types of the weights in the files that they were read from."""

    def set_up_robot(self, robot: Robot, simulator: SimulatorSpec | None, chunk_size: int, remedy: str) -> None:
        """Add the normalisation of states and actions and the conversion of actions, and set `spec`.

        Raises:
            PolicyError: the simulator's actions have another size or convention.
        """
        states = Normalizer(unscaled(0) if robot.states is None else robot.states)
        self.set_up_scales(states, Normalizer(robot.actions), simulator, chunk_size, remedy)

    def set_up_scales(
        self, states: Any, actions: Any, simulator: SimulatorSpec | None, chunk_size: int, remedy: str
    ) -> None:
        """Add normalisations, modules as `Normalizer` of as many numbers as their length; see `set_up_robot`."""
        self.states, self.actions = states, actions
        self.units = SimulatorUnits(self.convention(), simulator, len(actions), remedy)
        self.spec = PolicySpec(kind="flow", chunk_size=chunk_size, action_dim=len(actions), proprio_dim=len(states))

    def set_up_flow(self, grid: TimeGrid, *, horizon: int, action_dim: int, width: int, value_width: int) -> None:
        """Add time grid, critic and exploration.

        Args:
            grid: `K` steps.
            horizon: `H`.
            action_dim: `A`.
            width: `E`.
            value_width: width of the result of `value_features`.
        """
        config = self.config
        self.grid = grid
        self._value_width = value_width
        self.value_head = ValueHead(value_width, config.value_sizes)
        learns_noise = config.noise_method is NoiseMethod.flow_noise
        self.noise_network = (
            NoiseNetwork(width, action_dim, config.noise_low, config.noise_high) if learns_noise else None
        )
        start = torch.randn(horizon, action_dim, generator=torch.Generator().manual_seed(EVALUATION_SEED))
        self.register_buffer("start", start, persistent=False)

    @property
    def sizes(self) -> FlowSizes:
        """Sizes that steering depends on."""
        horizon, action_dim = self.start.shape
        return FlowSizes(horizon, action_dim, self._value_width)

    @property
    def plan_shape(self) -> tuple[int, int] | None:  # type: ignore[override]
        """See `Policy.plan_shape`: with `model.rtc`, the normalised actions of the horizon."""
        if self.config.rtc is None:
            return None
        horizon, action_dim = self.start.shape
        return horizon, action_dim

    def convention(self) -> ActionConvention:
        """Return the convention of unnormalized actions."""
        return convention_of(self.config)

    # ------------------------------------------------------------------------------------ what a family implements

    def read(self, observation: PolicyObservation) -> Inputs:
        """Convert an observation into network inputs; see `Policy.preprocess`, which is the default."""
        return super().preprocess(observation)

    @abstractmethod
    def condition(self, inputs: Inputs) -> Any:
        """Encode images, task description and state, once for all denoising steps."""

    @abstractmethod
    def denoise(self, condition: Any, x: Tensor, time: Tensor) -> Denoised:
        """Compute the velocity at `x [B, H, A]` and `time [B]`, in the family's convention of time."""

    @abstractmethod
    def value_features(self, condition: Any, denoised: Denoised) -> Tensor:
        """Return the input of the critic, `[B, value_width]`."""

    def padded_state(self, proprio: Tensor | None, batch: int, width: int) -> Tensor:
        """Return normalised states `[B, width]`, zeros behind them; nothing but zeros if the model reads none.

        Args:
            proprio: the observation's states `[B, S]`.
            batch: `B`.
            width: of states in the network.

        Raises:
            PolicyError: states are missing, or have another size.
        """
        size = len(self.states)
        if not size:
            return self.start.new_zeros(batch, width)
        normalized: Tensor = self.states.normalize(read_state(proprio, size, self.start.device))
        return functional.pad(normalized, (0, width - normalized.shape[-1]))

    def finish(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Convert the result of denoising `[B, H, A]` to actions `[B, C, D]` for the simulator."""
        actions: Tensor = self.units(self.actions.unnormalize(x[:, : self.spec.chunk_size, : self.spec.action_dim]))
        return actions

    def planned(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Return the plan `[B, H, A]` of a chunk, the result `x` of denoising, for a later decision: as the network has
        it, unless its numbers mean something else then."""
        return x

    def recalled(self, plan: Tensor, inputs: Inputs) -> Tensor:
        """Return the inverse of `planned`, for the inputs of another decision."""
        return plan

    def begun(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Return what denoising starts from, for noise `x [B, H, A]` and a plan among the inputs: the noise."""
        return x

    def counted(self, entries: Tensor, result: Tensor) -> Tensor:
        """Return what counts of log-probabilities or entropies `[B, H, A]`, `[B, C*D]`: those of executed numbers.

        Args:
            entries: of a chunk, or of one step of its denoising.
            result: of denoising, `[B, H, A]`.
        """
        return self._executed(entries)

    @abstractmethod
    def sft_targets(self, actions: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the targets of denoising for demonstrated actions `[B, C, D]`, and their weights in the loss (0 or 1);
        both `[B, H, A]`."""

    def learning_times(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return times `[B]` of training and their shares of noise, for draws `[B]` from Beta(1.5, 1). The default:
        time and share are the same."""
        times = draws * 0.999 + 0.001
        return times, times

    # ------------------------------------------------------------------------------------------- words about actions

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """See `Policy.preprocess`. With `model.indicator`, prompts say how good actions are to be; where it guides, the
        numbers of prompts without that are beside them, called `plain/...`."""
        indicator, better = self.config.indicator, observation.better
        if indicator is None:
            return self.read(observation)
        words = {1: f" {indicator.better}", 0: f" {indicator.worse}", -1: ""}
        acts = 1 if indicator.guidance else -1
        told = [acts] * len(observation.task_descriptions) if better is None else better.tolist()
        texts = [text + words[which] for text, which in zip(observation.task_descriptions, told, strict=True)]
        inputs = self.read(replace(observation, task_descriptions=texts))
        if better is None and indicator.guidance not in (0.0, 1.0):
            # Words are whole numbers; images and states, which are floats, are the same.
            plain = self.read(observation).items()
            inputs |= {PLAIN + name: column for name, column in plain if not column.is_floating_point()}
        return inputs

    def contrasted(self, inputs: Inputs) -> Any:
        """Return `condition`, or both conditions if the inputs have two prompts."""
        plain = {name.removeprefix(PLAIN): column for name, column in inputs.items() if name.startswith(PLAIN)}
        told = {name: column for name, column in inputs.items() if not name.startswith(PLAIN)}
        return Contrasted(self.condition(told), self.condition(told | plain)) if plain else self.condition(told)

    def say(self, condition: Any, x: Tensor, time: Tensor) -> Denoised:
        """Return `denoise` for a condition, or for two of them with the velocity beyond the first, away from the second
        (Ho & Salimans 2022, arXiv:2207.12598, eq. 6)."""
        if not isinstance(condition, Contrasted):
            return self.denoise(condition, x, time)
        assert self.config.indicator is not None, "only then are there two"
        told, plain = self.denoise(condition.told, x, time), self.denoise(condition.plain, x, time)
        return Denoised(plain.velocity.lerp(told.velocity, self.config.indicator.guidance), told.hidden)

    # -------------------------------------------------------------------------------------------------------- acting

    def set_progress(self, done: float) -> None:
        """Change the noise level; see `Policy.set_progress`."""
        self.noise_level = self.scheduled(done)["model.noise_level"]

    def scheduled(self, done: float) -> Mapping[str, float]:
        """See `Policy.scheduled`."""
        first, last = self.config.noise_level, self.config.noise_level_end
        return {"model.noise_level": first if last is None else first + (last - first) * done}

    def act(
        self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None, *, start: Tensor | None = None
    ) -> ActOutput:
        """See `Policy.act`. `eval` takes no random step, and starts every chunk from the same noise.

        Args:
            inputs, mode, generator: see `Policy.act`.
            start: noise `[B, H, A]` to start from, instead of the mode's own.
        """
        with guidable(inputs) as inputs:
            return self.decide(self.contrasted(inputs), inputs, mode, generator, start)

    def decide(
        self,
        condition: Any,
        inputs: Inputs,
        mode: Mode,
        generator: torch.Generator | None = None,
        start: Tensor | None = None,
    ) -> ActOutput:
        """Choose actions for observations that `condition` has encoded; see `act`."""
        batch, device = len(next(iter(inputs.values()))), self.start.device
        explores = mode == "train" and self.config.noise_method is not NoiseMethod.none
        # All draws use the device of the inputs and a fixed order, so that a rollout can be reproduced.
        x = self.starting_noise(batch, mode, generator) if start is None else start
        if PLAN in inputs:
            inputs = inputs | {PLAN: self.recalled(inputs[PLAN], inputs)}
            x = self.begun(x, inputs)
        step, level = torch.zeros(batch, dtype=torch.int64, device=device), x.new_full((batch,), self.noise_level)
        if explores:
            step = torch.randint(self._random_steps(), (batch,), generator=generator, device=device)
        chain: list[Tensor] = [x]
        judged: list[Judged] = []
        for number in range(len(self.grid)):
            here = torch.full_like(step, number)
            denoised, transition = self._look(condition, x, here, level, inputs)
            _, before, after = self.grid.at(here)
            follows = euler(x, denoised.velocity, before, after)
            if explores:
                noise = torch.randn(x.shape, generator=generator, device=device)
                random = torch.ones_like(here, dtype=torch.bool) if self.config.joint_logprob else here == step
                follows = torch.where(random[:, None, None], transition.sample(noise), follows)
            # A critic that reads only what `condition` gives says the same at every step, so it is asked once.
            known = judged[0].value if judged and not self.value_changes else None
            judged.append(self._judge(condition, denoised, transition, follows, known))
            x = follows
            chain.append(x)
        decision = self._summed(judged, chain[0]) if self.config.joint_logprob else _pick(judged, step)
        trace = {"chain": torch.stack(chain, dim=1), "step": step, "noise_level": level}
        return ActOutput(
            actions=self.finish(x, inputs),
            logprobs=self.counted(decision.logprob, x),
            values=decision.value,
            trace={"chunk": x} if self.config.noise_method is NoiseMethod.none else trace,
            plan=None if self.plan_shape is None else self.planned(x, inputs),
        )

    def starting_noise(self, batch: int, mode: Mode, generator: torch.Generator | None = None) -> Tensor:
        """Return the noise `[batch, H, A]` that denoising starts from: drawn in training, always the same in
        evaluation."""
        if mode == "eval":
            return self.start.expand(batch, -1, -1)
        return torch.randn(batch, *self.start.shape, generator=generator, device=self.start.device)

    def features(self, condition: Any, batch: int) -> Tensor:
        """Return what the network knows of observations before it begins, `[B, FlowSizes.features]`: the input of the
        critic, and the velocity of the executed numbers, for noise of 0 at the noisiest time. There the velocity is
        minus the mean of the actions that the policy may choose."""
        nothing = self.start.new_zeros(batch, *self.start.shape)
        time, _, _ = self.grid.at(torch.zeros(batch, dtype=torch.int64, device=self.start.device))
        denoised = self.say(condition, nothing, time)
        seen = self.value_features(told_of(condition), denoised).float()
        return torch.cat([seen, self._executed(denoised.velocity)], -1)

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`; only the random steps are computed.

        Raises:
            PolicyError: no step is random.
        """
        if self.config.noise_method is NoiseMethod.none:
            raise PolicyError("model.noise_method = none: actions have no log-probs")
        condition = self.condition(self.traced(inputs, trace))
        chain, level = trace["chain"], trace["noise_level"]
        # Each sample has a random step of its own, so the chain is indexed by pairs of sample and step.
        rows = torch.arange(len(chain), device=chain.device)

        def judge(step: Tensor) -> Judged:
            denoised, transition = self._look(condition, chain[rows, step], step, level)
            return self._judge(condition, denoised, transition, chain[rows, step + 1])

        if self.config.joint_logprob:
            every = [judge(torch.full_like(trace["step"], number)) for number in range(len(self.grid))]
            decision = self._summed(every, chain[:, 0])
        else:
            decision = judge(trace["step"])
        result = chain[:, -1]
        return EvalOutput(
            logprobs=self.counted(decision.logprob, result),
            entropy=self.counted(decision.entropy, result),
            values=decision.value,
        )

    def traced(self, inputs: Inputs, trace: Inputs) -> Inputs:
        """Return inputs with what a trace holds of them. The default: nothing."""
        return inputs

    def _random_steps(self) -> int:
        """Return the number of steps that the random one is drawn from; the last step of flow_cps adds no noise."""
        steps = len(self.grid)
        return steps - 1 if self.config.noise_method is NoiseMethod.flow_cps else steps

    def _look(
        self, condition: Any, x: Tensor, step: Tensor, level: Tensor, inputs: Inputs | None = None
    ) -> tuple[Denoised, Transition]:
        """Return the network's output at steps `[B]`, and the distribution of their results; guided, if the inputs have
        a plan."""
        time, before, after = self.grid.at(step)
        if inputs is not None and PLAN in inputs:
            denoised = self.guided(condition, x, time, before, inputs)
        else:
            denoised = self.say(condition, x, time)
        if self.noise_network is not None:
            std = self.noise_network(denoised.hidden)
            return denoised, flow_noise(x, denoised.velocity, before, after, std)
        if self.config.noise_method is NoiseMethod.none:
            return denoised, deterministic(x, denoised.velocity, before, after)
        method = flow_sde if self.config.noise_method is NoiseMethod.flow_sde else flow_cps
        return denoised, method(x, denoised.velocity, before, after, level[:, None, None])

    def guided(self, condition: Any, x: Tensor, time: Tensor, share: Tensor, inputs: Inputs) -> Denoised:
        """Return the network's output with a velocity that leads to what was planned, where that counts."""
        assert self.config.rtc is not None, "only then are there plans"
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            denoised = self.say(condition, x, time)
            data = x - denoised.velocity * share
            missing = (inputs[PLAN] - data.detach()) * inputs[PLAN_WEIGHTS].unsqueeze(-1)
            (pull,) = torch.autograd.grad(data, x, missing)
        # Velocities point from data to noise here, in the paper the other way.
        velocity = denoised.velocity.detach() - guidance_weight(share, self.config.rtc) * pull
        return Denoised(velocity, denoised.hidden.detach())

    def _judge(
        self, condition: Any, denoised: Denoised, transition: Transition, reached: Tensor, value: Tensor | None = None
    ) -> Judged:
        """Score a step with result `reached [B, H, A]`; the critic is evaluated unless `value [B]` is given."""
        if value is None:
            features = self.value_features(told_of(condition), denoised)
            value = self.value_head(features.detach() if self.config.detach_critic else features)
        return Judged(logprob=transition.logprob(reached), entropy=transition.entropy(), value=value)

    def _summed(self, steps: Sequence[Judged], start: Tensor) -> Judged:
        """Return the mean over all steps; log-probability and entropy include the initial noise."""
        first, count = prior(start), len(steps) + 1
        return Judged(
            logprob=(first.logprob(start) + sum(step.logprob for step in steps)) / count,
            entropy=(first.entropy() + sum(step.entropy for step in steps)) / count,
            value=torch.stack([step.value for step in steps]).mean(0),
        )

    def _executed(self, entries: Tensor) -> Tensor:
        """Return the part of `[B, H, A]` that belongs to executed actions, `[B, C*D]`."""
        return entries[:, : self.spec.chunk_size, : self.spec.action_dim].flatten(1)

    # --------------------------------------------------------------------------------------------------------- files

    @property
    @abstractmethod
    def naming(self) -> Naming:
        """Names of weights in the files that the model was built from."""

    def load(self, folder: Path) -> None:
        """Read weights in a public layout. A missing critic or noise network keeps its weights.

        Raises:
            PolicyError: files are missing or damaged, or names or shapes of weights differ (they are named).
        """
        self.stored = read_weights(self.network, folder, self.naming)
        read_heads(self._heads(), folder / HEADS_FILE)

    def write_network(self, folder: Path) -> None:
        """Write the network's weights in the layout that they were read from, into an existing folder."""
        raise NotImplementedError

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write the public layout that the weights were read from into an existing folder, and critic and noise network
        beside it."""
        self.files.write(folder)
        self.write_network(folder)
        self.save_heads(folder)
        write_description(folder, self.options_to_save(config), self.spec)

    def _heads(self) -> dict[str, nn.Module]:
        """Return the parts that public checkpoints do not contain."""
        heads: dict[str, nn.Module | None] = {"value_head": self.value_head, "noise_network": self.noise_network}
        return {name: head for name, head in heads.items() if head is not None}

    def save_heads(self, folder: Path) -> None:
        """Write critic and noise network beside the weights."""
        write_heads(self._heads(), folder / HEADS_FILE)

    # ------------------------------------------------------------------------------------------------------ learning

    def imitation_draws(self, samples: int, generator: torch.Generator) -> Inputs:
        """Draw `time [samples]` from Beta(1.5, 1) and `noise [samples, H, A]`; see `Policy.imitation_draws`."""
        device = self.start.device
        uniform = torch.rand(samples, generator=generator, device=device)
        noise = torch.randn(samples, *self.start.shape, generator=generator, device=device)
        return {"time": uniform.pow(1.0 / 1.5), "noise": noise}  # the inverse of Beta(1.5, 1)'s distribution function

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """Flow matching (Lipman et al., 2023): squared error of the velocity at a random time; see
        `Policy.sft_loss`."""
        data, counts = self.sft_targets(actions, inputs)
        time, share = self.learning_times(draws["time"])
        errors = self.flow_errors(self.condition(inputs), data, draws["noise"], time, share)
        return masked_error(errors, counts, inputs.get(SAMPLE_WEIGHTS))

    def match(self, inputs: Inputs, trace: Inputs, draws: Inputs) -> Matched:
        """Return velocities between chunks and noise, and the ones that lead from each to the other.

        Args:
            inputs: from `preprocess`.
            trace: of `act` with `noise_method: none`; its `chunk [B, H, A]` is the result of denoising.
            draws: `T` times and noises for each, `time [B, T]` and `noise [B, T, H, A]`; see `imitation_draws`.
        """
        condition, chunks = self.condition(self.traced(inputs, trace)), trace["chunk"]
        found = []
        for drawn, noise in zip(draws["time"].unbind(1), draws["noise"].unbind(1), strict=True):
            time, share = self.learning_times(drawn)
            amount = share[:, None, None]
            said = self.denoise(condition, amount * noise + (1.0 - amount) * chunks, time).velocity
            found.append((self.counted(said, chunks), self.counted(noise - chunks, chunks), share))
        velocities, wanted, shares = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return Matched(velocities=velocities, wanted=wanted, shares=shares)

    def fill_horizon(self, actions: Tensor) -> Tensor:
        """Pad normalised actions `[B, C, D]` to `[B, H, A]`: repeat the last action, and fill each with zeros."""
        horizon, width = self.start.shape
        last = actions[:, -1:].expand(-1, horizon - actions.shape[1], -1)
        return functional.pad(torch.cat([actions, last], dim=1), (0, width - actions.shape[2]))

    def flow_errors(self, condition: Any, data: Tensor, noise: Tensor, time: Tensor, share: Tensor) -> Tensor:
        """Compute squared errors `[B, H, A]` of the velocity between `data` and `noise [B, H, A]` at times `[B]`."""
        amount = share[:, None, None]
        said = self.denoise(condition, amount * noise + (1.0 - amount) * data, time)
        return (said.velocity - (noise - data)).square()


def masked_error(errors: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of `errors [B, H, A]` where `counts` is 1, those of each sample times its weight `[B]`."""
    weighted = errors if weights is None else errors * weights[:, None, None]
    return (weighted * counts).sum() / counts.sum()


def _pick(steps: Sequence[Judged], step: Tensor) -> Judged:
    """Select the step `[B]` of each chunk."""
    rows = torch.arange(len(step), device=step.device)

    def at(entries: list[Tensor]) -> Tensor:
        return torch.stack(entries)[step, rows]

    return Judged(
        logprob=at([judged.logprob for judged in steps]),
        entropy=at([judged.entropy for judged in steps]),
        value=at([judged.value for judged in steps]),
    )
