"""Gymnasium: which environments can be used, how actions and success are read, and what is said about the others."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from embodyrl.config import ConfigError, ConfigUse, load_config
from embodyrl.envs.base import NotFiniteError, RenderError
from embodyrl.envs.gymnasium import families
from embodyrl.envs.gymnasium.info import GymnasiumInfo
from embodyrl.envs.gymnasium.simulator import Gymnasium, GymnasiumSlot, known_tasks
from embodyrl.envs.images import resize
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UnknownNameError, UserError

INFO = GymnasiumInfo("gymnasium")


class Probe(gymnasium.Env[Any, Any]):
    """An environment of any spaces, with a reward that is told."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, observation_space: Any = None, action_space: Any = None, reward: float = -1.0) -> None:
        self.observation_space = observation_space or spaces.Box(-1, 1, (2, 3))
        self.action_space = action_space or spaces.Box(-1, 1, (2,))
        self._reward = reward
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        info = {"is_success": len(self.actions) == 2}
        return self.observation_space.sample(), self._reward, False, False, info


gymnasium.register("EmbodyrlProbe-v0", entry_point=Probe, max_episode_steps=3)


def simulator(task: str = "EmbodyrlProbe-v0", max_episode_steps: int = 6, **options: Any) -> Gymnasium:
    """A simulator with one slot, whose episode has begun."""
    built = Gymnasium(
        GymnasiumConfig(name="gymnasium", tasks=[task], max_episode_steps=max_episode_steps, **options), 1
    )
    built.reset([0], [EpisodeSpec(task=task, start_state=1, seed=2)])
    return built


def zeros(ours: Gymnasium, steps: int) -> Any:
    """Play `steps` smallest actions."""
    return ours.step_chunk([0], np.tile(ours.spec.action_low, (1, steps, 1)))


@pytest.mark.parametrize(
    ("space", "length"),
    [
        (spaces.Box(-1, 1, (2, 3)), 6),
        (spaces.Discrete(5), 5),
        (spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(0, 255, (3,), np.uint8)}), 5),
        (spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3)]), 5),
    ],
)
def test_observations_are_flattened(space: Any, length: int) -> None:
    ours = simulator(kwargs={"observation_space": space})
    seen = zeros(ours, 2).observation.proprio
    assert seen is not None and seen.shape == (1, length) == (1, ours.spec.proprio_dim) and seen.dtype == np.float32


@pytest.mark.parametrize("space", [spaces.Box(0, 255, (8, 8), np.uint8), spaces.Sequence(spaces.Discrete(2))])
def test_observations_that_are_neither_numbers_nor_images_are_refused(space: Any) -> None:
    with pytest.raises(UserError, match=r"has observations .*: supported are vectors .* and images"):
        simulator(kwargs={"observation_space": space})
    with pytest.raises(UserError, match=r"has an observation 'a' .*: supported are vectors"):
        simulator(kwargs={"observation_space": spaces.Dict({"a": space})})


IMAGE = spaces.Box(0, 255, (20, 30, 3), np.uint8)
BOTH = spaces.Dict({"side": IMAGE, "pose": spaces.Box(-1, 1, (4,)), "top": IMAGE, "mode": spaces.Discrete(2)})


def test_an_observation_that_is_an_image_is_a_camera() -> None:
    ours = simulator(kwargs={"observation_space": IMAGE}, cameras=["observation"], image_size=[20, 30])
    assert (ours.spec.cameras, ours.spec.image_size, ours.spec.proprio_dim) == (("observation",), (20, 30), 0)
    slot: Any = ours._seats[0].slot
    seen = ours.observe([0])
    assert seen.proprio is None and seen.images is not None and seen.images.shape == (1, 1, 20, 30, 3)
    assert np.array_equal(seen.images[0, 0], slot._observation)


