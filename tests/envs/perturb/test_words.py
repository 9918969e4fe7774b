"""Paraphrases: all simulators' task descriptions have them, none repeats, and numbers stand for them in memory."""

from __future__ import annotations

import pytest

from embodyrl.config.schema import MOST_LEVEL
from embodyrl.envs.gymnasium.families import FAMILIES
from embodyrl.envs.manager.memory import TaskDescriptions
from embodyrl.envs.metaworld.tasks import TASKS
from embodyrl.envs.perturb.words import (
    PER_DESCRIPTION,
    VARIANTS,
    described,
    has_paraphrases,
    paraphrases,
    with_paraphrases,
)
from embodyrl.errors import UserError

OWN = [*TASKS.values(), *(text for family in FAMILIES.values() for text in family.descriptions.values())]


@pytest.mark.parametrize("text", sorted(set(OWN)))
def test_every_description_has_as_many_different_paraphrases(text: str) -> None:
    found = paraphrases(text)
    assert has_paraphrases(text) and len(found) == PER_DESCRIPTION
    assert len({*found, text}) == PER_DESCRIPTION + 1, "each once, and none is the description itself"


def test_those_of_libero_have_paraphrases() -> None:
    tasks = pytest.importorskip("embodyrl.envs.libero.tasks")
    try:
        names = tasks.known_tasks()
    except UserError:
        pytest.skip("libero is not installed")
    without = [name for name in names if not has_paraphrases(tasks.task_description(name))]
    assert not without


def test_higher_levels_have_more_words_of_their_own() -> None:
    own = {}
    for level in range(1, MOST_LEVEL + 1):
        new = [
            len(set(text.lower().replace(",", "").split()) - set(base.split()))
            for base in sorted(set(TASKS.values()))
            for text in paraphrases(base)[VARIANTS * (level - 1) : VARIANTS * level]
        ]
        own[level] = sum(new) / len(new)
    assert own[1] < own[3] < own[5] and own[2] < own[4] < own[5], own


def test_an_episode_shows_one_of_its_level_and_always_the_same() -> None:
    text = "push the puck to the goal"
    shown = {described(text, seed, (("words", 3),)) for seed in range(40)}
    assert shown == set(paraphrases(text)[2 * VARIANTS : 3 * VARIANTS])
    assert described(text, 4, (("words", 3),)) == described(text, 4, (("noise", 1), ("words", 3)))
    assert described(text, 4, (("noise", 1),)) == text


def test_what_begins_with_no_verb_has_none() -> None:
    for text in ("control CartPole", "", "pushing is hard", "the red cube"):
        assert not has_paraphrases(text) and set(paraphrases(text)) == {text}


def test_numbers_of_texts_are_the_same_on_both_sides_of_shared_memory() -> None:
    simulators, mine = ["press the button", "close the door"], ["Press it.", "close that door"]
    worker, parent = TaskDescriptions(simulators), TaskDescriptions(mine)
    assert worker.numbers(["close the door"]) == [1] and parent.texts([1]) == ["close that door"]
    number = 2 + PER_DESCRIPTION + 5
    assert worker.numbers([with_paraphrases(simulators)[number]]) == [number]
    assert parent.texts([number, 0]) == [paraphrases("close that door")[5], "Press it."]
    with pytest.raises(KeyError):
        worker.numbers(["open the door"])
