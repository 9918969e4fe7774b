"""Imports ManiSkill, builds its environments and describes them as specs.

Every failure becomes an error message for the user.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from embodyrl.envs.base import RenderError
from embodyrl.envs.maniskill.tasks import DRIVER_REMEDY, assets_missing, task_description
from embodyrl.envs.options import Driver, ManiSkillConfig, RewardMode, Sim
from embodyrl.envs.types import MOST_ACTION, ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError, did_you_mean
from embodyrl.placement.startup_lock import one_at_a_time

USUAL_CONTROL_MODE = "pd_joint_delta_pos"


class NoVulkanError(RenderError, UserError):
    """Raised when images are needed and no driver renders them here; the text names what to install."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} on this machine: {DRIVER_REMEDY}; `embodyrl doctor` checks it")


def load() -> Any:
    """Import ManiSkill's registration module, with all tasks registered.

    Without a rendering device, ManiSkill is patched so that it still builds its scenes.
    """
    os.environ.setdefault("LP_NUM_THREADS", "1")  # there is one process per core already
    if rendering_device() is None:
        _stand_in_for_materials()
    importlib.import_module("mani_skill.envs")
    return importlib.import_module("mani_skill.utils.registration")


@cache
def rendering_device() -> str | None:
    """Return the device that can render, by ManiSkill's name: `gpu`, `cpu` (a software driver), or None.

    SAPIEN's description of a device is not enough: only building a renderer shows whether it works.
    """
    import sapien
    import sapien.render

    for name, device in (("gpu", "cuda"), ("cpu", "cpu")):
        try:
            with one_at_a_time("initialise Vulkan"):
                sapien.render.RenderSystem(sapien.Device(device))
        except RuntimeError:
            continue
        return name
    return None


def rendering_device_for(sim: Sim) -> str | None:
    """Return the device that renders scenes simulated on `sim`, or None. The CPU cannot render scenes on a GPU."""
    device = rendering_device()
    return None if sim is Sim.gpu and device != "gpu" else device


def build(task: str, config: ManiSkillConfig, num_envs: int = 1) -> Any:
    """Build an environment of `task` with `num_envs` scenes, without wrappers.

    Which class it has, and what its observations contain, depends on `env.driver`: see `driver` and `upstream`.

    Raises:
        UserError: an option does not fit the task, or assets or a driver are missing.
    """
    entry = load().REGISTERED_ENVS[task]
    _check_assets(task, entry.asset_download_ids or [])
    _check_reward(task, config, entry.cls.SUPPORTED_REWARD_MODES)
    device = rendering_device_for(config.sim)
    if config.cameras and device is None:
        raise NoVulkanError("env.cameras: ManiSkill cannot render images")
    name = "upstream" if config.driver is Driver.upstream else "driver"
    driver = importlib.import_module(f"embodyrl.envs.maniskill.{name}")
    settings = {
        **entry.default_kwargs,
        "num_envs": num_envs,
        "reward_mode": config.reward_mode.value,
        "sim_backend": "physx_cuda" if config.sim is Sim.gpu else "physx_cpu",
        "render_backend": device or "none",
    }
    with _in_words(task, config):
        env = _with_control_mode(partial(driver.make, entry, config, **settings), config.control_mode)
        _check_cameras(task, config.cameras, driver.known_cameras(env))
        return env


def _with_control_mode(make: Callable[..., Any], control_mode: str) -> Any:
    """Make the environment with the configured control mode; `auto`: pd_joint_delta_pos if the robot has it."""
    if control_mode != "auto":
        return make(control_mode=control_mode)
    try:
        return make(control_mode=USUAL_CONTROL_MODE)
    except AssertionError as error:
        if _known_control_modes(error) is None:
            raise
        return make(control_mode=None)


def _known_control_modes(error: AssertionError) -> list[str] | None:
    """Return the robot's control modes if `error` is ManiSkill's error about an unknown one, else none."""
    modes = re.search(r"not in supported modes: \[(.*)\]", str(error))
    return None if modes is None else re.findall(r"'([^']+)'", modes[1])


@contextlib.contextmanager
def _in_words(task: str, config: ManiSkillConfig) -> Iterator[None]:
    """Turn ManiSkill's errors about mistakes and missing files into `UserError`."""
    try:
        with _no_questions(task):
            yield
    except AssertionError as error:
        known = _known_control_modes(error)
        if known is None:
            raise
        raise UserError(_unlike("env.control_mode", config.control_mode, task, known)) from error
    except FileNotFoundError as error:  # scenes whose assets ManiSkill does not list
        raise UserError(f"{': '.join(assets_missing(task, []))} (not found: {error.filename})") from error
    except ImportError as error:  # packages that only this task needs
        raise UserError(f"the ManiSkill task {task!r} cannot be built: {error}") from error
    except (RuntimeError, AttributeError) as error:
        raise _explained(task, error) from error


