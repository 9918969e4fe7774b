"""Fast driver of LIBERO's environments: less work around the same physics.

Observations, images and success are those of LIBERO's `OffScreenRenderEnv`, bit for bit (`tests/envs/test_libero.py`
compares them), when that is seeded with the number of the start state, reset, and given that start state. Differences:

- The model is built once, not at every reset. LIBERO's reset draws new positions of the fixtures, which are part of the
  model; they are drawn here as well, from the number of the start state.
- A control step is 25 physics steps. In each of them LIBERO computes positions, velocities and contacts three times
  from the same numbers. Here that happens once, and only the constraint solver runs three times: it starts from its
  last solution, so leaving that out would change the last bits.
- Nothing is rendered, and none of robosuite's many observables is computed, before the observation is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import SimulatorError
from embodyrl.envs.libero import pro
from embodyrl.envs.libero.tasks import package
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.options import SettleGripper
from embodyrl.envs.perturb.kinds import Perturbation, level_of
from embodyrl.errors import UserError

REST = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""The action without motion and with an open gripper."""

SETTLING = {SettleGripper.open: REST, SettleGripper.still: np.zeros(7, np.float32)}
"""The action while objects come to rest, by `env.settle_gripper`."""

TO_REST = 10
"""Control steps in which objects come to rest, before some are moved."""

T = TypeVar("T")

RENDERED = ("mesh_vert", "mesh_normal", "mesh_texcoord", "mesh_face", "mesh_graph", "tex_data")
"""Parts of a model that a renderer loads: meshes and textures."""
PLACEMENT_ATTEMPTS = 1000
"""Most attempts to draw a random layout without collisions."""


def quiet_robosuite() -> None:
    """Set robosuite's settings before it is imported: no log file in /tmp, no warnings, no OpenGL of its own."""
    if "robosuite" in sys.modules:
        return
    spec = importlib.util.find_spec("robosuite")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'robosuite'", name="robosuite")
    place = Path(spec.origin).parent / "macros.py"
    macros_spec = importlib.util.spec_from_file_location("robosuite.macros", place)
    assert macros_spec is not None and macros_spec.loader is not None
    macros: Any = importlib.util.module_from_spec(macros_spec)
    macros_spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None
    macros.CONSOLE_LOGGING_LEVEL = "ERROR"
    macros.MUJOCO_GPU_RENDERING = False
    sys.modules["robosuite.macros"] = macros
    sys.modules.setdefault("robosuite.macros_private", ModuleType("robosuite.macros_private"))


def importing_robosuite(opengl: str) -> contextlib.AbstractContextManager[None]:
    """Set the environment in which robosuite is imported, within a block.

    CUDA_VISIBLE_DEVICES is hidden: robosuite refuses to be imported unless that text contains MUJOCO_EGL_DEVICE_ID. A
    rank's is the UUID of its GPU, which contains the number of that GPU or not by chance."""
    return rendering.environment(MUJOCO_GL=opengl, CUDA_VISIBLE_DEVICES=None)


def load_kernels() -> None:
    """Have numba load what robosuite compiles with it, so that forked processes share it: 0.2 s of CPU and 30 MB of
    each. Its own libraries are loaded with the first function that is called, whichever that is."""
    with importing_robosuite("disable"):
        importlib.import_module("robosuite.utils.transform_utils").mat2quat(np.eye(3))


@lru_cache(maxsize=1)
def load() -> Any:
    """Import LIBERO's package of environments, and add the objects of LIBERO-PRO.

    LIBERO asks on stdin for the folder of datasets unless it finds a settings file. It is given one in a temporary
    folder; a user's ~/.libero is neither read nor written.
    """
    rendering.import_mujoco()
    quiet_robosuite()
    root = package()
    places = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    places["datasets"] = "datasets"
    with tempfile.TemporaryDirectory(prefix="embodyrl-libero-") as folder:
        text = "".join(f"{name}: {str(root / place)!r}\n" for name, place in places.items())
        (Path(folder) / "config.yaml").write_text(text)
        with importing_robosuite("disable"), rendering.environment(LIBERO_CONFIG_PATH=folder):
            envs = importlib.import_module("libero.libero.envs")
    objects = importlib.import_module("libero.libero.envs.base_object")
    pro.register_objects(objects.OBJECTS_DICT, objects.VISUAL_CHANGE_OBJECTS_DICT)
    return envs


