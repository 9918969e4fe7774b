"""Importing ManiSkill and building one of its environments, with every failure put in words for the user."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from embodyrl.envs.base import RenderError
from embodyrl.envs.maniskill.catalogue import DRIVER_REMEDY, assets_missing
from embodyrl.envs.options import ManiSkillConfig, RewardMode, Sim
from embodyrl.errors import UserError, did_you_mean
from embodyrl.placement.turns import one_at_a_time

USUAL_CONTROL_MODE = "pd_joint_delta_pos"


class NoVulkanError(RenderError, UserError):
    """Raised when pictures are asked for and no driver draws them here; the text says what to install."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} on this machine: {DRIVER_REMEDY}; `embodyrl doctor` tries it out")


def load() -> Any:
    """ManiSkill's registration module, with all tasks registered.

    Without a rendering device, ManiSkill is made to build its scenes all the same.
    """
    os.environ.setdefault("LP_NUM_THREADS", "1")  # there is one process per core already
    if rendering_device() is None:
        _stand_in_for_materials()
    importlib.import_module("mani_skill.envs")
    importlib.import_module("embodyrl.envs.maniskill.driver").install()
    return importlib.import_module("mani_skill.utils.registration")


@cache
def rendering_device() -> str | None:
    """The device that can draw, as ManiSkill names it: `gpu`, `cpu` (a software driver), or None.

    Asking SAPIEN what a device can do is not enough: only building a renderer tells.
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


def drawing_device(sim: Sim) -> str | None:
    """The device that draws what is simulated on `sim`; None: nothing does. The CPU cannot draw what is on a GPU."""
    device = rendering_device()
    return None if sim is Sim.gpu and device != "gpu" else device


def build(task: str, config: ManiSkillConfig, num_envs: int = 1) -> Any:
    """An environment of `task` with `num_envs` scenes, without wrappers.

    Its observations are ManiSkill's state vectors; `pictures()` draws what `config.cameras` see.

    Raises:
        UserError: an option does not fit the task, or assets or a driver are missing.
    """
    entry = load().REGISTERED_ENVS[task]
    _check_assets(task, entry.asset_download_ids or [])
    _check_reward(task, config.reward_mode, entry.cls.SUPPORTED_REWARD_MODES)
    device = drawing_device(config.sim)
    if config.cameras and device is None:
        raise NoVulkanError("env.cameras: ManiSkill cannot draw pictures")
    driver = importlib.import_module("embodyrl.envs.maniskill.driver")
    cls = driver.lean(entry.cls, tuple(config.cameras), (config.image_size[0], config.image_size[1]))
    settings = {
        **entry.default_kwargs,
        "num_envs": num_envs,
        "obs_mode": cls.obs_mode_with_pictures if config.cameras else "state",
        "reward_mode": config.reward_mode.value,
        "sim_backend": "physx_cuda" if config.sim is Sim.gpu else "physx_cpu",
        "render_backend": device or "none",
    }
    with _in_words(task, config):
        env = _with_control_mode(cls, settings, config.control_mode)
        _check_cameras(task, config.cameras, env.all_cameras)
        return env


def _with_control_mode(cls: Any, settings: dict[str, Any], control_mode: str) -> Any:
    """The environment with the control mode that was asked for; `auto`: the usual one where the robot has it."""
    if control_mode != "auto":
        return cls(control_mode=control_mode, **settings)
    try:
        return cls(control_mode=USUAL_CONTROL_MODE, **settings)
    except AssertionError as error:
        if _known_control_modes(error) is None:
            raise
        return cls(control_mode=None, **settings)


def _known_control_modes(error: AssertionError) -> list[str] | None:
    """The robot's control modes, if `error` is ManiSkill's complaint about an unknown one."""
    modes = re.search(r"not in supported modes: \[(.*)\]", str(error))
    return None if modes is None else re.findall(r"'([^']+)'", modes[1])


@contextlib.contextmanager
def _in_words(task: str, config: ManiSkillConfig) -> Iterator[None]:
    """Turn what ManiSkill raises for mistakes and missing things into `UserError`."""
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
    """What to raise instead of an error that ManiSkill or SAPIEN raised while building `task`."""
    text = " ".join(str(error).split())
    if 'failed to find device "cuda"' in text:
        return UserError(
            "env.sim is 'gpu', but this process finds no CUDA device: set env.sim to cpu, or check nvidia-smi"
        )
    if "download_asset" in text:
        return UserError(f"the ManiSkill task {task!r} cannot be built: {text}")
    if rendering_device() is None and "render" in text:
        return NoVulkanError(f"the ManiSkill task {task!r} cannot run without a renderer, and nothing draws")
    return error


def _unlike(key: str, value: str, task: str, known: list[str]) -> str:
    """What to say about a value that `task` does not have."""
    hint = did_you_mean(value, known, lead=" - ")
    return f"{key} is {value!r}, which {task!r} does not have{hint} (has: {', '.join(known) or 'none'})"


def _check_cameras(task: str, cameras: list[str], known: list[str]) -> None:
    """Raise `UserError` for the first camera that `task` does not have."""
    for name in cameras:
        if name not in known:
            raise UserError(_unlike("env.cameras", name, task, known))


def _check_reward(task: str, mode: RewardMode, supported: tuple[str, ...]) -> None:
    """Raise `UserError` if `task` has not this reward. `sparse` follows from the success condition of any task."""
    modes = [name for name in supported if name != "none"]
    if mode is not RewardMode.sparse and mode not in modes:
        raise UserError(
            f"env.reward_mode is {mode.value!r}, but {task!r} has only {', '.join(dict.fromkeys([*modes, 'sparse']))}"
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
    """Turn ManiSkill's y/n questions on the terminal (and its `exit()`) into errors: a worker has nobody to ask."""
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
    """Stands in for `sapien.render.RenderMaterial`: it remembers what it is told and draws nothing."""

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

    Even with rendering off, every actor is built with a `RenderMaterial`, and making one fails where there is no
    rendering device. Modules that imported the class before are given the stand-in as well.
    """
    import sapien.render

    real = sapien.render.RenderMaterial
    if real is _Material:
        return
    for name, module in list(sys.modules.items()):
        inside = name.split(".")[0] in ("sapien", "mani_skill")
        if inside and getattr(module, "RenderMaterial", None) is real:
            module.RenderMaterial = _Material  # type: ignore[attr-defined]