def _explained(task: str, error: Exception) -> Exception:
    """Return the exception to raise in place of one that ManiSkill or SAPIEN raised while building `task`."""
    text = " ".join(str(error).split())
    if 'failed to find device "cuda"' in text:
        return UserError(
            "env.sim is 'gpu', but this process finds no CUDA device: set env.sim to cpu, or check nvidia-smi"
        )
    if "download_asset" in text:
        return UserError(f"the ManiSkill task {task!r} cannot be built: {text}")
    if rendering_device() is None and "render" in text:
        return NoVulkanError(f"the ManiSkill task {task!r} cannot run without a renderer, and there is none")
    return error


def _unlike(key: str, value: str, task: str, known: Sequence[str]) -> str:
    """Return the error for a value that `task` does not have."""
    hint = did_you_mean(value, known, lead=" - ")
    return f"{key} is {value!r}, which {task!r} does not have{hint} (has: {', '.join(known) or 'none'})"


def _check_cameras(task: str, cameras: list[str], known: Sequence[str]) -> None:
    """Raise `UserError` for the first camera that `task` does not have."""
    for name in cameras:
        if name not in known:
            raise UserError(_unlike("env.cameras", name, task, known))


def _check_reward(task: str, config: ManiSkillConfig, supported: Sequence[str]) -> None:
    """Raise `UserError` if `task` lacks this reward. The fast driver has `sparse` for any task, from its success."""
    added = [RewardMode.sparse.value] if config.driver is Driver.fast else []
    modes = dict.fromkeys([*(name for name in supported if name != "none"), *added])
    if config.reward_mode.value not in modes:
        raise UserError(
            f"env.reward_mode is {config.reward_mode.value!r}, but with env.driver = {config.driver.value!r} {task!r} "
            f"has only {', '.join(modes) or 'none'}"
        )


def _check_assets(task: str, asset_ids: list[str]) -> None:
    """Raise `UserError` if files that `task` needs are not on this machine."""
    from mani_skill.utils import assets

    sources: list[str] = []
    for asset in asset_ids:
        group = asset in assets.DATA_GROUPS
        sources += assets.expand_data_group_into_individual_data_source_ids(asset) if group else [asset]
    if any(not assets.is_data_source_downloaded(source) for source in sources):
        raise UserError(": ".join(assets_missing(task, asset_ids)))


@contextlib.contextmanager
def _no_questions(task: str) -> Iterator[None]:
    """Turn ManiSkill's y/n questions on the terminal (and its `exit()`) into errors: a worker has no terminal."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        robot = re.match(r"Robot (\S+) has assets available", message)
        raise UserError(f"{': '.join(assets_missing(task, [robot[1]] if robot else []))} (ManiSkill: {message})")

    asked, download_asset.prompt_yes_no = download_asset.prompt_yes_no, refuse
    try:
        yield
    except SystemExit as error:
        raise UserError(": ".join(assets_missing(task, []))) from error
    finally:
        download_asset.prompt_yes_no = asked


class _Material:
    """Stand-in for `sapien.render.RenderMaterial`: it stores its attributes and renders nothing."""

    def __init__(self, emission: Any = None, base_color: Any = None, **settings: Any) -> None:
        self.emission = emission
        self.base_color = [1.0, 1.0, 1.0, 1.0] if base_color is None else list(base_color)
        self.__dict__.update(settings)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _stand_in_for_materials() -> None:
    """Let ManiSkill build its scenes on a machine without a Vulkan driver.

    Even with rendering off, every actor is built with a `RenderMaterial`, which fails without a rendering device.
    Modules that imported the class before get the stand-in as well.
    """
    import sapien.render

    real = sapien.render.RenderMaterial
    if real is _Material:
        return
    for name, module in list(sys.modules.items()):
        inside = name.split(".")[0] in ("sapien", "mani_skill")
        if inside and getattr(module, "RenderMaterial", None) is real:
            module.RenderMaterial = _Material  # type: ignore[attr-defined]


def specification(
    config: ManiSkillConfig,
    *,
    tasks: dict[str, str],
    actions: tuple[ActionField, ...],
    proprio_dim: int,
    control_frequency: float,
) -> SimulatorSpec:
    """Return the spec of a ManiSkill simulator; see `SimulatorSpec` for the arguments."""
    return SimulatorSpec(
        tasks=tasks,
        actions=actions,
        proprio_dim=proprio_dim,
        max_episode_steps=config.time_limit,
        control_frequency=control_frequency,
        cameras=tuple(config.cameras),
        image_size=(config.image_size[0], config.image_size[1]) if config.cameras else (0, 0),
    )


def description_of(env: Any, task: str) -> str:
    """Return the task description of `task`: the task's own, if it has one."""
    return (
        str(env.get_language_instruction()[0]) if hasattr(env, "get_language_instruction") else task_description(task)
    )


