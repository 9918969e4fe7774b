"""The registered simulator: ManiSkill on the CPU or on a GPU, as the config says."""

from __future__ import annotations

from embodyrl.envs.maniskill.slots import ManiSkill
from embodyrl.envs.options import ManiSkillConfig
from embodyrl.envs.types import Simulator


def open_simulator(config: ManiSkillConfig, num_slots: int) -> Simulator:
    """A simulator of `num_slots` slots; see `ManiSkill` for what is raised."""
    return ManiSkill(config, num_slots)