def make(task_file: Path, assets: Path) -> Any:
    """Build LIBERO's environment of a task, without cameras and without OpenGL.

    Raises:
        UserError: a file is missing in the assets folder.
    """
    envs = load()
    # LIBERO's private cache of the folder of its assets; unless it is set, LIBERO downloads them.
    libero: Any = importlib.import_module("libero.libero")
    libero._assets_path_cache = str(assets)
    robosuite = importlib.import_module("robosuite")
    problem = importlib.import_module("libero.libero.envs.bddl_utils").get_problem_info(str(task_file))["problem_name"]
    options = {
        "robots": ["Panda"],
        "controller_configs": robosuite.load_controller_config(default_controller="OSC_POSE"),
        "initialization_noise": None,
        "use_camera_obs": False,
        "has_offscreen_renderer": False,
        "hard_reset": False,
    }
    try:
        return _drawn(0, lambda: envs.TASK_MAPPING[problem](str(task_file), **options))
    except (FileNotFoundError, ValueError) as error:  # of the XML parser; of MuJoCo, which names a mesh or a texture
        if str(assets) not in str(error):
            raise
        raise UserError(f"LIBERO's assets in {assets} are not complete: {' '.join(str(error).split())}") from error


def _drawn(seed: int, action: Callable[[], T]) -> T:
    """Call `action`, which draws a random layout from numpy's global generator, until a layout has no collisions;
    returns its result."""
    failed = importlib.import_module("robosuite.utils.errors").RandomizationError
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        for _ in range(PLACEMENT_ATTEMPTS):
            with contextlib.suppress(failed):
                return action()
    finally:
        np.random.set_state(before)
    raise SimulatorError(f"LIBERO found no layout without collisions in {PLACEMENT_ATTEMPTS} attempts")


