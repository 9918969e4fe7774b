"""What can be wrong with a run on ManiSkill, as far as that can be said without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodyrl.config.schema import Config
from embodyrl.envs.maniskill.catalogue import DRIVER_REMEDY, SEVERAL_ROBOTS, assets_missing, missing_assets
from embodyrl.envs.options import Sim
from embodyrl.placement.plan import Inventory, inventory


def check(config: Config) -> Iterator[tuple[str, str, str]]:
    """What is wrong: (setting, what, remedy)."""
    env: Any = config.env
    for index, task in enumerate(env.tasks):
        if task in SEVERAL_ROBOTS:
            yield f"env.tasks.{index}", f"the ManiSkill task {task!r} has several robots", "choose another task"
    if fills_gpu(env) and len(env.tasks) > 1:
        yield "env.tasks", "with env.sim = 'gpu' all slots play one task", "name one task, or set env.sim to cpu"


def check_here(config: Config) -> Iterator[tuple[str, str, str]]:
    """What this machine lacks: (setting, what, remedy)."""
    env: Any = config.env
    for index, task in enumerate(env.tasks):
        if missing := missing_assets(task):
            yield f"env.tasks.{index}", *assets_missing(task, missing)
    pictures = "env.cameras" if env.cameras else "tracking.video.episodes" if config.tracking.video.episodes else None
    if pictures and not _may_draw(inventory()):
        yield pictures, f"{pictures} asks for pictures, but no Vulkan driver is installed here", DRIVER_REMEDY
    if fills_gpu(env):
        yield from _gpu(env)


def _may_draw(machine: Inventory) -> bool:
    """Whether there is a Vulkan driver; only trying tells whether it can draw."""
    graphics = machine.graphics
    chosen = any(name in graphics.preset for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"))
    return bool(machine.gpus or graphics.has_device or graphics.software_vulkan or chosen)


def fills_gpu(env: Any) -> bool:
    """Whether each simulator process computes on a GPU of its own."""
    return env.sim is Sim.gpu


def _gpu(env: Any) -> Iterator[tuple[str, str, str]]:
    gpus = len(inventory().gpus)
    if not gpus:
        yield "env.sim", "env.sim = 'gpu', but there is no NVIDIA GPU here", "set env.sim to cpu"
    elif isinstance(env.workers, int) and env.workers > gpus:
        message = f"env.workers = {env.workers}, but with env.sim = 'gpu' a process fills a GPU, and there are {gpus}"
        yield "env.workers", message, f"set env.workers to auto, or to {gpus} or less"