def test_images_of_a_dict_are_cameras_and_the_rest_is_flattened() -> None:
    ours = simulator(kwargs={"observation_space": BOTH}, cameras=["top", "side"], image_size=[16, 16])
    seen, slot = ours.observe([0]), ours._seats[0].slot
    assert isinstance(slot, GymnasiumSlot) and seen.images is not None and seen.proprio is not None
    parts = slot._observation
    for index, name in enumerate(("top", "side")):
        assert np.array_equal(seen.images[0, index], resize(parts[name], 16, 16))
    assert np.array_equal(seen.proprio[0], np.concatenate([np.eye(2)[parts["mode"]], parts["pose"]]).astype(np.float32))


def test_images_of_a_dict_that_no_camera_names_are_left_out() -> None:
    ours = simulator(kwargs={"observation_space": BOTH})
    seen = ours.observe([0])
    assert ours.spec.cameras == () and seen.images is None and seen.proprio is not None and seen.proprio.shape == (1, 6)


def test_an_entry_of_a_dict_is_the_state_of_the_environment() -> None:
    def box(size: int) -> Any:
        return spaces.Box(-1, 1, (size,))

    usual = spaces.Dict({"agent_pos": box(2), "environment_state": box(5), "wrist": box(1)})
    assert simulator(kwargs={"observation_space": usual}).spec.environment_state == (2, 7)
    assert simulator(kwargs={"observation_space": BOTH}).spec.environment_state == (0, 0)
    named = {"kwargs": {"observation_space": BOTH}, "environment_state": "pose"}
    ours = simulator(**named)
    assert ours.spec.environment_state == (2, 6)
    assert INFO.environment_state(GymnasiumConfig(name="gymnasium", tasks=["EmbodyrlProbe-v0"], **named)) == (2, 6)
    with pytest.raises(UserError, match=r"no entry of numbers in .* 'pose'\? \(entries: mode, pose\)"):
        simulator(**named | {"environment_state": "poses"})


