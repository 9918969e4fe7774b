"""Policies that act outside of a run, and simulators that are stepped manually.

Shapes: `B` slots, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.config.schema import Config, EnvConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.envs.manager import Simulators, StepResult
from embodyrl.errors import UserError
from embodyrl.models.policy import ActOutput, Policy
from embodyrl.rollout.action_queue import ActionQueue, Overlap
from embodyrl.rollout.episodes import EpisodeSource

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor


class LoadedPolicy:
    """A trained policy, ready to act.

    Args:
        config: that it was trained with, or is to act with.
        engine: holds its weights.
        simulator: spec of the simulators to act in.
    """

    config: Config
    policy: Policy
    """The torch module: its weights, `spec`, `preprocess`, `act`, `evaluate`."""
    engine: HybridEngine
    """Holds its weights."""
    simulator: SimulatorSpec
    """What it sees and does: cameras, numbers of the state, action fields and limits, frequency."""

    def __init__(self, config: Config, engine: HybridEngine, simulator: SimulatorSpec) -> None:
        self.config = config
        self.policy = engine.policy
        self.simulator = simulator
        self.engine = engine

    @property
    def chunk_size(self) -> int:
        """`C`, actions in a chunk."""
        return self.policy.spec.chunk_size

    @property
    def action_dim(self) -> int:
        """`D`, dimensions of an action."""
        return self.policy.spec.action_dim

    def act(self, observation: Observation, *, sample: bool = False) -> NDArray[np.float32]:
        """Choose a chunk of actions for every env of an observation.

        Args:
            observation: of `B` envs, as `Envs` returns it: images uint8 `[B, V, H, W, 3]` or None, proprio float32
                `[B, S]` or None, and `B` task descriptions.
            sample: draw from the policy's distribution instead of taking the most likely actions.

        Returns:
            Actions `[B, C, D]` in the simulator's units.

        Raises:
            NumericsError: an action is NaN or infinite.
        """
        return self.engine.actions_of(self.decide(observation, sample=sample))

    def decide(
        self,
        observation: Observation,
        *,
        sample: bool = False,
        noise: torch.Generator | None = None,
        further: Mapping[str, Tensor] | None = None,
    ) -> ActOutput:
        """Return the decision that `act` takes actions from; with `noise` it is drawn from this random stream, and
        `further` are inputs of `Policy.act` beside those of the observation."""
        return self.engine.act(observation, "train" if sample or noise is not None else "eval", noise, further)

    def ensemble(self, num_envs: int, coefficient: float) -> ActionQueue:
        """Return temporal ensembling of this policy's chunks, as `eval.ensemble` does it.

        Args:
            num_envs: envs to act in.
            coefficient: weights are exp(-coefficient * i), i = 0 the oldest chunk.

        Raises:
            UserError: actions are choices, which have no mean.
        """
        overlap = Overlap(ensemble=coefficient)
        return ActionQueue.acting_in(self.simulator, num_envs, self.chunk_size, overlap, executed=1)


class Envs:
    """Simulators in processes of their own, stepped manually. An env whose episode ends begins the next one at once.

    Close them, or use them in a `with` block; they end with the thread that made them.

    Args:
        manager: started simulators.
        config: of the simulators.
        seed: of the training episodes that the envs play.
    """

    manager: Simulators
    """The interface below this one: single envs, states, rendering, asynchronous steps."""
    spec: SimulatorSpec
    """Task descriptions, action fields and limits, cameras, frequency."""
    num_envs: int
    """`B`, the number of envs."""
    chunk_size: int
    """`C`, actions per step."""

    def __init__(self, manager: Simulators, config: EnvConfig, *, seed: int) -> None:
        self.manager = manager
        self.spec = manager.spec
        self.num_envs = manager.num_envs
        self.chunk_size = manager.chunk_size
        self._config = config
        self._slots = np.arange(manager.num_envs)
        self._closed = self._is_playing = False
        self._begin_with(seed)

    def _begin_with(self, seed: int) -> None:
        """Go back to the first training episode of a seed."""
        self._source = EpisodeSource(self._config.sources, group_size=1, seed=seed)
        self._source.begin(None)
        self._begun = np.zeros(self.num_envs, np.int64)
        """Episodes of the source that each slot has begun."""

    @cached_property
    def single_observation_space(self) -> Space[Any]:
        """Gymnasium's space of what an env shows: a Box of `proprio` if that is all there is, else a Dict of those of
        `images`, `proprio` and `task_description` that there are."""
        from embodyrl.runner.spaces import observation_space

        return observation_space(self.spec, paraphrases=self._config.paraphrases)

    @cached_property
    def single_action_space(self) -> Space[Any]:
        """Gymnasium's space of what an env executes in a step: a Box `[D]` with the simulator's limits, Discrete or
        MultiDiscrete where all numbers are choices; `[C, D]` if C is more than 1."""
        from embodyrl.runner.spaces import action_space

        return action_space(self.spec, self.chunk_size)

    @cached_property
    def observation_space(self) -> Space[Any]:
        """`single_observation_space` of all envs."""
        from embodyrl.runner.spaces import batch_space

        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> Space[Any]:
        """`single_action_space` of all envs; `step` takes what it samples."""
        from embodyrl.runner.spaces import batch_space

        return batch_space(self.single_action_space, self.num_envs)

    def reset(self, episodes: Sequence[EpisodeSpec] | None = None, *, seed: int | None = None) -> Observation:
        """Begin an episode in every env, whatever it was playing.

        Args:
            episodes: one for each env; None: the next training episodes.
            seed: begin with the first training episodes of this seed; None: continue with those of the last one.

        Returns:
            images uint8 `[B, V, H, W, 3]` (None without cameras), proprio float32 `[B, S]` (None without), and `B` task
            descriptions.

        Raises:
            UserError: the seed is none, or there are episodes as well; the envs are closed.
            ValueError: the number of episodes is not that of the envs.
            WorkerError: a simulator failed; only `close` works then.
        """
        self._check_open()
        if seed is not None:
            if episodes is not None:
                raise UserError("reset got episodes and a seed: episodes have seeds of their own, so give one of both")
            self._begin_with(checked_seed(seed))
        shown = self.manager.reset(self._slots, self.begun(self._slots) if episodes is None else episodes)
        self._is_playing = True
        return detached_copy(shown)

    def step(self, actions: ArrayLike) -> StepResult:
        """Execute a chunk of actions in every env.

        Args:
            actions: `[B, C, D]` in the simulator's units; `[B, D]` where C is 1, or what `action_space` samples.
                Clipped to the action space.

        Returns:
            rewards float32 and success bool `[B, C]` (0 and False for actions not executed), terminated and truncated
            bool `[B]` (`ended` is either), steps int32 `[B]` (actions executed), `observation` (that of the next
            episode where one ended), and `final_observation` (at the end of the chunk, before any reset).

        Raises:
            UserError: the actions have another shape, or one is no finite number; the envs are closed, or were never
                reset.
            WorkerError: a simulator failed; only `close` works then.
        """
        result = self.manager.step(self._slots, self.checked(actions), self._following(self._slots))
        self._begun += result.ended | result.lost
        observation = detached_copy(result.observation)
        final = result.final_observation
        final = observation if final is result.observation else detached_copy(final)
        return replace(result, observation=observation, final_observation=final)

    def render(self) -> NDArray[np.uint8]:
        """Render images of all envs for people, `[B, H, W, 3]`; too slow for every step.

        Raises:
            UserError: the envs are closed, or were never reset.
            WorkerError: the simulator renders no images here, or failed; only `close` works then.
        """
        self._check_playing()
        return self.manager.render(self._slots)

    def close(self) -> None:
        """End the simulators. May be called again."""
        self._closed = True
        self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def begun(self, slots: NDArray[np.int64]) -> list[EpisodeSpec]:
        """Return the next training episode of each of these envs, which it is about to begin."""
        episodes = self._following(slots)
        self._begun[slots] += 1
        return episodes

    def checked(self, actions: ArrayLike) -> NDArray[np.float32]:
        """Return the actions of a step as `[B, C, D]`.

        Raises:
            UserError: they have another shape, or one is no finite number; the envs are closed, or were never reset.
        """
        self._check_playing()
        wanted = (self.num_envs, self.chunk_size, self.spec.action_dim)
        try:
            given = np.asarray(actions)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"actions are no array ({error}): give float32 {list(wanted)}") from error
        if given.dtype.kind not in "biuf":
            raise UserError(f"actions are {given.dtype}, not numbers: give float32 {list(wanted)}")
        alone = self.chunk_size == 1 and given.shape == (wanted[0], wanted[2])
        if given.shape != wanted and not alone and given.shape != self.action_space.shape:
            raise UserError(
                f"actions have shape {given.shape}, want [num_envs, chunk_size, action dims] = {wanted}: chunk_size=C "
                "of make_envs decides how many actions a step executes"
            )
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and refused
            chunks = given.reshape(wanted).astype(np.float32, copy=False)
        if not np.isfinite(chunks).all():
            env, action, dim = np.argwhere(~np.isfinite(chunks))[0]
            raise UserError(f"actions[{env}, {action}, {dim}] is {chunks[env, action, dim]}: want finite numbers")
        return chunks

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("these envs are closed: start new ones with make_envs")

    def _check_playing(self) -> None:
        self._check_open()
        if not self._is_playing:
            raise UserError("these envs play no episode yet: reset them first")

    def _following(self, slots: NDArray[np.int64]) -> list[EpisodeSpec]:
        """Return the next training episode of each of these envs."""
        return [self._source.episode(slot, int(self._begun[slot])) for slot in slots.tolist()]


def checked_seed(seed: object) -> int:
    """Return the seed of training episodes.

    Raises:
        UserError: it is none.
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"seed = {seed!r:.60}: want an integer of 0 or more; each env draws its own episodes from it")
    return int(seed)


