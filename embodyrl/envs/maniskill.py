"""ManiSkill 3 with state observations, simulated by PhysX on the CPU.

Every slot is an environment of its own in this process: PhysX on the CPU knows no batches, but several environments in
one process work and do not influence each other. Nothing is rendered, so no Vulkan driver is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError, Slot, SlotSimulator, Transition, check_task_list, check_tasks
from embodyrl.envs.options import ManiSkillConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.registry import near_match

SENTENCES = {
    "PickCube-v1": "pick up the cube and hold it at the goal position",
    "PushCube-v1": "push the cube to the goal region",
    "PullCube-v1": "pull the cube to the goal region",
    "PokeCube-v1": "poke the cube with the peg to the goal position",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "put two cubes side by side and stack the third on top",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the side of the box",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PlaceSphere-v1": "place the sphere in the bin",
    "RollBall-v1": "roll the ball to the goal region",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushT-v1": "push the T-shaped block to the goal pose",
    "TwoRobotPickCube-v1": "pick up the cube and pass it to the other robot",
    "TwoRobotStackCube-v1": "stack the cubes in the goal region together",
}
"""Task name -> the sentence that tells a policy what to do. Other tasks get a sentence derived from their name."""

DRIVER_REMEDY = "a Vulkan driver is needed (an NVIDIA driver, or Mesa's lavapipe 24.3 or newer: mesa-vulkan-drivers)"


def known_tasks() -> list[str]:
    """All registered task names. Imports ManiSkill, which takes seconds."""
    return sorted(_load().REGISTERED_ENVS)


def sentence(task: str) -> str:
    """What a policy is told about `task`: a written sentence, or the words of its name."""
    words = re.sub(r"^MS-|-v\d+$", "", task)
    return SENTENCES.get(task, re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-_]", " ", words).lower())


class ManiSkill(SlotSimulator):
    """ManiSkill with state observations."""

    def __init__(self, config: ManiSkillConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "maniskill")
        check_tasks(config.tasks, known_tasks(), "maniskill")
        self._config = config
        first = config.tasks[0]
        slot = ManiSkillSlot(first, config)
        spec = SimulatorSpec(
            tasks={task: sentence(task) for task in config.tasks},
            actions=slot.fields,
            proprio_dim=slot.proprio_dim,
            max_episode_steps=config.max_episode_steps,
            control_frequency=slot.control_frequency,
        )
        super().__init__(spec, num_slots, spare=[(first, slot)])

    def make_slot(self, task: str) -> Slot:
        """An environment of `task`."""
        slot = ManiSkillSlot(task, self._config)
        if (slot.fields, slot.proprio_dim) != (self.spec.actions, self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes tasks of different shapes: {task!r} has {slot.proprio_dim} state numbers and actions "
                f"{[field.name for field in slot.fields]}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{[field.name for field in self.spec.actions]}: name tasks of one shape"
            )
        return slot


class ManiSkillSlot(Slot):
    """One ManiSkill environment, driven without Gymnasium's wrappers."""

    def __init__(self, task: str, config: ManiSkillConfig) -> None:
        import torch

        torch.set_num_threads(1)  # the tensors are tiny; more threads only wait for each other
        self._torch = torch
        self._task = task
        self._end_at_success = config.end_at_success
        self._env = _build(task, config)
        from embodyrl.envs import maniskill_driver  # imports ManiSkill, which `_build` had to prepare first

        maniskill_driver.trust_actions(self._env)
        self.fields = _action_fields(self._env, task, config.control_mode)
        self.proprio_dim = int(self._env.single_observation_space.shape[0])
        self.control_frequency = float(self._env.control_freq)
        self._observation: NDArray[np.float32] = np.zeros(self.proprio_dim, np.float32)

    def reset(self, episode: EpisodeSpec) -> None:
        """Start from `episode.start_state`, which is ManiSkill's seed. Its tasks draw nothing random afterwards."""
        with self._torch.inference_mode():
            observation, _ = self._env.reset(seed=episode.start_state % 2**32)
        self._observation = observation.numpy()[0]

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [D]`."""
        with self._torch.inference_mode():
            observation, reward, _, _, info = self._env.step(self._torch.from_numpy(action))
        self._observation = observation.numpy()[0]
        success = bool(info["success"]) if "success" in info else False
        failed = bool(info["fail"]) if "fail" in info else False
        return Transition(float(reward), failed or (success and self._end_at_success), success)

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        """No images; proprio `[S]`."""
        return None, self._observation.astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """Refuse: this simulator runs without a renderer."""
        raise RenderError(f"ManiSkill runs without a renderer here, so {self._task!r} has no pictures")

    def close(self) -> None:
        """Release the environment."""
        self._env.close()


def _load() -> Any:
    """ManiSkill's registration module, with all tasks registered."""
    _stand_in_for_materials()
    importlib.import_module("mani_skill.envs")
    importlib.import_module("embodyrl.envs.maniskill_driver").install()
    return importlib.import_module("mani_skill.utils.registration")


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
    try:
        real()
    except RuntimeError:
        for name, module in list(sys.modules.items()):
            inside = name.split(".")[0] in ("sapien", "mani_skill")
            if inside and getattr(module, "RenderMaterial", None) is real:
                module.RenderMaterial = _Material  # type: ignore[attr-defined]


def _build(task: str, config: ManiSkillConfig) -> Any:
    """The environment class of `task`, built without wrappers, after its options and assets were checked."""
    registration = _load()
    entry = registration.REGISTERED_ENVS[task]
    _check_assets(task, entry.asset_download_ids or [])
    if config.reward_mode not in entry.cls.SUPPORTED_REWARD_MODES:
        raise UserError(
            f"env.reward_mode is {config.reward_mode.value!r}, but {task!r} has only "
            f"{', '.join(entry.cls.SUPPORTED_REWARD_MODES)}"
        )
    settings = {
        "num_envs": 1,
        "obs_mode": "state",
        "reward_mode": config.reward_mode.value,
        "control_mode": config.control_mode,
        "sim_backend": "physx_cpu",
        "render_backend": "none",
    }
    try:
        with _no_questions(task):
            return entry.cls(**{**entry.default_kwargs, **settings})
    except AssertionError as error:
        modes = re.search(r"not in supported modes: \[(.*)\]", str(error))
        if modes is None:
            raise
        known = re.findall(r"'([^']+)'", modes[1])
        near = near_match(config.control_mode, known)
        hint = f" - did you mean {near!r}?" if near else ""
        raise UserError(
            f"env.control_mode is {config.control_mode!r}, which {task!r} does not have{hint} (has: {', '.join(known)})"
        ) from error
    except FileNotFoundError as error:  # scenes whose assets ManiSkill does not list
        raise UserError(f"{_assets_missing(task)} (not found: {error.filename})") from error
    except (RuntimeError, AttributeError) as error:
        if "render" not in str(error):
            raise
        raise UserError(f"the ManiSkill task {task!r} cannot run without a renderer: {DRIVER_REMEDY}") from error


def _check_assets(task: str, asset_ids: list[str]) -> None:
    """Raise `UserError` if files that `task` needs are not on this machine."""
    from mani_skill.utils import assets

    sources: list[str] = []
    for asset in asset_ids:
        group = asset in assets.DATA_GROUPS
        sources += assets.expand_data_group_into_individual_data_source_ids(asset) if group else [asset]
    if any(not assets.is_data_source_downloaded(source) for source in sources):
        raise UserError(_assets_missing(task))


def _assets_missing(task: str) -> str:
    return (
        f"the assets of the ManiSkill task {task!r} are not on this machine: "
        f"python -m mani_skill.utils.download_asset {task}"
    )


@contextlib.contextmanager
def _no_questions(task: str) -> Iterator[None]:
    """Turn ManiSkill's y/n questions on the terminal (and its `exit()`) into errors: a worker has nobody to ask."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        raise UserError(f"{_assets_missing(task)} (ManiSkill: {message})")

    asked, download_asset.prompt_yes_no = download_asset.prompt_yes_no, refuse
    try:
        yield
    except SystemExit as error:
        raise UserError(_assets_missing(task)) from error
    finally:
        download_asset.prompt_yes_no = asked


def _action_fields(env: Any, task: str, control_mode: str) -> tuple[ActionField, ...]:
    """The parts of the action vector, as the robot's controllers define them."""
    from mani_skill.agents.controllers.base_controller import CombinedController
    from mani_skill.agents.multi_agent import MultiAgent

    if isinstance(env.agent, MultiAgent):
        raise UserError(f"the ManiSkill task {task!r} has several robots, which is not supported: choose another task")
    controller = env.agent.controller
    parts = controller.controllers if isinstance(controller, CombinedController) else {"robot": controller}
    fields = [field for name, part in parts.items() for field in _controller_fields(name, part)]
    if not all(np.isfinite([*field.low, *field.high]).all() for field in fields):
        raise UserError(
            f"env.control_mode {control_mode!r} has actions without limits for {task!r}: choose another one"
        )
    return tuple(fields)


def _controller_fields(name: str, controller: Any) -> list[ActionField]:
    """The action entries of one controller."""
    from mani_skill.agents.controllers import pd_ee_pose, pd_joint_pos

    space, config = controller.single_action_space, controller.config
    low, high = tuple(map(float, space.low)), tuple(map(float, space.high))
    if not low:  # a passive controller
        return []

    def field(meaning: str, unit: str = "1", scale: float = 1.0, part: slice = slice(None), suffix: str = "") -> Any:
        return ActionField(name=name + suffix, meaning=meaning, unit=unit, low=low[part], high=high[part], scale=scale)

    if name.endswith("gripper"):
        return [field("gripper")]
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


def _scale(config: Any, low: Any, high: Any) -> float | None:
    """What an action of 1 is worth in the controller's own unit, or None if that is not one number."""
    if not config.normalize_action:
        return 1.0
    limits = np.unique(np.abs(np.hstack([low, high]).astype(np.float64))) if low is not None else np.zeros(0)
    symmetric = limits.size == 1 and np.array_equal(np.negative(low), high)
    return float(limits[0]) if symmetric else None