def _return_memory() -> None:
    """Return the memory of environments that are gone, and the temporary memory of building a scene (150 MB), to the
    system."""
    # An environment is a cycle of a few thousand objects that hold 100 to 280 MB of MuJoCo's. By their number alone,
    # Python would look for cycles after dozens of environments.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it, and keeps that memory
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Driver:
    """One environment of LIBERO."""

    def __init__(self, task_file: Path, assets: Path) -> None:
        self._env = make(task_file, assets)
        _return_memory()
        import mujoco

        self._mujoco = mujoco
        self._whole = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._after_velocities = int(mujoco.mjtStage.mjSTAGE_VEL)
        self.model: Any = self._env.sim.model._model
        self.data: Any = self._env.sim.data._data
        self._seen: Any = mujoco.MjData(self.model)
        self._built = {name: getattr(self.model, name).copy() for name in ("body_pos", "body_quat", "site_rgba")}
        # LIBERO's reset builds the scene once more and then has the samplers of doors and knobs twice; with fewer
        # random draws everything placed after them would get other positions.
        self._env.object_property_initializers *= 2
        robot = self._env.robots[0]
        self._gripper = robot.gripper
        self._arm, self._fingers = robot._ref_joint_actuator_indexes, robot._ref_gripper_joint_pos_indexes
        self._arm_joints = np.array(robot._ref_joint_pos_indexes)
        self._hand = self.model.body(robot.robot_model.eef_name).id
        self._grip = robot.eef_site_id
        self._finger_actuators = robot._ref_joint_gripper_actuator_indexes
        low, high = self.model.actuator_ctrlrange[self._finger_actuators].T
        self._finger_middle, self._finger_half = 0.5 * (high + low), 0.5 * (high - low)
        self._torque_low, self._torque_high = robot.torque_limits
        self._substeps = int(self._env.control_timestep / self._env.model_timestep)
        self._clock, self._sampled = 0.0, True
        self._objects = np.setdiff1d(np.arange(self.model.nq), [*robot._ref_joint_pos_indexes, *self._fingers])
        self._sample(self.data.qpos.copy())

    @property
    def _controller(self) -> Any:
        """Return the robot's controller, which every reset replaces."""
        return self._env.robots[0].controller

    def reset(self, number: int, state: NDArray[np.float64]) -> None:
        """Start from a flattened state (time, positions, velocities) with the fixtures laid out by `number`."""
        mujoco, model, data = self._mujoco, self.model, self.data
        for name, values in self._built.items():
            getattr(model, name)[...] = values
        mujoco.mj_resetData(model, data)
        # The solver starts from its last solution. LIBERO calls `forward` this often between building the scene and
        # the first step, so does this.
        mujoco.mj_forward(model, data)
        mujoco.mj_forward(model, data)
        # Of LIBERO's random layout, the fixtures remain, which are part of the model, and the controller.
        _drawn(number, self._env._reset_internal)
        self._controller.__class__ = _controller_class()
        mujoco.mj_forward(model, data)
        self._env.visualize({name: False for name in self._env._visualizations})
        data.time = state[0]
        data.qpos[:], data.qvel[:] = state[1 : 1 + model.nq], state[1 + model.nq :]
        mujoco.mj_forward(model, data)
        self._gripper.current_action = np.zeros(2)
        self._env._post_process()
        self._clock, self._sampled = 2 * self._env.model_timestep, True
        self._sample(data.qpos.copy())

    def reset_perturbed(self, number: int, state: NDArray[np.float64], seed: int, perturb: Perturbation) -> None:
        """Start from a state in which robot and objects are elsewhere than in a flattened one, see `starts`."""
        from embodyrl.envs.libero.starts import Start

        self.reset(number, state)  # which places the fixtures
        if level_of(perturb, "layout"):  # some official states have objects above the table, and touch nothing yet
            for _ in range(TO_REST):
                self.step(REST)
            state = np.concatenate([state[:1], self.data.qpos, np.zeros(self.model.nv)])
        fixtures = [each.root_body for each in self._env.fixtures_dict.values()]
        self.reset(number, Start(self.model, self._arm_joints, fixtures, state).moved(seed, perturb))

    def step(self, action: NDArray[np.float32]) -> bool:
        """Execute one action `[7]`; returns whether the task is solved.

        Raises:
            LinAlgError: the physics diverged. (MuJoCo's `mj_step` would silently reset the state.)
        """
        mujoco, model, data, controller = self._mujoco, self.model, self.data, self._controller
        action = action.astype(np.float64)
        for substep in range(self._substeps):
            mujoco.mj_forward(model, data)
            if substep == 0:
                controller.set_goal(action[:6])
            torques = controller.run_controller()
            fingers = self._gripper.format_action(action[6:])
            data.ctrl[self._finger_actuators] = self._finger_middle + self._finger_half * fingers
            data.ctrl[self._arm] = np.clip(torques, self._torque_low, self._torque_high)
            mujoco.mj_forwardSkip(model, data, self._after_velocities, 1)
            before = None if self._sampled else data.qpos.copy()
            mujoco.mj_Euler(model, data)
            self._tick(before)
        solved = bool(self._env._check_success())
        self._env._post_process()
        return solved

    def _tick(self, before: NDArray[np.float64] | None) -> None:
        """Take the observation at the time of robosuite's clock, with the positions `before` this physics step.

        The reset starts the clock, so the time is slightly before the end of a control step. The clock accumulates time
        steps, and rounding makes it necessary to accumulate them here in the same way.
        """
        self._clock += self._env.model_timestep
        if before is not None:
            self._sample(before)
            self._sampled = True
        if self._clock >= self._env.control_timestep:
            self._clock %= self._env.control_timestep
            self._sampled = False

    def _sample(self, qpos: NDArray[np.float64]) -> None:
        self._seen_qpos = qpos
        self._seen_fingers = self.data.qpos[self._fingers]
        self._seen_sites = self.model.site_rgba.copy()

    def appearance(self) -> int:
        """Return a checksum of the parts that a renderer loads; scenes with equal checksums can share a renderer."""
        check = 0
        for name in RENDERED:
            check = zlib.crc32(getattr(self.model, name).data, check)
        return check

    @contextlib.contextmanager
    def scene(self) -> Iterator[Any]:
        """Yield the scene at the time of the observation, a `mujoco.MjData` with all poses."""
        mujoco, model, scene = self._mujoco, self.model, self._seen
        scene.qpos[:] = self._seen_qpos
        mujoco.mj_kinematics(model, scene)
        mujoco.mj_comPos(model, scene)
        mujoco.mj_camlight(model, scene)
        now = model.site_rgba.copy()  # a burner that is on is a site with a colour
        model.site_rgba[:] = self._seen_sites
        try:
            yield scene
        finally:
            model.site_rgba[:] = now

    def robot(self, scene: Any) -> NDArray[np.float64]:
        """Return end-effector position [m] and rotation [axis times angle, rad], and finger positions [m]: `[8]`."""
        rotation = axis_angle(scene.xquat[self._hand])
        return np.concatenate([scene.site_xpos[self._grip], rotation, self._seen_fingers])

    def objects(self, scene: Any) -> NDArray[np.float64]:
        """Return positions [m] and orientations (quaternion, scalar first) of the objects, angles [rad] and positions
        [m] of doors, drawers and knobs, in MuJoCo's order."""
        return np.array(scene.qpos[self._objects])

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return everything that changes after `reset`, and the state shown by the observation."""
        physics = np.empty(self._mujoco.mj_stateSize(self.model, self._whole))
        self._mujoco.mj_getState(self.model, self.data, physics, self._whole)
        return {
            "physics": physics,
            "goal_position": np.array(self._controller.goal_pos),
            "goal_rotation": np.array(self._controller.goal_ori),
            "gripper": np.array(self._gripper.current_action),
            "clock": np.array([self._clock]),
            "flags": np.array([self._sampled, self._controller.new_update]),
            "sites": self.model.site_rgba.copy(),
            "seen_qpos": self._seen_qpos.copy(),
            "seen_fingers": self._seen_fingers.copy(),
            "seen_sites": self._seen_sites.copy(),
        }

    def restore(self, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a snapshot, after `reset` with the number and state of its episode's start.

        Raises:
            KeyError, ValueError: the snapshot does not belong to this environment.
        """
        for name, values in self.snapshot().items():
            if snapshot[name].shape != values.shape:
                raise ValueError(f"{name} has shape {snapshot[name].shape}, want {values.shape}")
        # Without `mj_forward`: the next step calls it, and once more would change where the solver starts from.
        self._mujoco.mj_setState(self.model, self.data, snapshot["physics"], self._whole)
        self._controller.goal_pos = snapshot["goal_position"].copy()
        self._controller.goal_ori = snapshot["goal_rotation"].copy()
        self._gripper.current_action = snapshot["gripper"].copy()
        self._clock = float(snapshot["clock"][0])
        self._sampled, self._controller.new_update = (bool(flag) for flag in snapshot["flags"])
        self.model.site_rgba[:] = snapshot["sites"]
        self._seen_qpos = snapshot["seen_qpos"].copy()
        self._seen_fingers, self._seen_sites = snapshot["seen_fingers"].copy(), snapshot["seen_sites"].copy()


