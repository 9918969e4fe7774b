"""Learner: what a method does in a run. Its settings, and what it needs, are in its `AlgorithmConfig`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from embodyrl.algorithms.columns import Bound
from embodyrl.config.schema import AlgorithmConfig, Config, EngineConfig, RewardConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.parallel import Ranks
from embodyrl.envs import SimulatorSpec
from embodyrl.models.policy import ActOutput, Inputs, Policy
from embodyrl.registry import ALGORITHMS, REWARDS

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions
    from embodyrl.rollout.hooks import Hook
    from embodyrl.rollout.replay import Replay


@dataclass(frozen=True)
class Baseline:
    """What the evaluation before the first iteration shows, for comparison with later ones."""

    name: str
    """As in `of NAME alone: success 0.5`."""
    metric: str
    """Of its success, beside that of every evaluation."""
    key: str
    """Of its evaluation in summary.json."""
    would_do: Callable[[float], str | None]
    """Takes its success; returns a warning if there is little left to learn."""


class Learner:
    """A method in a run. A subclass adds its update, which its stages call, and what it keeps.

    Args:
        engine: holds the policy, its optimiser, and random streams.
        algorithm: the method's settings.
        simulator: spec of the simulators.
    """

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        self.engine, self.algorithm, self.simulator = engine, algorithm, simulator
        self.policy, self.device = engine.policy, engine.device
        reward = algorithm.parts().get("reward", RewardConfig())
        self.reward: Bound[Tensor] = Bound(REWARDS.load(reward.name), reward)
        """The reward function that is learned from; of a method that learns from none, the usual one."""

    @property
    def ranks(self) -> Ranks:
        """Those of the run."""
        return self.engine.ranks

    @classmethod
    def own_parameters(cls, policy: Policy, algorithm: AlgorithmConfig) -> Sequence[nn.Parameter]:
        """Return the parameters of a policy that the method steps by an optimiser of its own."""
        return ()

    @classmethod
    def hooks(cls, config: Config, simulator: SimulatorSpec) -> Sequence[Hook]:
        """Return what changes actions or results in rollouts, in each process with simulators; these may have no
        learner."""
        return ()

    @classmethod
    def equip(cls, policy: Policy, algorithm: AlgorithmConfig) -> None:
        """Add to a policy, in a process that has no learner, what it acts by beside its own weights; the contents come
        with these."""

    # ---- for `embodyrl plan`, which builds no learner

    @classmethod
    def beside(cls, policy: Policy, algorithm: AlgorithmConfig) -> nn.Module | None:
        """Return the networks that learn beside a policy, for a trial; None: there are none."""
        return None

    @classmethod
    def trial_loss(
        cls,
        algorithm: AlgorithmConfig,
        policy: Policy,
        beside: nn.Module | None,
        inputs: Inputs,
        decision: ActOutput,
    ) -> Tensor:
        """Return a scalar that depends on all outputs that are trained: its backward pass takes as much memory as that
        of the method.

        Args:
            algorithm: the method's settings.
            policy: without weights of its own.
            beside: see there.
            inputs: of the policy, `[B, ...]`.
            decision: of the policy for them.
        """
        output = policy.evaluate(inputs, dict(decision.trace))
        return output.logprobs.float().sum() + output.entropy.float().sum()

    @classmethod
    def memory(
        cls, policy: Policy, algorithm: AlgorithmConfig, simulator: SimulatorSpec, seed: int
    ) -> Mapping[str, int]:
        """Return the main memory that learning takes beside the policy and its optimiser, by name [bytes]."""
        return {}

    # ---- for the run

    @property
    def baseline(self) -> Baseline | None:
        """What the run begins with, and is compared with; None: with nothing that was learned."""
        return None

    def explores(self, replay: Replay | None) -> bool:
        """Return whether the next rollout consists of random actions."""
        return False

    def prepare(
        self,
        demonstrations: Demonstrations | None,
        transitions: Transitions | None,
        done: int,
        message: Callable[[str], None],
    ) -> Iterator[int]:
        """Learn before anything is collected, if the method begins so. Yields, a few at a time, how many steps of it
        have been made; a run that is stopped meanwhile continues from there.

        Args:
            demonstrations: of `data.path`, in minibatches; None: there are none.
            transitions: the same as decisions beside those of a replay, if the method has both.
            done: steps that were made before.
            message: shows a line to people.
        """
        yield from ()

    def state_dict(self) -> dict[str, Any]:
        """Return what continues from a checkpoint besides the policy and its optimiser, as entries of the engine's
        state. All ranks must call it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, which may be among other entries."""


BuildEngine = Callable[[Config, SimulatorSpec], HybridEngine]
"""Builds the engine of the policy that a config names, for a simulator."""


class LearnerAlone(ABC):
    """A method that learns in one process from data alone, and leaves something else than a policy
    (`Needs.alone`)."""

    written: str
    """Name of what it writes into a run directory."""

    @abstractmethod
    def __init__(self, config: Config, build: BuildEngine) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """Return a line on what it learns from."""

    @abstractmethod
    def iterate(self, number: int) -> dict[str, float]:
        """Learn for an iteration, counted from 1; returns metrics."""

    @abstractmethod
    def evaluate(self, message: Callable[[str], None]) -> dict[str, float]:
        """Evaluate, and show the result; returns metrics."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write what was learned into a run directory."""

    @abstractmethod
    def closing(self, folder: Path) -> Iterator[str]:
        """Yield the last lines for people."""


def alone_class(algorithm: AlgorithmConfig) -> type[LearnerAlone]:
    """Return the class of a method that learns alone, imported if necessary."""
    found: type[LearnerAlone] = ALGORITHMS.entry(algorithm.name).load_learner()
    return found


def learner_class(algorithm: AlgorithmConfig) -> type[Learner]:
    """Return the class of a method's learner, imported if necessary."""
    found: type[Learner] = ALGORITHMS.entry(algorithm.name).load_learner()
    return found


def build_learner(
    policy: Policy,
    algorithm: AlgorithmConfig,
    *,
    simulator: SimulatorSpec,
    config: EngineConfig,
    iterations: int,
    seed: int,
    **options: Any,
) -> Learner:
    """Build the engine of a policy, and the method that learns with it.

    Args:
        policy: see `HybridEngine`.
        algorithm: the method's settings.
        simulator: spec of the simulators.
        config, iterations, seed: see `HybridEngine`.
        options: further arguments of `HybridEngine`.

    Raises:
        PolicyError: the policy cannot learn so.
    """
    kind = learner_class(algorithm)
    excluded = kind.own_parameters(policy, algorithm)
    engine = HybridEngine(policy, config=config, iterations=iterations, seed=seed, excluded=excluded, **options)
    return kind(engine, algorithm, simulator)
