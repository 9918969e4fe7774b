"""Small networks that judge observations for a reward: the small models, whose actions are the answers to a question.

So their network, options, files and supervised loss are those of a policy: with discrete actions, whose loss is the
cross-entropy, for the question whether the task is solved; with continuous ones, whose loss is the squared error, for
the question how far it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models.build import load_policy
from embodyrl.models.judging import CLASSIFIER, PROGRESS, JudgeFacts, JudgeInput, JudgeKind
from embodyrl.models.policy import Inputs, Policy, PolicyObservation


class Judge:
    """A small network that judges observations.

    Args:
        policy: a policy whose actions are answers.
    """

    kind: ClassVar[JudgeKind]
    answer: ClassVar[ActionField]
    """Its only action."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval()

    @classmethod
    def spec(cls, seen: JudgeInput) -> SimulatorSpec:
        """Return the spec of a simulator whose actions are answers; a model is built for it."""
        return SimulatorSpec(
            tasks={},
            actions=(cls.answer,),
            proprio_dim=seen.state_dim,
            max_episode_steps=1,
            control_frequency=1.0,
            cameras=seen.cameras,
            image_size=seen.image_size,
            frames=seen.frames,
        )

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """Read one from its folder.

        Raises:
            PolicyError: there is none, or it is damaged.
        """
        facts = JudgeFacts.read(folder, cls.kind)
        policy = load_policy(facts.model, checkpoint=folder, simulator=cls.spec(facts.seen), chunk_size=1)
        return cls(policy.to(device))

    def _inputs(self, observation: Observation) -> Inputs:
        return self.policy.preprocess(PolicyObservation.of(observation))


class SuccessClassifier(Judge):
    """Says how likely it is that the task is solved."""

    kind = CLASSIFIER
    answer = ActionField(name="answer", meaning="discrete", unit="1", low=(0.0,), high=(1.0,))
    """1: solved."""

    @torch.inference_mode()
    def probabilities(self, observation: Observation) -> NDArray[np.float32]:
        """Return the probability of success at each observation, `[B]`."""
        count = len(observation.task_descriptions)
        yes = torch.ones(count, 1, dtype=torch.long, device=next(self.policy.parameters()).device)
        output = self.policy.evaluate(self._inputs(observation), {"sample": yes})
        found: NDArray[np.float32] = output.logprobs[:, 0].exp().cpu().numpy()
        return found


class ProgressPredictor(Judge):
    """Says how far the task is."""

    kind = PROGRESS
    answer = ActionField(name="progress", meaning="native", unit="1", low=(0.0,), high=(1.0,))
    """1: solved; see `data.judgements.ProgressLabels`."""

    @torch.inference_mode()
    def progress(self, observation: Observation) -> NDArray[np.float32]:
        """Return the progress at each observation, 0 .. 1, `[B]`."""
        found: NDArray[np.float32] = self.policy.act(self._inputs(observation), "eval").actions[:, 0, 0].cpu().numpy()
        return found
