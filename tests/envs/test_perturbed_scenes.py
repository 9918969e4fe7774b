"""Perturbations of MuJoCo scenes: what is only seen leaves the physics bit for bit as it is, images differ, and saved
episodes look the same wherever they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import libero_files
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("mujoco", reason="mujoco not installed")

from embodyrl.envs.base import SlotSimulator
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.options import Driver, GymnasiumConfig, LiberoConfig, MetaWorldConfig, RenderQuality
from embodyrl.envs.states import unpack
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UserError

SEEN = ("camera", "light", "texture", "noise", "words")
"""Kinds that are only seen or read."""
SMALL: dict[str, Any] = {"image_size": [48, 48], "num_envs": 1, "render_quality": RenderQuality.fast}


def metaworld(**options: Any) -> SlotSimulator:
    pytest.importorskip("metaworld", reason="metaworld not installed")
    from embodyrl.envs.metaworld.simulator import MetaWorld

    wanted = {"name": "metaworld", "tasks": ["push-v3"], "cameras": ["corner2", "gripperPOV"], **SMALL, **options}
    return MetaWorld(MetaWorldConfig(**wanted), 1)


def gymnasium(name: str, task: str, camera: str) -> SlotSimulator:
    from embodyrl.envs.gymnasium.families import FAMILIES
    from embodyrl.envs.gymnasium.simulator import Gymnasium

    if not all(each.is_met() for each in FAMILIES[name].requires):
        pytest.skip(f"{name} is not installed")
    wanted = {"name": name, "tasks": [task], "cameras": [camera], "max_episode_steps": 100, **SMALL}
    return Gymnasium(GymnasiumConfig(**wanted), 1)


def libero() -> SlotSimulator:
    if libero_files.place() is None:
        pytest.skip("LIBERO's assets are not there: make libero")
    pytest.importorskip("libero", reason="libero not installed")
    from embodyrl.envs.libero.simulator import Libero

    return Libero(LiberoConfig(name="libero", tasks=["libero_object/0"], cameras=["agentview", "wrist"], **SMALL), 1)


MADE: dict[str, Callable[[], SlotSimulator]] = {
    "metaworld": metaworld,
    "mujoco": lambda: gymnasium("mujoco", "HalfCheetah-v5", "track"),
    "robotics": lambda: gymnasium("robotics", "FetchPush-v4", "external_camera_0"),
    "dm_control": lambda: gymnasium("dm_control", "walker-walk", "side"),
    "aloha": lambda: gymnasium("aloha", "gym_aloha/AlohaTransferCube-v0", "angle"),
    "robosuite": lambda: gymnasium("robosuite", "Lift", "agentview"),
    "libero": libero,
}


@pytest.fixture(scope="module", params=MADE)
def simulator(request: pytest.FixtureRequest) -> Iterator[SlotSimulator]:
    """A simulator with cameras."""
    try:
        rendering.context(8, 8).free()
    except rendering.NoOpenGLError as error:
        pytest.skip(str(error))
    built = MADE[request.param]()
    yield built
    built.close()


def episode(simulator: SlotSimulator, *perturb: tuple[str, int], seed: int = 11) -> EpisodeSpec:
    """An episode of the only task."""
    return EpisodeSpec(task=next(iter(simulator.spec.tasks)), start_state=3, seed=seed, perturb=perturb)


def actions(simulator: SlotSimulator, steps: int) -> NDArray[np.float32]:
    """Random actions `[1, steps, D]`."""
    spec = simulator.spec
    return np.random.default_rng(5).uniform(spec.action_low, spec.action_high, (1, steps, spec.action_dim)).astype("f4")


def played(simulator: SlotSimulator, *perturb: tuple[str, int]) -> tuple[list[bytes], list[Any]]:
    """Play five steps; returns all that is physics, bit for bit, and what was seen before and after them."""
    seen = [simulator.reset([0], [episode(simulator, *perturb)])]
    numbers: list[bytes] = []
    for action in actions(simulator, 5).swapaxes(0, 1):
        result = simulator.step_chunk([0], action[:, None])
        numbers += [result.rewards.tobytes(), result.success.tobytes(), result.terminated.tobytes()]
        seen.append(result.observation)
    numbers += [each.proprio.tobytes() for each in seen if each.proprio is not None]
    _, arrays = unpack(simulator.get_state([0])[0])
    numbers += [array.tobytes() for name, array in sorted(arrays.items()) if not name.startswith("changes.")]
    return numbers, seen


def test_what_is_seen_or_read_leaves_the_physics_bit_for_bit(simulator: SlotSimulator) -> None:
    """Nothing that decides the rest of an episode differs, and nothing is left of a perturbation afterwards."""
    plain, shown = played(simulator)
    together, changed = played(simulator, *((kind, 5) for kind in SEEN))
    assert together == plain and len(plain) > 20
    assert changed[0].task_descriptions != shown[0].task_descriptions
    for before, after in zip(shown, changed, strict=True):
        assert not np.array_equal(before.images, after.images)
    again, as_before = played(simulator)
    assert again == plain
    assert all(np.array_equal(one.images, other.images) for one, other in zip(shown, as_before, strict=True))


@pytest.mark.parametrize("kind", ["camera", "light", "texture", "layout"])
def test_each_kind_is_seen_and_the_same_every_time(simulator: SlotSimulator, kind: str) -> None:
    plain = simulator.reset([0], [episode(simulator)]).images
    shown = {level: simulator.reset([0], [episode(simulator, (kind, level))]).images for level in (1, 5)}
    assert not np.array_equal(plain, shown[5]) and not np.array_equal(shown[1], shown[5])
    assert np.array_equal(shown[5], simulator.reset([0], [episode(simulator, (kind, 5))]).images)
    other = simulator.reset([0], [episode(simulator, (kind, 5), seed=12)]).images
    assert not np.array_equal(other, shown[5])
    away = {level: np.abs(images.astype(int) - plain).mean() for level, images in shown.items()}
    assert away[1] < away[5] or kind == "layout", "layouts may hide what stood out"


def test_a_saved_episode_looks_the_same_where_it_goes_on(simulator: SlotSimulator) -> None:
    simulator.reset([0], [episode(simulator)])  # makes the slot
    kinds = [(kind, 4) for kind in ("camera", "light", "texture", "layout", "noise", "words")]
    robot = [("robot", 3)] if "robot" in simulator._seats[0].slot.perturbs else []
    simulator.reset([0], [episode(simulator, *kinds, *robot)])
    simulator.step_chunk([0], actions(simulator, 4))
    state, before = simulator.get_state([0]), simulator.observe([0])
    expected = simulator.step_chunk([0], actions(simulator, 3))
    simulator.reset([0], [episode(simulator)])  # something else in between
    assert simulator.set_state([0], state) == []
    now = simulator.observe([0])
    assert np.array_equal(now.images, before.images) and now.task_descriptions == before.task_descriptions
    result = simulator.step_chunk([0], actions(simulator, 3))
    assert np.array_equal(result.observation.images, expected.observation.images)
    assert np.array_equal(result.rewards, expected.rewards)


def _saved(simulator: SlotSimulator) -> set[str]:
    """Return the names of what is saved of an episode, but for its perturbations."""
    return {name for name in unpack(simulator.get_state([0])[0])[1] if not name.startswith("changes.")}


def test_robots_and_objects_begin_elsewhere_the_same_way(simulator: SlotSimulator) -> None:
    plain = simulator.reset([0], [episode(simulator)]).proprio
    saved = _saved(simulator)
    for kind in ("robot", "layout"):
        can = kind in simulator._seats[0].slot.perturbs
        if kind == "robot" and not can:
            with pytest.raises(UserError, match=r"cannot be perturbed by 'robot' here \(possible: .*camera"):
                simulator.reset([0], [episode(simulator, (kind, 3))])
            continue
        begun = [simulator.reset([0], [episode(simulator, (kind, level))]).proprio for level in (1, 5, 5)]
        assert np.array_equal(begun[1], begun[2])
        assert _saved(simulator) == saved, "a state has the same parts, by which `embodyrl verify` compares it"
        if kind == "robot":
            assert 0 < np.abs(begun[0] - plain).max() <= np.abs(begun[1] - plain).max()
    assert np.array_equal(simulator.reset([0], [episode(simulator)]).proprio, plain), "nothing is left of it"


def test_metaworld_moves_objects_towards_the_edge_of_what_the_task_allows() -> None:
    ours = metaworld(cameras=[])
    slot = ours._idle["push-v3"][0]
    plain = ours.reset([0], [episode(ours)]).proprio
    low, high = slot._env._random_reset_space.low, slot._env._random_reset_space.high
    for level in (1, 5):
        moved = ours.reset([0], [episode(ours, ("layout", level))]).proprio
        assert not np.array_equal(moved, plain)
        layout = slot._env._last_rand_vec
        assert (low <= layout).all() and (layout <= high).all()
    ours.close()


def test_metaworld_s_own_interface_refuses_to_place_things() -> None:
    ours = metaworld(driver=Driver.upstream, cameras=["corner2"])
    before = ours.reset([0], [episode(ours)])
    shown = ours.reset([0], [episode(ours, ("camera", 3), ("light", 3))])
    assert np.array_equal(before.proprio, shown.proprio) and not np.array_equal(before.images, shown.images)
    with pytest.raises(UserError, match="cannot be perturbed by 'layout' here"):
        ours.reset([0], [episode(ours, ("layout", 1))])
    ours.close()
