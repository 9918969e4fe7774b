"""The simulators that the contract suite runs over, and a way to play the same episode in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.checking.simulators import LIMIT, SimulatorBench, Trajectory
from embodyrl.config.infos import simulator_info
from embodyrl.envs.libero import pro
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.envs.options import Driver, Proprio, RenderQuality
from embodyrl.registry import SIMULATORS

EXAMPLES = Path(__file__).parents[2] / "examples"
EPISODE = 3
"""The episode that a second process plays and goes on with."""
ON_MUJOCO = ("metaworld", "libero", "mujoco", "robotics", "aloha", "hil", "dm_control", "robosuite")
"""Backends whose images MuJoCo draws."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One row of the contract matrix."""

    label: str
    name: str
    tasks: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    ends_itself: bool = False
    """Whether an episode with always the same largest action terminates before 60 steps."""

    def config(self) -> Any:
        """Its part of a config; the example's module is imported as `plugins:` would."""
        module_name = "custom_simulator" if self.name == "point_mass" else "adapter_skeleton"
        if (self.name == "point_mass" or self.label == "adapter") and module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, EXAMPLES / f"{module_name}.py")
            assert spec is not None and spec.loader is not None
            sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        options = SIMULATORS.entry(self.name).load_options()
        assert options is not None
        return options(name=self.name, tasks=list(self.tasks), max_episode_steps=LIMIT, **self.options)

    def bench(self) -> SimulatorBench:
        """What promises are tried on."""
        return SimulatorBench(self.config())


