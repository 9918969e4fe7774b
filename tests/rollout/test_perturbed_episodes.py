"""Which episodes are perturbed, and by how much: a share of them, the same for a group, and more from iteration to
iteration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from embodyrl.config.schema import EnvConfig, PerturbationLevels, TrainingPerturbations
from embodyrl.rollout.episodes import EpisodeSource, evaluation_episodes

SETTINGS = TrainingPerturbations(camera=[2], light=[1, 4], share=0.5)


def source(perturb: TrainingPerturbations | None, **options: int) -> EpisodeSource:
    """Episodes of two tasks."""
    env = EnvConfig(name="any", tasks=["a", "b"], start_states=50, perturb=perturb)
    return EpisodeSource(env.sources, **{"group_size": 1, "seed": 3, **options})


def test_what_is_played_is_the_same_with_and_without() -> None:
    plain, perturbed = source(None), source(SETTINGS)
    for slot in range(4):
        for number in range(20):
            one, other = plain.episode(slot, number), perturbed.episode(slot, number)
            assert one == replace(other, perturb=()) and not one.perturb


def test_a_share_of_the_episodes_has_all_kinds_at_levels_of_their_range() -> None:
    drawn = [source(SETTINGS).episode(slot, number).perturb for slot in range(20) for number in range(20)]
    assert 0.4 < sum(map(bool, drawn)) / len(drawn) < 0.6
    levels = Counter(each for each in drawn if each)
    assert set(levels) == {(("camera", 2), ("light", level)) for level in (1, 2, 3, 4)}
    assert min(levels.values()) > 20, "all of the range are drawn"


def test_members_of_a_group_share_theirs_whoever_plays_them() -> None:
    whole = source(SETTINGS, group_size=4)
    for number in range(10):
        assert len({whole.episode(slot, number) for slot in range(4)}) == 1
    second = source(SETTINGS, group_size=4, first_slot=4)
    assert [second.episode(0, number) for number in range(10)] == [whole.episode(4, number) for number in range(10)]


def test_levels_grow_to_those_that_are_named() -> None:
    grown = source(replace(SETTINGS, camera=[5], light=[], share=1.0, ramp=8))
    levels = []
    for iteration in range(12):
        grown.begin(iteration)
        [(_, level)] = grown.episode(0, 4).perturb
        levels.append(level)
    assert levels == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5]
    assert grown.episode(1, 4).perturb == (("camera", 5),)
    without = source(replace(SETTINGS, camera=[5], light=[], share=1.0))
    assert without.episode(0, 4).perturb == (("camera", 5),)


def test_an_episode_that_is_asked_for_again_is_the_same_object() -> None:
    """Memory that is shared with simulators is written only where an episode changes."""
    same = source(SETTINGS)
    first = same.episode(0, 1)
    same.begin(7)
    assert same.episode(0, 1) is first


@pytest.mark.parametrize("perturb", [None, PerturbationLevels(noise=[3]), PerturbationLevels(noise=[1, 5], words=[2])])
def test_every_evaluation_episode_is_perturbed_or_none(perturb: PerturbationLevels | None) -> None:
    asked = {"sources": EnvConfig(name="any", tasks=["a"]).sources, "first_start_state": 100, "count": 40, "seed": 3}
    plain, found = evaluation_episodes(**asked), evaluation_episodes(**asked, perturb=perturb)
    assert [replace(each, perturb=()) for each in found] == plain
    kinds = {tuple(kind for kind, _ in each.perturb) for each in found}
    assert kinds == {() if perturb is None else tuple(perturb.ranges)}
    assert found == evaluation_episodes(**asked, perturb=perturb)
    if perturb is not None and perturb.words:
        assert {dict(each.perturb)["noise"] for each in found} == {1, 2, 3, 4, 5}