@lru_cache(maxsize=1)
def _controller_class() -> Any:
    """Return a class of robosuite's controller that reads positions and velocities without recomputing them."""
    import mujoco

    base = importlib.import_module("robosuite.controllers.osc").OperationalSpaceController
    after_velocities = int(mujoco.mjtStage.mjSTAGE_VEL)

    class Controller(base):  # type: ignore[misc, valid-type]
        new_update: bool

        def update(self, force: bool = False) -> None:
            """Read the inputs of the control law, unless that was done since the last physics step."""
            if not (self.new_update or force):
                return
            model, data = self.sim.model._model, self.sim.data._data
            mujoco.mj_forwardSkip(model, data, after_velocities, 1)
            site = model.site(self.eef_name).id
            across, turning = np.zeros((3, model.nv)), np.zeros((3, model.nv))
            mujoco.mj_jacSite(model, data, across, turning, site)
            self.ee_pos = np.array(data.site_xpos[site])
            self.ee_ori_mat = np.array(data.site_xmat[site].reshape([3, 3]))
            self.ee_pos_vel, self.ee_ori_vel = np.dot(across, data.qvel), np.dot(turning, data.qvel)
            self.joint_pos, self.joint_vel = data.qpos[self.qpos_index], data.qvel[self.qvel_index]
            self.J_pos = np.array(across[:, self.qvel_index])
            self.J_ori = np.array(turning[:, self.qvel_index])
            self.J_full = np.array(np.vstack([self.J_pos, self.J_ori]))
            masses = np.empty((model.nv, model.nv))
            mujoco.mj_fullM(model, masses, data.qM)
            self.mass_matrix = masses[self.qvel_index, :][:, self.qvel_index]
            self.new_update = False

    return Controller


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert a unit quaternion (w, x, y, z) to axis * angle, 0 .. 2 pi [rad]: `2 acos(w) (x, y, z) / |(x, y, z)|`."""
    w = min(max(float(quaternion[0]), -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    return np.asarray(quaternion[1:]) * 2.0 * math.acos(w) / sine if sine else np.zeros(3)
