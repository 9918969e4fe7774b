"""Which cases of the contract suite continuous integration leaves to people."""

from __future__ import annotations

import pytest

from .backends import Backend

BRIEF = ("pusht", "robotics", "aloha", "hil", "dm_control")
"""Families of which it plays single rows, by few checks: they share the code of `gymnasium`, `mujoco` and `robosuite`,
of which it plays all."""
ROWS = {"pusht", "robotics-fetch", "robotics-kitchen", "aloha", "hil", "dm_control"}
CHECKS = {
    "spec_says_what_is_offered",
    "same_episode_same_trajectory_in_any_slot",
    "chunks_do_not_change_the_trajectory",
    "truncated_exactly_at_the_time_limit",
    "state_goes_on_in_the_same_and_in_another_slot",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left to people."""
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if not isinstance(backend, Backend) or backend.name not in BRIEF:
            continue
        if backend.label not in ROWS or str(item.callspec.params.get("promise")) not in CHECKS:
            item.add_marker(pytest.mark.by_hand(reason="shares the code of families that are played whole"))
