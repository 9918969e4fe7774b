"""What is drawn for a kind and a level: sizes grow, directions stay, and everything follows from the episode's seed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from embodyrl.config.schema import KINDS, MOST_LEVEL
from embodyrl.envs.perturb import kinds, noise
from embodyrl.envs.perturb.kinds import CameraChange, LightChange, TextureChange, checked, generator, packed, unpacked
from embodyrl.envs.types import EpisodeSpec

LEVELS = range(1, MOST_LEVEL + 1)
TABLES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (kinds, noise)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, tuple) and len(value) == MOST_LEVEL and isinstance(value[0], int | float)
}


def test_every_table_of_sizes_grows_with_the_level() -> None:
    assert len(TABLES) >= 18
    for name, sizes in TABLES.items():
        assert all(one <= other for one, other in itertools.pairwise(sizes)) and sizes[0] < sizes[-1], name


def test_a_number_holds_every_combination_of_kinds_and_levels() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        levels = random.integers(0, MOST_LEVEL + 1, len(KINDS)).tolist()
        perturb = tuple((kind, level) for kind, level in zip(KINDS, levels, strict=True) if level)
        assert unpacked(packed(perturb)) == perturb and packed(perturb) < 2**63
    assert packed(()) == 0 and unpacked(0) == ()


@pytest.mark.parametrize("wrong", [(("colour", 1),), (("noise", 6),), (("noise", 0),), (("noise", 1), ("noise", 2))])
def test_an_episode_refuses_what_is_no_perturbation(wrong: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"want kinds of camera, .*, each once, with a level 1 \.\. 5"):
        EpisodeSpec(task="count", start_state=0, seed=0, perturb=wrong)
    assert checked([("words", 1), ("camera", 2)]) == (("camera", 2), ("words", 1)), "in one order"


def test_an_episode_without_perturbation_is_described_as_before_there_were_any() -> None:
    plain = EpisodeSpec(task="count", start_state=3, seed=5, group=1)
    assert plain.to_plain() == {"task": "count", "start_state": 3, "seed": 5, "group": 1}
    both = EpisodeSpec(task="count", start_state=3, seed=5, perturb=(("noise", 1), ("camera", 2)))
    assert EpisodeSpec.from_plain({**both.to_plain(), "steps": 3}) == both


def test_a_camera_goes_further_in_the_same_direction() -> None:
    drawn = [CameraChange.draw(level, generator(7, "camera")) for level in LEVELS]
    for low, high in itertools.pairwise(drawn):
        assert math.hypot(*low.around) < math.hypot(*high.around)
        assert np.allclose(
            np.divide(low.around, math.hypot(*low.around)), np.divide(high.around, math.hypot(*high.around))
        )
        assert abs(low.distance - 1) < abs(high.distance - 1) and abs(low.roll) < abs(high.roll)
        assert (low.distance < 1) == (high.distance < 1)
    other = CameraChange.draw(3, generator(8, "camera"))
    assert other.around != drawn[2].around and drawn[2] == CameraChange.draw(3, generator(7, "camera"))


def test_light_and_surfaces_differ_more_with_the_level() -> None:
    lights = [LightChange.draw(level, generator(7, "light")) for level in LEVELS]
    assert all(np.linalg.norm(a.rotation) < np.linalg.norm(b.rotation) for a, b in itertools.pairwise(lights))
    surfaces = [TextureChange.draw(level, generator(7, "texture"), 40, np.arange(3)) for level in LEVELS]
    replaced = [int((each.others >= 0).sum()) for each in surfaces]
    assert replaced == sorted(replaced) and replaced[0] == 0 and replaced[-1] == 40
    assert all(np.array_equal(each.colours, surfaces[0].colours) for each in surfaces)
    none = TextureChange.draw(5, generator(7, "texture"), 4, np.zeros(0, np.int64))
    assert (none.others == -1).all(), "a scene without textures"


def test_start_states_stay_within_their_bounds() -> None:
    low, high, random = np.array([0.0, -1.0]), np.array([1.0, 1.0]), np.random.default_rng(3)
    start = random.uniform(low, high)
    moved = [kinds.towards_edge(level, generator(4, "layout"), start, low, high) for level in LEVELS]
    assert all((low <= each).all() and (each <= high).all() for each in moved)
    distances = [float(np.linalg.norm(each - start)) for each in moved]
    assert distances == sorted(distances) and distances[0] > 0