@pytest.mark.parametrize(
    ("space", "cameras", "message"),
    [
        (IMAGE, [], r"shows nothing but images: set env.cameras: \[observation\]"),
        (BOTH, ["sid"], r"has no camera 'sid' - did you mean 'side'\? \(cameras: side, top, render\)"),
        (None, ["observation"], r"has no camera 'observation' \(cameras: render\)"),
        (BOTH, ["top", "top"], "names 'top' twice"),
        (BOTH, ["top", "render"], r"env.cameras names 'render', but .* has no render mode 'rgb_array'"),
    ],
)
def test_wrong_cameras(space: Any, cameras: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulator(kwargs={"observation_space": space}, cameras=cameras)


def test_render_is_a_camera() -> None:
    ours = simulator("Pendulum-v1", cameras=["render"], image_size=[60, 90])
    seen = ours.observe([0])
    assert seen.images is not None and seen.proprio is not None and seen.proprio.shape == (1, 3)
    whole = ours.render([0])
    assert whole.shape == (1, 500, 500, 3)
    assert np.array_equal(seen.images[0, 0], resize(whole[0], 60, 90))
    later = zeros(ours, 5).observation.images
    assert later is not None and (later != seen.images).any()


def test_a_mujoco_environment_is_a_camera_without_a_screen() -> None:
    pytest.importorskip("mujoco", reason="mujoco not installed")
    try:
        rendering.context(16, 16).free()
    except NoOpenGLError as error:
        pytest.skip(str(error))
    code = (
        "from embodyrl.envs.gymnasium.simulator import Gymnasium, GymnasiumConfig;"
        "from embodyrl.envs.types import EpisodeSpec;"
        "config = GymnasiumConfig(name='gymnasium', tasks=['Reacher-v5'], cameras=['render'], image_size=[32, 48]);"
        "ours = Gymnasium(config, 1);"
        "seen = ours.reset([0], [EpisodeSpec(task='Reacher-v5', start_state=1, seed=2)]);"
        "print(seen.images.shape, seen.images.std() > 5); ours.close()"
    )
    environment = {name: os.environ[name] for name in os.environ if name not in ("DISPLAY", "MUJOCO_GL")}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert ran.stdout.strip() == "(1, 1, 32, 48, 3) True", ran.stderr


def refusal(space: Any) -> str:
    """Return what is said about an action space."""
    with pytest.raises(UserError) as caught:
        simulator(kwargs={"action_space": space})
    return str(caught.value)


def test_actions_without_bounds_or_of_another_kind_are_refused() -> None:
    largest = [(-np.finfo(kind).max, np.finfo(kind).max, (2,), kind) for kind in (np.float32, np.float64)]
    refused = [
        spaces.Box(-1, math.inf, (2,)),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(-math.inf, math.inf, (1,), np.int64),
        spaces.Box(0, 2**32 - 1, (1,), np.uint32),
        *(spaces.Box(*arguments) for arguments in largest),
        spaces.Box(np.array([-1.0, -1e300]), np.array([1.0, 1.0]), dtype=np.float64),
        spaces.Box(-1, 1, (0,)),
    ]
    said = {str(space): refusal(space) for space in refused}
    assert not {space: text for space, text in said.items() if ": supported are finite Box and Discrete" not in text}
    assert "its number 1 goes from -1e+300 to 1, which is no limit" in said[str(refused[6])]
    assert "from 16777216 to 16777218, but float32" in refusal(spaces.Discrete(3, start=2**24))


def executed(space: Any, actions: list[list[float]]) -> list[Any]:
    """What an environment that refuses what is not in its space is given for actions `[C, D]`."""
    ours = simulator(kwargs={"action_space": space})
    ours.step_chunk([0], np.array([actions], np.float32))
    given = ours._seats[0].slot._env.unwrapped.actions  # type: ignore[union-attr]
    return [np.asarray(each).tolist() for each in given]


def test_actions_arrive_as_elements_of_the_space() -> None:
    ends = [[-9.0], [9.0]]
    cases: list[tuple[Any, list[list[float]], list[Any]]] = [
        # Its own shape and type.
        (spaces.Box(np.array([[-2.0], [0.0]]), np.array([[2.0], [5.0]]), dtype=np.float64), [[9, 3]], [[[2.0], [3.0]]]),
        (spaces.Box(-1, 1, ()), [[0.5]], [0.5]),
        # Bounds that float32 or float16 cannot hold.
        (spaces.Box(-0.1, 0.1, (1,), np.float64), ends, [[-0.1], [0.1]]),
        (spaces.Box(-0.3, 0.3, (1,), np.float16), ends, [[float(np.float16(-0.3))], [float(np.float16(0.3))]]),
        # Whole numbers, rounded.
        (spaces.Box(0, 3, (2,), np.int64), [[-1, 0.4], [0.6, 2.4], [2.6, 9]], [[0, 0], [1, 2], [3, 3]]),
        (spaces.Box(-3, -1, (1,), np.int8), [[-2.6], [-1.4], [-9]], [[-3], [-1], [-3]]),
        (spaces.Box(0, 255, (1,), np.uint8), [[254.6], [0.6]], [[255], [1]]),
        (spaces.Box(0, 1, (1,), np.uint64), ends, [[0], [1]]),
        (spaces.Box(0, 1, (1,), np.bool_), [[0.4], [0.6]], [[False], [True]]),
        # Choices.
        (spaces.Discrete(3, start=4), [[4.0], [5.2], [99.0]], [4, 5, 6]),
        (spaces.Discrete(3, start=-1), [[-9.0], [-0.4], [1.0]], [-1, 0, 1]),
    ]
    assert [executed(space, actions) for space, actions, _ in cases] == [given for *_, given in cases]


PICTURE = spaces.Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("Pendulum-v1", {}),
        ("CartPole-v1", {}),
        ("EmbodyrlProbe-v0", {"kwargs": {"action_space": spaces.Discrete(3, start=4)}}),
        ("EmbodyrlProbe-v0", {"kwargs": {"action_space": spaces.Box(-1, 1, (2, 2))}}),
        ("EmbodyrlProbe-v0", {"kwargs": {"observation_space": PICTURE}, "cameras": ["observation"]}),
    ],
)
def test_a_config_knows_what_an_environment_says_of_itself(task: str, options: dict[str, Any]) -> None:
    spec = simulator(task, **options).spec
    config = GymnasiumConfig(name="gymnasium", tasks=[task], max_episode_steps=6, **options)
    assert (INFO.state_dim(config), INFO.action_dim(config)) == (spec.proprio_dim, spec.action_dim)
    # The probe declares none, and what the simulator assumes instead is no knowledge.
    assert INFO.control_frequency(config) == (None if task == "EmbodyrlProbe-v0" else spec.control_frequency)
    assert INFO.discrete(config) is (spec.actions[0].meaning == "discrete")
    assert families.task_description(task) == spec.tasks[task]


