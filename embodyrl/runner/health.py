"""What a run says of itself for people: warnings that its numbers give reason for, and what became of simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from embodyrl.config.schema import Config, OldLogprobs
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs.manager import EnvManager
from embodyrl.runner.callbacks import Callback
from embodyrl.runner.state import Progress

OFFLOADED = {
    "simulators": "the simulators are gone while the policy learns",
    "optimizer": "the optimiser's state is away while the policy acts",
    "reference": "the reference policy is away but for scoring a batch",
}
"""What leaves its place for a while, by the name in `memory/<name>_freed_mib`."""
RATIO_ERROR = 1e-2
"""A probability ratio that is farther from 1 before any weight changed is worth a warning: a clip is some 0.2 wide."""
IDLE_ITERATIONS = 3
"""So many iterations in a row with nothing to learn from are worth a warning."""
SHOWN_SLOTS = 8
"""So many slots are named in a message."""


class Warnings(Callback):
    """Says what the metrics of an iteration give reason for, everything once.

    Args:
        config: of the run.
        precision: what forward passes compute in, for people.
        message: says a line.
    """

    def __init__(self, config: Config, precision: str, message: Callable[[str], None]) -> None:
        self._config = config
        self._precision = precision
        self._message = message
        self._said: set[str] = set()
        self._idle = 0

    def warn(self, kind: str, text: str) -> None:
        """Say a warning, of each kind the first one alone."""
        self._once(kind, f"warning: {text}")

    def on_iteration(self, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        for name, text in OFFLOADED.items():
            freed = metrics.get(f"memory/{name}_freed_mib")
            if freed is not None:
                self._once(f"offload {name}", f"offload: {text}, which frees {freed:.0f} MiB")
        self._warn_if_nothing_is_learned(metrics)
        self._warn_if_ratios_start_elsewhere(metrics)

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._message(text)

    def _warn_if_nothing_is_learned(self, metrics: Mapping[str, float]) -> None:
        """Say so when iteration after iteration has nothing to learn from; again if that comes again."""
        self._idle = self._idle + 1 if metrics.get("train/epochs") == 0 else 0
        if self._idle == IDLE_ITERATIONS:
            self._message(
                f"warning: nothing was learned in {IDLE_ITERATIONS} iterations, because the episodes of each group end "
                f"alike (success {metrics.get('env/success_once', 0.0):.2f}): start from a policy that sometimes "
                f"succeeds (model.checkpoint), choose easier tasks, or a reward that tells episodes apart "
                f"(algorithm.reward=dense)"
            )

    def _warn_if_ratios_start_elsewhere(self, metrics: Mapping[str, float]) -> None:
        """Say that the update's forward passes do not give the log-probs of the rollout's."""
        error = metrics.get("train/ratio_error_first_minibatch", 0.0)
        if error <= RATIO_ERROR:
            return
        remedy = (
            "algorithm.old_logprobs=recompute computes them again as the update does (one forward pass more), "
            "engine.precision=float32 rounds less"
        )
        if self._config.algorithm.old_logprobs is OldLogprobs.recompute:
            remedy = "they were computed again, so the policy's `evaluate` gives other log-probs for the same decisions"
        self.warn(
            "ratio_error",
            f"probability ratios are off 1 by up to {error:.2g} in iteration {metrics['iteration']:.0f}, before any "
            f"weight changed, because the update computes other log-probs than the rollout "
            f"({self._precision}): {remedy}",
        )


class SimulatorHealth:
    """Follows which simulator processes died, and which slots did not come back from their states, over all ranks.

    Args:
        manager: the simulators of this rank.
        engine: knows the other ranks.
        progress: where both are counted.
        name: of the simulator.
        message: says a line.
    """

    def __init__(
        self, manager: EnvManager, engine: HybridEngine, progress: Progress, name: str, message: Callable[[str], None]
    ) -> None:
        self._manager = manager
        self._ranks = engine.ranks
        self._progress = progress
        self._name = name
        self._message = message
        manager.count_restarts(progress.restarts)

    def report(self) -> dict[str, float]:
        """Say what happened since the last call; returns metrics. All ranks must call it."""
        return self._report_deaths() | self.report_mismatches()

    def _report_deaths(self) -> dict[str, float]:
        """Say which simulator processes died and were replaced."""
        own = [str(death) for death in self._manager.take_deaths()]
        deaths = [death for each in self._ranks.gather_values(own) for death in each]
        for death in deaths:
            self._message(f"replaced a simulator process; what it was playing is invalid. {death}")
        self._progress.restarts += len(deaths)
        self._manager.count_restarts(self._progress.restarts)
        return {"env/restarts": float(self._progress.restarts)} if self._progress.restarts else {}

    def report_mismatches(self, changed: str = "") -> dict[str, float]:
        """Say once that slots do not come back from their states as they were; returns metrics. All ranks must call it.

        Args:
            changed: how the simulators differ from those that the states are of, where they do.
        """
        first = self._ranks.rank * self._manager.num_envs
        own = [first + slot for slot in self._manager.take_mismatches()]
        slots = [slot for each in self._ranks.gather_values(own) for slot in each]
        self._progress.restore_mismatches += len(slots)
        if slots and self._progress.comes_back:
            why = (
                f"They were saved with other simulators: {changed}"
                if changed
                else "Its episodes depend on more than start state, seed and actions. Until they do not, evaluations "
                "and resumes invalidate what is in progress (see 'The one rule' in docs/simulators.md); "
                "env/restore_mismatches counts, workers/env-*.log names the episodes"
            )
            self._message(
                f"warning: simulator {self._name!r} did not come back from its saved states as it was, in "
                f"{len(slots)} slots ({_some(slots)}). What they were playing is invalid: nothing is learned from it. "
                + why
            )
            self._progress.comes_back = bool(changed)
        count = self._progress.restore_mismatches
        return {"env/restore_mismatches": float(count)} if count else {}


def _some(slots: Sequence[int]) -> str:
    """The first of these slots, in words."""
    return ", ".join(map(str, slots[:SHOWN_SLOTS])) + (", ..." if len(slots) > SHOWN_SLOTS else "")
