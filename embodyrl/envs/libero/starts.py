"""Where the episodes of LIBERO begin if robot or objects are perturbed.

Objects are moved on the table that they stand on. One that stands on, in or under something else stays, and so do
fixtures such as cabinets and stoves, so that every goal can be reached as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.perturb.kinds import Perturbation, generator, joint_offsets, level_of, object_shift

DEEPEST_M = 0.001
"""Contacts that go deeper are collisions."""
HALVINGS = 5
"""Times that a change that would collide is halved, before it is left out."""

State = NDArray[np.float64]
"""Time, positions and velocities of a scene, as LIBERO's files have them."""


class Start:
    """Finds where an episode begins, in a scene that was reset to its official start state.

    Args:
        model: the `mujoco.MjModel`, with the fixtures in their places.
        arm: addresses of the arm's joints among the positions.
        fixtures: names of the fixtures' bodies.
        state: the official start state.
    """

    def __init__(self, model: Any, arm: NDArray[np.int64], fixtures: list[str], state: State) -> None:
        self._model, self._arm, self._state = model, arm, state.copy()
        self._scratch = mujoco.MjData(model)
        self._fixtures = {int(model.body_rootid[model.body(name).id]) for name in fixtures}
        self._robot = set(model.body_rootid[model.jnt_bodyid[np.isin(model.jnt_qposadr, arm)]].tolist())

    def moved(self, seed: int, perturb: Perturbation) -> State:
        """Return the start state of an episode.

        Args:
            seed: of the episode.
            perturb: whose kinds `robot` and `layout` are followed.
        """
        if level := level_of(perturb, "layout"):
            random = generator(seed, "layout/objects")
            for root, address in self._movable().items():
                where, turn = object_shift(level, random)
                self._try(partial(self._shifted, address, where, turn), {root})
        if level := level_of(perturb, "robot"):
            offsets = joint_offsets(level, generator(seed, "robot"), len(self._arm))
            self._try(partial(self._bent, offsets), self._robot)
        return self._state

    def _try(self, change: Callable[[float], State], roots: set[int]) -> None:
        """Make a change, or half of it, and so on, with which none of some bodies collides."""
        before = self._depths(self._state, roots)
        for number in range(HALVINGS):
            state = change(0.5**number)
            if self._depths(state, roots) <= max(before, DEEPEST_M):
                self._state = state
                return

    def _shifted(self, address: int, where: NDArray[np.float64], whole_turn: float, share: float) -> State:
        """Return the state with a free body elsewhere on the plane, and turned about the vertical, by a share."""
        state, place, turn = self._state.copy(), 1 + address, share * whole_turn
        state[place : place + 2] += share * where
        about = np.array([math.cos(turn / 2), 0.0, 0.0, math.sin(turn / 2)])
        turned = np.empty(4)
        mujoco.mju_mulQuat(turned, about, state[place + 3 : place + 7])
        state[place + 3 : place + 7] = turned
        return state

    def _bent(self, offsets: NDArray[np.float64], share: float) -> State:
        """Return the state with other joint angles, within their limits, by a share."""
        state, joints = self._state.copy(), np.flatnonzero(np.isin(self._model.jnt_qposadr, self._arm))
        low, high = self._model.jnt_range[joints].T
        state[1 + self._arm] = np.clip(state[1 + self._arm] + share * offsets, low, high)
        return state

    def _forward(self, state: State) -> Any:
        """Return the scene in a state, with its contacts."""
        model, data = self._model, self._scratch
        mujoco.mj_resetData(model, data)
        data.qpos[:] = state[1 : 1 + model.nq]
        mujoco.mj_forward(model, data)
        return data

    def _touching(self, state: State) -> list[tuple[int, int, float]]:
        """Return the outermost bodies of each contact, and how deep it is [m]."""
        contact = self._forward(state).contact
        roots = self._model.body_rootid[self._model.geom_bodyid[contact.geom]]
        return [(int(a), int(b), -float(distance)) for (a, b), distance in zip(roots, contact.dist, strict=True)]

    def _depths(self, state: State, roots: set[int]) -> float:
        """Return the depth of the deepest contact of some bodies with others than what they stand on [m]; infinite if
        one has lost its support."""
        found, supported = 0.0, roots <= self._robot  # which is mounted
        for a, b, depth in self._touching(state):
            if (a in roots) == (b in roots):
                continue
            other = b if a in roots else a
            if self._is_table(other):
                supported = True
            else:
                found = max(found, depth)
        return found if supported else math.inf

    def _is_table(self, root: int) -> bool:
        """Return whether a body is part of the room: it cannot move, and is no fixture."""
        return root not in self._fixtures | self._robot and bool(self._model.body_weldid[root] == 0)

    def _movable(self) -> dict[int, int]:
        """Return the bodies that stand on the table and touch nothing else, and the addresses of their positions."""
        model = self._model
        free = np.flatnonzero(model.jnt_type == int(mujoco.mjtJoint.mjJNT_FREE))
        address = {int(model.body_rootid[model.jnt_bodyid[joint]]): int(model.jnt_qposadr[joint]) for joint in free}
        partners: dict[int, set[int]] = {root: set() for root in address}
        for a, b, _ in self._touching(self._state):
            for one, other in ((a, b), (b, a)):
                if one in partners and one != other:
                    partners[one].add(other)
        return {
            root: address[root]
            for root, others in partners.items()
            if others and all(self._is_table(other) for other in others)
        }