@pytest.mark.parametrize(
    ("task", "options"),
    [("EmbodyrlMissing-v0", {}), ("EmbodyrlProbe-v0", {"kwargs": {"wheels": 4}}), ("Pendulum-v1", {"cameras": ["no"]})],
)
def test_what_cannot_be_made_is_unknown_and_left_to_its_simulator(task: str, options: dict[str, Any]) -> None:
    config = GymnasiumConfig(name="gymnasium", tasks=[task], max_episode_steps=6, **options)
    assert (INFO.state_dim(config), INFO.action_dim(config), INFO.discrete(config)) == (None, None, None)


class OldStep(Probe):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, {}


class OldReset(Probe):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class OldSeed(Probe):
    def reset(self) -> Any:  # type: ignore[override]
        return self.observation_space.sample()


class NoInfo(Probe):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], None)


class Batch(Probe):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), np.zeros(2), False, False, {}


class TwoSuccesses(Probe):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {"success": [True, False]}


class NotAnEnvironment:
    pass


ODD = {
    OldStep: r"returned 4 values \(.*\) from step, as Gym before 0.26 did \(observation, reward, done, info\), want",
    OldReset: r"returned float32 \(2, 3\) from reset, as Gym before 0.26 did, want observation and info \(a dict\)",
    OldSeed: r"has the interface of Gym before 0.26, its reset takes no seed: update it",
    NoInfo: r"returned 5 values \(.*, None\) from step, want observation, reward, terminated, truncated and info",
    Batch: r"returned reward float64 \(2,\), want one number",
    TwoSuccesses: "returned success list, want one number",
    NotAnEnvironment: "is none: The environment must inherit from the gymnasium.Env class",
    None: "'EmbodyrlBatches-v0' is registered with a vector_entry_point alone, as batches - register an entry_point",
}
"""Environments with another interface than Gymnasium's, and what is said of each."""
for _kind in ODD:
    if _kind is not None:
        gymnasium.register(f"Embodyrl{_kind.__name__}-v0", entry_point=_kind)
gymnasium.register("EmbodyrlBatches-v0", vector_entry_point=Probe)


def test_environments_with_another_interface_are_refused_in_a_sentence() -> None:
    missed = {}
    for kind, message in ODD.items():
        with pytest.raises(UserError) as caught:
            zeros(simulator(f"Embodyrl{'Batches' if kind is None else kind.__name__}-v0"), 1)
        if re.search(message, str(caught.value)) is None:
            missed[kind] = str(caught.value)
    assert not missed


class Arrays(Probe):
    def step(self, action: Any) -> Any:
        self.actions.append(action)
        seen, ends = self.observation_space.sample(), np.array([len(self.actions) == 2])
        return seen, np.array([[0.5]]), ends, np.array(False), {"success": np.array([1.0])}


class OwnRandom(Probe):
    """Draws its rewards from a generator of its own, under the name that Gymnasium uses, too."""

    generator: Any = np.random.RandomState(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.np_random = self.generator
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), float(self.np_random.random_sample()), False, False, {}


class ReadOnlyRandom(Probe):
    @property
    def np_random(self) -> Any:
        return np.random.default_rng(3)


for _kind in (Arrays, OwnRandom, ReadOnlyRandom):
    gymnasium.register(f"Embodyrl{_kind.__name__}-v0", entry_point=_kind)


def test_arrays_of_one_are_numbers() -> None:
    result = zeros(simulator("EmbodyrlArrays-v0"), 3)
    assert (result.rewards.tolist(), result.steps.tolist()) == ([[0.5, 0.5, 0.0]], [2])
    assert result.success[0].tolist() == [True, True, False] and result.terminated[0]


