"""A classifier of success: one of the small models, whose actions are the answers to the question whether the task is
solved.

So its network, options, files and supervised loss (cross-entropy) are those of a policy with discrete actions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models.build import load_policy
from embodyrl.models.judging import ClassifierFacts, ClassifierInput
from embodyrl.models.policy import Policy, PolicyObservation

ANSWER = ActionField(name="answer", meaning="discrete", unit="1", low=(0.0,), high=(1.0,))
"""1: solved."""


def spec_of_answers(seen: ClassifierInput) -> SimulatorSpec:
    """Return the spec of a simulator whose actions are answers; a model is built for it."""
    return SimulatorSpec(
        tasks={},
        actions=(ANSWER,),
        proprio_dim=seen.state_dim,
        max_episode_steps=1,
        control_frequency=1.0,
        cameras=seen.cameras,
        image_size=seen.image_size,
        frames=seen.frames,
    )


class SuccessClassifier:
    """Says how likely it is that the task is solved.

    Args:
        policy: a policy whose actions are answers.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.eval()

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> SuccessClassifier:
        """Read a classifier from its folder.

        Raises:
            PolicyError: there is none, or it is damaged.
        """
        facts = ClassifierFacts.read(folder)
        policy = load_policy(facts.model, checkpoint=folder, simulator=spec_of_answers(facts.seen), chunk_size=1)
        return cls(policy.to(device))

    @torch.inference_mode()
    def probabilities(self, observation: Observation) -> NDArray[np.float32]:
        """Return the probability of success at each observation, `[B]`."""
        inputs = self._policy.preprocess(PolicyObservation.of(observation))
        count = len(observation.task_descriptions)
        yes = torch.ones(count, 1, dtype=torch.long, device=next(self._policy.parameters()).device)
        found: NDArray[np.float32] = self._policy.evaluate(inputs, {"sample": yes}).logprobs[:, 0].exp().cpu().numpy()
        return found
