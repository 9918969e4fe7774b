"""Dataset aggregation: the policy acts, an expert says what it would have done, and the policy imitates that beside
demonstrations (Ross et al. 2011, arXiv:1011.0686)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.dagger.config import DAggerConfig
from embodyrl.methods.imitation.first import CLONING, FirstImitation
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import Baseline
from embodyrl.methods.replay.learner import ReplayLearner
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay

if TYPE_CHECKING:
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions


class Aggregation(ReplayLearner):
    """Imitates what an expert would have done in decisions of a replay.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    algorithm: DAggerConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self.imitation = Imitation(engine)
        self._first_steps = self.algorithm.off_policy.imitation.first_steps

    @property
    def acts_randomly_first(self) -> bool:
        """See `ReplayLearner`: the policy has to get into states by itself."""
        return False

    @property
    def baseline(self) -> Baseline | None:
        """See `Learner`."""
        return CLONING if self._first_steps else None

    def prepare(
        self,
        demonstrations: Demonstrations | None,
        transitions: Transitions | None,
        done: int,
        message: Callable[[str], None],
    ) -> Iterator[int]:
        """See `Learner`: imitate the demonstrations."""
        if done >= self._first_steps:
            return
        assert demonstrations is not None, "the config rules ask for it"
        if not done:
            # It goes on imitating, what it meets in rollouts included, so that these go into the statistics, too: with
            # those of the demonstrations alone push was learned worse, in three seeds of three.
            self.statistics.begin(None, transitions, policy_keeps=False)
        yield from FirstImitation(self.imitation, demonstrations, self._first_steps, message).steps(done)

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`. All that is known has a label, whoever acted: there is nothing to distinguish."""
        if transitions is None:
            return None
        share = self.algorithm.off_policy.demonstrations
        known = len(transitions) + len(replay)
        return DemonstrationSampler(
            demonstrations=transitions, share=len(transitions) / known if isinstance(share, str) else share
        )

    def learn(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str] = ()) -> dict[str, float]:
        """See `ReplayLearner`."""
        return self.imitation.learn_labels(minibatches, task_descriptions)

    def progress(self, replay: Replay) -> dict[str, float]:
        """See `ReplayLearner`."""
        return {"train/updates": float(replay.taken)}