def test_a_generator_of_its_own_stays_and_is_seeded_by_the_episode() -> None:
    ours = simulator("EmbodyrlOwnRandom-v0")
    first = zeros(ours, 3).rewards
    ours.reset([0], [EpisodeSpec(task="EmbodyrlOwnRandom-v0", start_state=1, seed=2)])
    assert np.array_equal(zeros(ours, 3).rewards, first)
    assert zeros(simulator("EmbodyrlReadOnlyRandom-v0"), 1).steps.tolist() == [1]


def test_the_time_limit_is_the_runs_and_not_the_registered_one() -> None:
    result = zeros(simulator(), 10)
    assert result.steps[0] == 6 and result.truncated[0]


def test_success_is_what_the_environment_says() -> None:
    assert zeros(simulator(), 6).success[0].tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize(("threshold", "success"), [(-6.0, True), (-5.9, False), (-1.5, False)])
def test_success_by_return_is_judged_at_the_end(threshold: float, success: bool) -> None:
    result = zeros(simulator(success_return=threshold), 6)
    assert result.success[0].tolist() == [False] * 5 + [success]


def test_nan_reward_is_refused() -> None:
    with pytest.raises(NotFiniteError, match=r"slot 0, step 1 .*reward is nan"):
        zeros(simulator(kwargs={"reward": math.nan}), 2)


def test_without_an_image_mode_rendering_says_so() -> None:
    with pytest.raises(RenderError, match=r"has no render mode 'rgb_array'|cannot render"):
        simulator().render([0])


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("Pendulum-v9", UnknownNameError, r"gymnasium has no task 'Pendulum-v9' - did you mean 'Pendulum-v1'\?"),
        ("my_module:Mine-v0", UserError, "list my_module under plugins: and name only 'Mine-v0'"),
    ],
)
def test_unknown_tasks(task: str, error: type[Exception], message: str) -> None:
    assert "Pendulum-v1" in known_tasks()
    with pytest.raises(error, match=message):
        simulator(task)


def test_a_package_that_cannot_be_imported_is_a_fault_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("gym_pusht", "pymunk"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libfoo.so.3: no such file')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    settings = ["env=pusht/state", "model=mlp", "algorithm=ppo"]
    with pytest.raises(ConfigError, match=r"'pusht' is there and cannot be imported: libfoo.*install it again: make "):
        load_config(None, settings, use=ConfigUse.run)


def test_wrong_kwargs_name_the_setting() -> None:
    with pytest.raises(UserError, match=r"env.kwargs .*wheels.* do not fit"):
        simulator(kwargs={"wheels": 4})


def test_tasks_of_different_shapes_are_refused() -> None:
    config = GymnasiumConfig(name="gymnasium", tasks=["Pendulum-v1", "CartPole-v1"], max_episode_steps=5)
    ours = Gymnasium(config, 1)
    with pytest.raises(UserError, match="mixes environments of different shapes: 'CartPole-v1' has 4"):
        ours.reset([0], [EpisodeSpec(task="CartPole-v1", start_state=0, seed=0)])


def test_physics_that_become_unstable_end_the_episode_and_not_the_run() -> None:
    pytest.importorskip("dm_control", reason="dm_control not installed")
    task = "pendulum-swingup"
    ours = Gymnasium(GymnasiumConfig(name="dm_control", tasks=[task], max_episode_steps=6), 1)
    ours.reset([0], [EpisodeSpec(task=task, start_state=1, seed=2)])
    before = zeros(ours, 1).observation.proprio
    slot: Any = ours._seats[0].slot
    slot._env.data.qvel[:] = 1e20
    result = zeros(ours, 3)
    assert result.steps.tolist() == [1] and result.terminated[0] and not result.success.any()
    assert result.rewards.tolist() == [[0.0, 0.0, 0.0]]
    assert before is not None and np.array_equal(result.observation.proprio, before)
    state = ours.get_state([0])
    ours.reset([0], [EpisodeSpec(task=task, start_state=1, seed=2)])
    assert np.array_equal(zeros(ours, 1).observation.proprio, before)
    assert not ours.set_state([0], state)
