"""What a learning method asks of the rest of the program, told from its settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodyrl.config.replay import InterveneConfig, ReplayConfig


class Learns(StrEnum):
    """What a method learns a policy by, which a model must offer."""

    nothing = "nothing"
    """No policy."""
    likelihood = "likelihood"
    """Log-probs of its actions (`Policy.evaluate`)."""
    reparameterization = "reparameterization"
    """Actions that are differentiable functions of noise (`SoftPolicy.draw`)."""
    imitation = "imitation"
    """Its supervised loss (`Policy.sft_loss`): any model and any kind of action will do."""
    weighted_imitation = "weighted_imitation"
    """Its supervised loss, in which each sample has a weight (`ModelEntry.weighs`)."""
    velocity = "velocity"
    """The velocity of a flow policy between its actions and noise (`FlowPolicy.match`); actions need no log-probs."""
    flow = "flow"
    """Velocities that make chunks of noise, beside critics that choose among several (`FlowActorCritic`)."""
    one_step = "one_step"
    """Such velocities, and a network distilled from them that critics teach."""
    noise = "noise"
    """The noise of a flow policy, which stays as it is (`models.flow.config.FlowInfo`)."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method asks of a model, of simulators, and of the program that runs it."""

    learns: Learns = Learns.nothing
    rollouts: bool = False
    """Whether anything is collected."""
    critic: bool = False
    """Whether the policy's own critic values every decision of a rollout."""
    reference: bool = False
    """Whether the policy that the run began with stays, to be compared with."""
    replay: ReplayConfig | None = None
    """Memory of past decisions."""
    only_labelled: bool = False
    """Whether decisions of the replay count only where an expert has said what it would do."""
    transitions: bool = False
    """Whether demonstrations are decisions beside those of the replay, too."""
    outcomes: bool = True
    """Whether demonstrations must show rewards and successes, to be such decisions."""
    whole_episodes: bool = False
    """Whether it is learned from what came of whole episodes; decisions count only once theirs has ended."""
    expert: InterveneConfig | None = None
    """Expert beside the policy."""
    most_likely: bool = False
    """Whether rollouts take the policy's most likely actions, as evaluations do."""
    steering: Any = None
    """Options of the network that chooses the noise of a frozen flow policy (`models.flow.config.SteeringConfig`)."""
    shifts_images: bool = False
    """Whether images that are learned from are shifted, which takes a second copy."""
    whole_policy: bool = False
    """Whether every rank has all of the policy, so that no weight can be sharded."""
    alone: bool = False
    """Whether it learns in one process from data alone, and leaves something else than a policy."""
    to_roll_out_nothing: str = ""
    """Setting with which nothing would be collected; empty: there is none."""

    imitates_labels: bool = False
    """Whether what the expert would have done is imitated, whoever acts."""

    @property
    def imitates(self) -> bool:
        """Whether the policy only imitates."""
        return self.learns is Learns.imitation


@dataclass(frozen=True, kw_only=True)
class IterationSize:
    """How much is learned from in an iteration."""

    decisions: int
    """Maximum number of chunks; samples in supervised learning."""
    steps: int
    """Optimizer steps."""
    minibatch: int
    """Decisions of each."""
    passes: int = 0
    """Times that the large columns of a rollout are read by ranks that have not collected them."""


@dataclass(frozen=True)
class Idleness:
    """Why an iteration has learned nothing."""

    why: str
    remedy: str = ""
    """What to do if it stays so; empty: it passes."""
