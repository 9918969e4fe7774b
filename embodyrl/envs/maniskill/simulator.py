"""The registered simulator, and ManiSkill on the CPU: every slot is a separate environment in this process.

PhysX on the CPU has no batches, but several environments in one process work and do not influence each other.
"""

from __future__ import annotations

from embodyrl.envs.base import Slot, SlotSimulator, check_task_list, check_tasks
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.batch import ManiSkillBatch
from embodyrl.envs.maniskill.loading import specification
from embodyrl.envs.maniskill.slot import ManiSkillSlot
from embodyrl.envs.maniskill.tasks import task_description
from embodyrl.envs.options import Driver, ManiSkillConfig, Sim
from embodyrl.envs.types import Simulator
from embodyrl.errors import UserError


def open_simulator(config: ManiSkillConfig, num_slots: int) -> Simulator:
    """Open a simulator of `num_slots` slots; see `ManiSkill` and `ManiSkillBatch` for the errors raised."""
    return ManiSkillBatch(config, num_slots) if config.sim is Sim.gpu else ManiSkill(config, num_slots)


class ManiSkill(SlotSimulator):
    """ManiSkill on the CPU.

    Raises:
        UserError: a task, a camera or an option does not exist, or assets or a driver are missing.
    """

    def __init__(self, config: ManiSkillConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "maniskill")
        registered = loading.load().REGISTERED_ENVS
        check_tasks(config.tasks, sorted(registered), "maniskill")
        self._config = config
        speaking = [task for task in config.tasks if hasattr(registered[task].cls, "get_language_instruction")]
        built = {task: self._make(task) for task in dict.fromkeys([config.tasks[0], *speaking])}
        first = built[config.tasks[0]]
        spec = specification(
            config,
            tasks={
                task: built[task].task_description if task in built else task_description(task) for task in config.tasks
            },
            actions=first.fields,
            proprio_dim=first.proprio_dim,
            control_frequency=first.control_frequency,
        )
        super().__init__(spec, num_slots, spare=list(built.items()))

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        slot = self._make(task)
        if (slot.fields, slot.proprio_dim) != (self.spec.actions, self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes tasks of different shapes: {task!r} has {slot.proprio_dim} state numbers and actions "
                f"{[field.name for field in slot.fields]}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{[field.name for field in self.spec.actions]}: name tasks of one shape"
            )
        return slot

    def _make(self, task: str) -> ManiSkillSlot:
        if self._config.driver is Driver.upstream:
            from embodyrl.envs.maniskill.upstream import UpstreamSlot

            return UpstreamSlot(task, self._config)
        return ManiSkillSlot(task, self._config)
