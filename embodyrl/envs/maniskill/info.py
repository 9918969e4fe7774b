"""What is known of ManiSkill without importing it: what configs may ask for, and what this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodyrl.config.infos import SimulatorInfo
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.envs.maniskill.tasks import (
    DRIVER_REMEDY,
    SEVERAL_ROBOTS,
    TWIN_ASSETS,
    asset_folder,
    assets_missing,
    assets_of,
    known_tasks,
    limit_of,
    missing_assets,
)
from embodyrl.envs.options import Driver, ManiSkillConfig, Sim
from embodyrl.placement.graphics import VULKAN, RenderingCheck, graphics_variables
from embodyrl.placement.plan import Inventory, inventory
from embodyrl.registry import SIMULATORS

RENDERING_CHECK = """
import json, re
from embodyrl.envs.maniskill.loading import rendering_device
import sapien.render
device = rendering_device()
names = re.findall("GPU: (.*)", sapien.render.get_device_summary()) if device else []
print(json.dumps(", ".join(names) or device))
"""
"""Prints the names of the devices that SAPIEN finds, if one of them can render."""


class ManiSkillInfo(SimulatorInfo[ManiSkillConfig]):
    """Tasks of ManiSkill, their downloads, and faults of configs."""

    def tasks(self) -> list[str]:
        """Return all tasks: those of ManiSkill's own files, and those that a plug-in registered in this process."""
        return known_tasks()

    def time_limit(self, env: ManiSkillConfig) -> int | None:
        """Return the longest of the tasks' own time limits; None if that is unknown before ManiSkill is imported."""
        if SIMULATORS.entry(self.name).missing():
            return None
        limits = [limit_of(task) for task in env.tasks]
        return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None

    def fills_gpu(self, env: ManiSkillConfig) -> bool:
        """Return whether each simulator process occupies a GPU."""
        return env.sim is Sim.gpu

    def assets(self) -> tuple[str, str]:
        """Return how many tasks have their files here, and the remedy for the others."""
        lacking = {task: missing_assets(task) for task in known_tasks()}
        names = dict.fromkeys(name for missing in lacking.values() for name in missing)
        able = sum(not missing for missing in lacking.values())
        found = f"{able} of {len(lacking)} tasks have their files ({asset_folder()})"
        remedy = f"for other tasks: python -m mani_skill.utils.download_asset, with one of {', '.join(names)}"
        return found, remedy if names else ""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config for ManiSkill."""
        env: Any = config.env
        for index, task in enumerate(env.tasks):
            if task in SEVERAL_ROBOTS:
                yield ConfigIssue(
                    f"env.tasks.{index}", f"the ManiSkill task {task!r} has several robots", "choose another task"
                )
            if env.driver is Driver.upstream and TWIN_ASSETS in assets_of(task):
                yield ConfigIssue(
                    f"env.tasks.{index}",
                    f"the ManiSkill task {task!r} has no state observations, which env.driver = 'upstream' reads",
                    "set env.driver to fast",
                )
        if env.driver is Driver.upstream and self.fills_gpu(env):
            yield ConfigIssue(
                "env.driver",
                "env.driver = 'upstream', but with env.sim = 'gpu' scenes are saved and restored by the fast driver",
                "set env.driver to fast, or env.sim to cpu",
            )
        if env.rebuild and self.fills_gpu(env):
            yield ConfigIssue(
                "env.rebuild",
                "env.rebuild is true, but with env.sim = 'gpu' all envs of a process are one scene, which stays",
                "set env.rebuild to false, or env.sim to cpu",
            )
        if self.fills_gpu(env) and len(env.tasks) > 1:
            yield ConfigIssue(
                "env.tasks", "with env.sim = 'gpu' all slots play one task", "name one task, or set env.sim to cpu"
            )

    def check_here(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for everything that this machine lacks."""
        env: Any = config.env
        for index, task in enumerate(env.tasks):
            if missing := missing_assets(task):
                yield ConfigIssue(f"env.tasks.{index}", *assets_missing(task, missing))
        images = "env.cameras" if env.cameras else "tracking.video.episodes" if config.tracking.video.episodes else None
        if images and not _may_draw(inventory()):
            yield ConfigIssue(
                images, f"{images} asks for images, but no Vulkan driver is installed here", DRIVER_REMEDY
            )
        if self.fills_gpu(env):
            yield from _gpu(env)

    def rendering_checks(self, machine: Inventory) -> list[RenderingCheck]:
        """Return the check that SAPIEN finds a Vulkan device that can render; none without ManiSkill."""
        if SIMULATORS.entry(self.name).missing():
            return []
        variables = graphics_variables(VULKAN, machine.graphics, machine.gpus, 0)
        return [
            RenderingCheck(
                subject="Vulkan (SAPIEN)", program=RENDERING_CHECK, variables=variables, remedy=DRIVER_REMEDY
            )
        ]


def _may_draw(machine: Inventory) -> bool:
    """Return whether there is a Vulkan driver; whether it can render shows only when it is tried."""
    graphics = machine.graphics
    chosen = any(name in graphics.preset for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"))
    return bool(machine.gpus or graphics.has_device or graphics.software_vulkan or chosen)


def _gpu(env: Any) -> Iterator[ConfigIssue]:
    gpus = len(inventory().gpus)
    if not gpus:
        yield ConfigIssue("env.sim", "env.sim = 'gpu', but there is no NVIDIA GPU here", "set env.sim to cpu")
    elif isinstance(env.workers, int) and env.workers > gpus:
        message = f"env.workers = {env.workers}, but with env.sim = 'gpu' a process fills a GPU, and there are {gpus}"
        yield ConfigIssue("env.workers", message, f"set env.workers to auto, or to {gpus} or less")