BACKENDS = [
    Backend(label="metaworld", name="metaworld", tasks=("reach-v3",)),
    Backend(label="metaworld-mixed", name="metaworld", tasks=("push-v3", "drawer-open-v3")),
    Backend(
        label="metaworld-rgb",
        name="metaworld",
        tasks=("push-v3",),
        options={"cameras": ["corner4", "gripperPOV"], "image_size": [48, 80], "render_quality": RenderQuality.fast},
    ),
    Backend(
        label="metaworld-upstream",
        name="metaworld",
        tasks=("push-v3", "drawer-open-v3"),
        options={"driver": Driver.upstream},
    ),
    Backend(
        label="metaworld-upstream-rgb",
        name="metaworld",
        tasks=("push-v3",),
        options={
            "driver": Driver.upstream,
            "cameras": ["corner4"],
            "image_size": [48, 80],
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(
        label="metaworld-rgb-mixed",
        name="metaworld",
        tasks=("push-v3", "drawer-open-v3"),
        options={
            "cameras": ["corner"],
            "image_size": [64, 64],
            "proprio": Proprio.robot,
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(
        label="libero-state",
        name="libero",
        tasks=("libero_spatial/0",),
        options={"settle_steps": 2, "proprio": Proprio.full},
    ),
    Backend(
        label="libero-rgb",
        name="libero",
        tasks=("libero_goal/7",),
        options={
            "cameras": ["agentview", "wrist"],
            "image_size": [48, 64],
            "settle_steps": 0,
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(
        label="libero-upstream",
        name="libero",
        tasks=("libero_10/2",),
        options={"driver": Driver.upstream, "settle_steps": 0},
    ),
    Backend(label="libero-object", name="libero", tasks=("libero_object/4",), options={"settle_steps": 2}),
    Backend(label="libero-90", name="libero", tasks=("libero_90/31",), options={"settle_steps": 0}),
    Backend(
        label="libero-pro",
        name="libero",
        tasks=("libero_goal_object/2", "libero_goal_swap/2"),
        options={"settle_steps": 0, "cameras": ["wrist"], "image_size": [48, 48], "render_quality": RenderQuality.fast},
    ),
    Backend(label="maniskill", name="maniskill", tasks=("PushCube-v1",)),
    Backend(label="maniskill-mixed", name="maniskill", tasks=("PushCube-v1", "PullCube-v1")),
    Backend(
        label="maniskill-rgb",
        name="maniskill",
        tasks=("PickCube-v1",),
        options={"cameras": ["base_camera"], "image_size": [48, 64], "proprio": Proprio.robot},
    ),
    Backend(
        label="maniskill-upstream",
        name="maniskill",
        tasks=("PushCube-v1", "PullCube-v1"),
        options={"driver": Driver.upstream},
    ),
    Backend(
        label="maniskill-upstream-rgb",
        name="maniskill",
        tasks=("PickCube-v1",),
        options={"driver": Driver.upstream, "cameras": ["base_camera"], "image_size": [48, 64]},
    ),
    Backend(label="gymnasium-box", name="gymnasium", tasks=("Pendulum-v1",), options={"success_return": -50.0}),
    Backend(label="gymnasium-discrete", name="gymnasium", tasks=("CartPole-v1",), ends_itself=True),
    Backend(
        label="gymnasium-rgb",
        name="gymnasium",
        tasks=("Pendulum-v1",),
        options={"cameras": ["render"], "image_size": [40, 60]},
    ),
    Backend(label="mujoco", name="mujoco", tasks=("Hopper-v5",), options={"success_return": 10.0}, ends_itself=True),
    Backend(
        label="mujoco-rgb",
        name="mujoco",
        tasks=("HalfCheetah-v5",),
        options={"cameras": ["track"], "image_size": [40, 60], "render_quality": RenderQuality.fast},
    ),
    Backend(label="pusht", name="pusht", tasks=("gym_pusht/PushT-v0",)),
    Backend(
        label="pusht-rgb",
        name="pusht",
        tasks=("gym_pusht/PushT-v0",),
        options={"kwargs": {"obs_type": "pixels_agent_pos"}, "cameras": ["pixels"], "image_size": [96, 96]},
    ),
    Backend(label="robotics-fetch", name="robotics", tasks=("FetchPush-v4", "FetchPickAndPlace-v4")),
    Backend(
        label="robotics-rgb",
        name="robotics",
        tasks=("FetchReach-v4",),
        options={
            "cameras": ["external_camera_0", "head_camera_rgb"],
            "image_size": [48, 64],
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(label="robotics-adroit", name="robotics", tasks=("AdroitHandDoor-v1",)),
    Backend(
        label="robotics-kitchen",
        name="robotics",
        tasks=("FrankaKitchen-v1",),
        options={"kwargs": {"tasks_to_complete": ["microwave"]}},
    ),
    Backend(label="aloha", name="aloha", tasks=("gym_aloha/AlohaInsertion-v0",)),
    Backend(
        label="aloha-rgb",
        name="aloha",
        tasks=("gym_aloha/AlohaTransferCube-v0",),
        options={
            "kwargs": {"proprio": "robot"},
            "cameras": ["top", "left_wrist"],
            "image_size": [48, 64],
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(label="hil", name="hil", tasks=("gym_hil/PandaArrangeBoxes-v0",)),
    Backend(
        label="hil-rgb",
        name="hil",
        tasks=("gym_hil/PandaPickCube-v0",),
        options={
            "cameras": ["front", "handcam_rgb"],
            "image_size": [48, 64],
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(label="dm_control", name="dm_control", tasks=("ball_in_cup-catch",)),
    Backend(label="dm_control-mixed", name="dm_control", tasks=("walker-walk", "walker-run")),
    Backend(
        label="dm_control-rgb",
        name="dm_control",
        tasks=("cartpole-swingup",),
        options={"cameras": ["fixed"], "image_size": [48, 64], "render_quality": RenderQuality.fast},
    ),
    Backend(
        label="robosuite-rgb",
        name="robosuite",
        tasks=("Lift",),
        options={
            "kwargs": {"proprio": "robot"},
            "cameras": ["agentview", "robot0_eye_in_hand"],
            "image_size": [48, 64],
            "render_quality": RenderQuality.fast,
        },
    ),
    Backend(
        label="adapter",
        name="gymnasium",
        tasks=("adapter/Push-v0",),
        options={"cameras": ["front"], "image_size": [32, 64]},
    ),
    Backend(label="custom", name="point_mass", tasks=("reach",)),
    Backend(label="custom-mixed", name="point_mass", tasks=("reach", "oppose")),
]


def missing(backend: Backend) -> str | None:
    """Why `backend` cannot run here, or None."""
    if backend.name == "point_mass":
        return None
    packages = [requirement.module for requirement in SIMULATORS.entry(backend.name).missing()]
    if packages:
        return f"{', '.join(packages)} not installed"
    if backend.name == "libero" and (assets := simulator_info("libero", installed=True).assets()) and assets[1]:
        return assets[0]
    if backend.label == "libero-pro" and not pro.is_here():
        return "LIBERO-PRO is not there"
    if backend.options.get("cameras") and backend.name == "maniskill":
        from embodyrl.envs.maniskill.loading import rendering_device

        return None if rendering_device() else "no Vulkan driver that SAPIEN can draw with"
    return _cannot_render() if backend.options.get("cameras") and backend.name in ON_MUJOCO else None


@cache
def _cannot_render() -> str | None:
    """Why MuJoCo renders no images here, or None."""
    try:
        rendering.context(16, 16).free()
    except NoOpenGLError as error:
        return str(error)
    return None


def main(label: str, state_file: str, whole: str, done: int) -> None:
    """In a process of its own: play an episode from its start, then go on from a saved state after `done` actions."""
    bench = next(backend for backend in BACKENDS if backend.label == label).bench()
    with np.load(whole) as arrays:
        trajectory = Trajectory(*arrays.values())
    bench.goes_on_alike(EPISODE, trajectory, done, Path(state_file).read_bytes())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