def start_of(env: Any, episode: EpisodeSpec) -> dict[str, Any]:
    """Return the arguments of ManiSkill's `reset` for an episode: the start state is its seed.

    Tasks made for evaluation have a numbered list of layouts instead; there the start state is the index in the list.
    """
    import torch

    start: dict[str, Any] = {"seed": episode.start_state % 2**32}
    if hasattr(env, "xyz_configs"):
        start["options"] = {"episode_id": torch.tensor([episode.start_state], device=env.device)}
    return start


def robot_state(agent: Any, joints: Mapping[str, Any]) -> Any:
    """Return the quantities that a robot can measure, a tensor `[N, S]`: joint positions, joint velocities, targets of
    its controller, and position and quaternion of the tool centre point if it has one."""
    import torch
    from mani_skill.utils import common

    numbers = common.flatten_state_dict(joints, use_torch=True, device=agent.device)
    pose = _tool_pose(agent)
    return numbers if pose is None else torch.cat([numbers, pose.raw_pose], dim=1)


def _tool_pose(agent: Any) -> Any:
    """Return a robot's tool centre point, or the link that its controller moves; None for robots without either."""
    pose = getattr(agent, "tcp_pose", None)
    if pose is None and hasattr(agent, "tcp"):
        pose = agent.tcp.pose
    if pose is None:
        parts = getattr(agent.controller, "controllers", {}).values()
        pose = next((part.ee_pose for part in parts if hasattr(part, "ee_pose")), None)
    return pose


def action_fields(env: Any, task: str) -> tuple[ActionField, ...]:
    """Return the fields of the action vector of `env`, an environment of `task`.

    Raises:
        UserError: the task has several robots, or an action has no limits.
    """
    from mani_skill.agents.controllers.base_controller import CombinedController
    from mani_skill.agents.multi_agent import MultiAgent

    if isinstance(env.agent, MultiAgent):
        raise UserError(f"the ManiSkill task {task!r} has several robots, which is not supported: choose another task")
    controller = env.agent.controller
    parts = controller.controllers if isinstance(controller, CombinedController) else {"robot": controller}
    ends = [end for part in parts.values() for end in (part.single_action_space.low, part.single_action_space.high)]
    if not all((np.abs(end) <= MOST_ACTION).all() for end in ends):
        raise UserError(
            f"env.control_mode {env.agent.control_mode!r} has actions without limits for {task!r}: choose another one"
        )
    return tuple(field for name, part in parts.items() for field in _controller_fields(name, part))


def _controller_fields(name: str, controller: Any) -> list[ActionField]:
    """Return the action fields of one controller."""
    from mani_skill.agents.controllers import pd_ee_pose, pd_joint_pos

    space, config = controller.single_action_space, controller.config
    low, high = tuple(map(float, space.low)), tuple(map(float, space.high))
    if not low:  # a passive controller
        return []

    def field(meaning: str, unit: str = "1", scale: float = 1.0, part: slice = slice(None), suffix: str = "") -> Any:
        return ActionField(name=name + suffix, meaning=meaning, unit=unit, low=low[part], high=high[part], scale=scale)

    if name.endswith("gripper"):
        return [_gripper(field("gripper"), controller)]
    if isinstance(controller, pd_ee_pose.PDEEPosController) and config.use_delta:
        move = _scale(config, config.pos_lower, config.pos_upper)
        if move is None:
            return [field("normalized")]
        if not isinstance(controller, pd_ee_pose.PDEEPoseController):
            return [field("delta_position", "m", move)]
        # ManiSkill multiplies a normalised rotation by its lower limit, so a positive action turns backwards.
        turn = float(np.min(config.rot_lower)) if config.normalize_action else 1.0
        return [
            field("delta_position", "m", move, slice(0, 3), "_position"),
            field("delta_rotation", "rad", turn, slice(3, 6), "_rotation"),
        ]
    if type(controller) is pd_joint_pos.PDJointPosController:
        scale = _scale(config, config.lower, config.upper)
        if scale is not None:
            return [field("joint_delta" if config.use_delta else "joint_target", "rad", scale)]
    return [field("normalized" if getattr(config, "normalize_action", False) else "native")]


def _gripper(field: ActionField, controller: Any) -> ActionField:
    """Return `field` with the values that open and close a gripper, if known: sliding fingers open outwards."""
    slides = all(kind == "prismatic" for joint in controller.joints for kind in joint.type)
    if not slides or len(field.low) != 1:
        return field
    return replace(field, opens=field.high[0], closes=field.low[0])


def _scale(config: Any, low: Any, high: Any) -> float | None:
    """Return the size of an action of 1 in the controller's own unit, or None if its limits are not one symmetric
    number."""
    if not config.normalize_action:
        return 1.0
    limits = np.unique(np.abs(np.hstack([low, high]).astype(np.float64))) if low is not None else np.zeros(0)
    symmetric = limits.size == 1 and np.array_equal(np.negative(low), high)
    return float(limits[0]) if symmetric else None
