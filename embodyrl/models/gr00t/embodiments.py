"""Robots by the names that public checkpoints give them (imports no torch)."""

from __future__ import annotations

from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError

EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "genie1_gripper": 26,
    "libero_franka": 31,
    "isaaclab_franka": 31,
    "maniskill_widowx": 30,
}
"""Which of the networks in a checkpoint belongs to a robot: the first five as Isaac-GR00T and LeRobot number them, the
others as RLinf does."""


def embodiment_number(tag: str, number: int | None, count: int) -> int:
    """The robot's number in the checkpoint.

    Args:
        tag: the robot's name.
        number: as the config says it; None: the one that the name has, or that there is.
        count: robots that the checkpoint has networks for.

    Raises:
        PolicyError: the name is not known and no number is given, or there is no such robot in the checkpoint.
    """
    if number is None:
        number = 0 if count == 1 else EMBODIMENTS.get(tag)
    if number is None:
        known = ", ".join(f"{name} {value}" for name, value in EMBODIMENTS.items())
        hint = did_you_mean(tag, EMBODIMENTS, lead=" - ")
        raise PolicyError(
            f"nothing says which number embodiment {tag!r} has{hint} (known: {known}): set embodiment_id as well"
        )
    if not 0 <= number < count:
        raise PolicyError(
            f"embodiment_id = {number} ({tag}), but the checkpoint has networks for 0 .. {count - 1} alone"
        )
    return number
