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
from numpy.typing import NDArray

from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.envs.options import Driver, Proprio, RenderQuality
from embodyrl.envs.types import EpisodeSpec, Observation, Simulator
from embodyrl.registry import SIMULATORS

LIBERO_ASSETS = Path(__file__).parents[2].parent / "shared" / "libero-assets" / "assets"
"""LIBERO's meshes and textures, which its package lacks."""
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 12
"""Time limit of the suite's episodes [control steps]."""
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

    def config(self, max_episode_steps: int = LIMIT) -> Any:
        """Its part of a config; the example's module is imported as `plugins:` would."""
        module_name = "custom_simulator" if self.name == "point_mass" else "adapter_skeleton"
        if (self.name == "point_mass" or self.label == "adapter") and module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, EXAMPLES / f"{module_name}.py")
            assert spec is not None and spec.loader is not None
            sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        options = SIMULATORS.entry(self.name).load_options()
        assert options is not None
        return options(name=self.name, tasks=list(self.tasks), max_episode_steps=max_episode_steps, **self.options)

    def build(self, num_slots: int, max_episode_steps: int = LIMIT) -> Simulator:
        """The simulator."""
        config = self.config(max_episode_steps)
        simulator: Simulator = SIMULATORS.entry(self.name).load()(config, num_slots)
        return simulator


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
        options={"settle_steps": 2, "proprio": Proprio.full, "assets": str(LIBERO_ASSETS)},
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
            "assets": str(LIBERO_ASSETS),
        },
    ),
    Backend(
        label="libero-upstream",
        name="libero",
        tasks=("libero_10/2",),
        options={"driver": Driver.upstream, "settle_steps": 0, "assets": str(LIBERO_ASSETS)},
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
    if backend.name == "libero" and not LIBERO_ASSETS.is_dir():
        return "LIBERO's assets are not there"
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


def episode(backend: Backend, number: int) -> EpisodeSpec:
    """The suite's episode `number`; with several tasks they alternate."""
    task = backend.tasks[number % len(backend.tasks)]
    return EpisodeSpec(task=task, start_state=100 + number, seed=7 * number, group=number)


def actions(simulator: Simulator, number: int, steps: int = LIMIT) -> NDArray[np.float32]:
    """The actions of episode `number`, `[steps, D]`: random around a random direction, so that something happens."""
    generator = np.random.default_rng(number)
    low, high = simulator.spec.action_low, simulator.spec.action_high
    middle, half = (high + low) / 2, (high - low) / 2
    noise = 0.6 * generator.uniform(-1, 1, (steps, len(low))) + generator.uniform(-1, 1, len(low))
    return (middle + half * np.clip(noise, -1, 1)).astype(np.float32)


@dataclass(eq=False)
class Trajectory:
    """What came out of a slot: images `[steps + 1, V, H, W, 3]` and proprio `[steps + 1, S]` (empty where it has
    none), rewards and success `[steps]`, ends `[steps, 2]`."""

    images: NDArray[np.uint8]
    proprio: NDArray[np.float32]
    rewards: NDArray[np.float32]
    success: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, Trajectory) and all(
            a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(self.arrays(), other.arrays(), strict=True)
        )

    def arrays(self) -> list[NDArray[Any]]:
        """All of it."""
        return [self.images, self.proprio, self.rewards, self.success, self.ends]

    def after(self, done: int) -> Trajectory:
        """What follows its first `done` actions."""
        return Trajectory(*[array[done:] for array in self.arrays()])

    def shows(self, step: int, observation: Observation, row: int = 0) -> bool:
        """Whether `row` of `observation` is the one after `step` actions, bit for bit."""
        images, proprio = arrays_of(observation)
        return np.array_equal(self.images[step], images[row]) and np.array_equal(self.proprio[step], proprio[row])


def arrays_of(observation: Observation) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Images `[B, V, H, W, 3]` and proprio `[B, S]` of an observation; `[B, 0]` where it has none."""
    nothing = len(observation.task_descriptions), 0
    images = np.empty(nothing, np.uint8) if observation.images is None else observation.images
    return images, np.empty(nothing, np.float32) if observation.proprio is None else observation.proprio


def same(one: Observation, other: Observation) -> bool:
    """Whether two observations are equal, bit for bit."""
    pairs = zip(arrays_of(one), arrays_of(other), strict=True)
    return one.task_descriptions == other.task_descriptions and all(np.array_equal(a, b) for a, b in pairs)


def go_on(simulator: Simulator, slot: int, plan: NDArray[np.float32]) -> Trajectory:
    """Execute `plan [steps, D]` one action at a time, up to the end of the episode; starts with `observe`."""
    observations = [simulator.observe([slot])]
    rewards, success, ends = [], [], []
    for action in plan:
        result = simulator.step_chunk([slot], action[None, None])
        observations.append(result.observation)
        rewards.append(result.rewards[0, 0])
        success.append(result.success[0, 0])
        ends.append([result.terminated[0], result.truncated[0]])
        if result.terminated[0] or result.truncated[0]:
            break
    images, proprio = zip(*[arrays_of(observation) for observation in observations], strict=True)
    return Trajectory(
        images=np.concatenate(images),
        proprio=np.concatenate(proprio),
        rewards=np.array(rewards, np.float32),
        success=np.array(success, np.bool_),
        ends=np.array(ends, np.bool_),
    )


def play(simulator: Simulator, slot: int, backend: Backend, number: int) -> Trajectory:
    """Episode `number` from its start to its end."""
    simulator.reset([slot], [episode(backend, number)])
    return go_on(simulator, slot, actions(simulator, number))


def main(label: str, state_file: str, done: int, out: str) -> None:
    """In a process of its own: play episode 3 from its start, then go on from a saved state after `done` actions."""
    backend = next(backend for backend in BACKENDS if backend.label == label)
    simulator = backend.build(num_slots=1)
    whole = play(simulator, 0, backend, 3)
    play(simulator, 0, backend, 4)
    simulator.set_state([0], [Path(state_file).read_bytes()])
    rest = go_on(simulator, 0, actions(simulator, 3)[done:])
    simulator.close()
    arrays = {f"{name}{i}": a for name, t in (("whole", whole), ("rest", rest)) for i, a in enumerate(t.arrays())}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