def detached_copy(observation: Observation) -> Observation:
    """Return the observation with a copy of its images, which the simulators do not draw into."""
    return observation if observation.images is None else replace(observation, images=observation.images.copy())


class PolicyDemonstrator:
    """Lets a policy act; its chunks are executed one action at a time.

    Args:
        env: the simulator's config.
        engine: the policy.
        mode: `eval` takes the most likely actions, `train` draws them.
    """

    def __init__(self, env: EnvConfig, engine: HybridEngine, mode: Literal["train", "eval"]) -> None:
        self.env = env
        self._engine = engine
        self._mode = mode
        self._left: dict[int, deque[NDArray[np.float32]]] = {}
        """Actions of each slot's chunk that are still to be executed."""

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """See `Demonstrator`."""
        self._left[slot] = deque()

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """See `Demonstrator`."""
        rows = np.flatnonzero([not self._left[slot] for slot in slots.tolist()])
        if len(rows):
            chunks = self._engine.actions_of(self._engine.act(observation.take(rows), self._mode))
            for row, chunk in zip(rows.tolist(), chunks, strict=True):
                self._left[int(slots[row])].extend(chunk)
        return np.stack([self._left[slot].popleft() for slot in slots.tolist()])

    def recorded(self, observation: Observation) -> Observation:
        """See `Demonstrator`."""
        return observation
