"""Demonstrators: scripted experts and policies that choose actions for recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from embodyrl.errors import UserError
from embodyrl.registry import EXPERTS, SIMULATORS, Requirement

if TYPE_CHECKING:  # `embodyrl list` needs none of it
    import numpy as np
    from numpy.typing import NDArray

    from embodyrl.config.schema import EnvConfig
    from embodyrl.envs import EpisodeSpec, Observation


def declare() -> None:
    """Register the scripted experts that come with embodyrl, each under the name of its simulator."""
    EXPERTS.register(
        "metaworld",
        target="embodyrl.envs.metaworld.expert:MetaWorldExpert",
        requires=[Requirement(module="metaworld", install="pip install 'embodyrl[metaworld]'")],
        summary="MetaWorld's own scripted policies, one for each task",
    )
    EXPERTS.register(
        "libero",
        target="embodyrl.envs.libero.expert:LiberoExpert",
        requires=SIMULATORS.entry("libero").requires,
        tasks=("libero_spatial/[012356789]", "libero_object/*", "libero_goal/[1468]"),
        summary="picks an object up and places it",
    )
    EXPERTS.register(
        "robosuite",
        target="embodyrl.envs.gymnasium.adapters.lift_expert:LiftExpert",
        requires=SIMULATORS.entry("robosuite").requires,
        tasks=("Lift",),
        summary="lifts the cube",
    )


class Demonstrator(Protocol):
    """Chooses single actions in any number of envs."""

    env: EnvConfig
    """Config of the simulator, with the observations that this demonstrator needs."""

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """Start a new episode in a slot."""
        ...

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """Return actions `[B, D]` for these slots, in the simulator's units."""
        ...

    def recorded(self, observation: Observation) -> Observation:
        """Return the observation that the simulator would have with the user's config."""
        ...


def actions_by(
    demonstrator: Demonstrator, slots: NDArray[np.int64], observation: Observation, action_dim: int
) -> NDArray[np.float32]:
    """Return a demonstrator's actions `[B, D]`.

    Raises:
        UserError: it returns something else.
    """
    actions = demonstrator.act(slots, observation)
    found, want = getattr(actions, "shape", None), (len(slots), action_dim)
    if found != want:
        what = f"an array {found}" if found is not None else type(actions).__name__
        raise UserError(
            f"{type(demonstrator).__name__}.act() returned {what}, want actions [envs, action dims], here {want}"
        )
    return actions


@runtime_checkable
class Remembering(Protocol):
    """A demonstrator whose actions depend on more than the present observation. What it remembers is saved with a run
    in which it corrects a policy, so that a run that was interrupted continues alike. MetaWorld's remember nothing."""

    def memory(self, slot: int) -> str:
        """Return what it remembers of the episode in a slot."""
        ...

    def remember(self, slot: int, memory: str) -> None:
        """Continue from what `memory` returned, after `begin` with the same episode."""
        ...


def scripted_expert(env: EnvConfig, name: str | None = None) -> Demonstrator:
    """Return a scripted expert for a simulator, by default its own.

    Raises:
        UnknownNameError: there is no such expert, or the simulator has none.
        MissingPackageError: a package is not installed.
        UserError: it does not play one of the tasks.
    """
    refusal = EXPERTS.entry(name or env.name).cannot_play(env.tasks)
    if refusal is not None:
        raise UserError(refusal)
    expert: Callable[[EnvConfig], Demonstrator] = EXPERTS.load(name or env.name)
    return expert(env)
