"""The registered simulator: ManiSkill on the CPU or on a GPU, as the config says."""

from __future__ import annotations

from embodyrl.envs.maniskill.batch import ManiSkillBatch
from embodyrl.envs.maniskill.slots import ManiSkill
from embodyrl.envs.options import ManiSkillConfig, Sim
from embodyrl.envs.types import Simulator


def open_simulator(config: ManiSkillConfig, num_slots: int) -> Simulator:
    """A simulator of `num_slots` slots; see `ManiSkill` and `ManiSkillBatch` for what is raised."""
    return ManiSkillBatch(config, num_slots) if config.sim is Sim.gpu else ManiSkill(config, num_slots)
