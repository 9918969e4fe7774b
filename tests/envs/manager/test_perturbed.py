"""Perturbed episodes in simulator processes: the same with any number of processes, here or behind a line, and after
the processes were ended in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import strangers

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.perturb.words import paraphrases
from embodyrl.envs.types import EpisodeSpec, Observation
from embodyrl.errors import UserError

SEEN = (("noise", 4), ("words", 3))
OWN = "push the point to the middle"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folder of a plug-in with images and task descriptions, of which simulator processes know nothing else."""
    folder = tmp_path_factory.mktemp("planes")
    sources, names = Path(__file__).parents[2] / "evaluation", ("verified", "verified_model")
    with strangers.copied(sources, names, folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import verified  # noqa: F401  (registers it here)

        yield str(folder)


def start(plugins: str, workers: int, **options: object) -> EnvManager:
    config = EnvConfig(
        name="planes",
        tasks=["middle"],
        num_envs=4,
        workers=workers,
        cameras=["top"],
        image_size=[16, 16],
        max_episode_steps=8,
        start_method="fork",
        **options,
    )
    return EnvManager(config, chunk_size=2, plugins=["verified"], plugin_path=plugins)


def episodes(first: int = 0) -> list[EpisodeSpec]:
    """One of each: perturbed and not."""
    return [
        EpisodeSpec(task="middle", start_state=first + slot, seed=first + slot, perturb=SEEN if slot % 2 else ())
        for slot in range(4)
    ]


def played(manager: EnvManager, *, offload: bool = False) -> list[Observation]:
    """Play episodes to their ends and into the next ones; returns copies of what was seen."""
    slots, actions = range(4), np.full((4, 2, 2), 0.5, np.float32)
    seen = [manager.reset(slots, episodes()).take(np.arange(4))]
    following = episodes(first=10)
    for _ in range(6):
        if offload:
            manager.offload()
        result = manager.step(slots, actions, following)
        seen += [each.take(np.arange(4)) for each in (result.observation, result.final_observation)]
    return seen


def same(one: list[Observation], other: list[Observation]) -> bool:
    return all(
        np.array_equal(a.images, b.images) and a.task_descriptions == b.task_descriptions
        for a, b in zip(one, other, strict=True)
    )


def test_processes_and_their_ends_change_nothing(plugins: str) -> None:
    with start(plugins, 1) as alone:
        seen = played(alone)
    assert seen[0].task_descriptions[::2] == [OWN, OWN]
    assert all(text in paraphrases(OWN)[8:12] for text in seen[0].task_descriptions[1::2])
    grey = (seen[0].images == 20).mean(axis=(1, 2, 3, 4))
    assert (grey[::2] > 0.9).all() and not np.array_equal(seen[0].images[1], seen[0].images[0])
    with start(plugins, 2) as two:
        assert same(played(two), seen)
        assert same(played(two, offload=True), seen), "states hold the perturbation"


def test_descriptions_of_the_run_s_own_are_paraphrased(plugins: str) -> None:
    mine = "Move the dot to the centre."
    with start(plugins, 1, task_descriptions={"middle": mine}) as manager:
        shown = manager.reset(range(4), episodes()).task_descriptions
    assert shown[0] == mine and shown[1] in paraphrases(mine)[8:12]


def test_what_a_simulator_cannot_do_is_said_with_what_it_can(plugins: str) -> None:
    with start(plugins, 1) as manager:
        wrong = [EpisodeSpec(task="middle", start_state=0, seed=0, perturb=(("camera", 1),))] * 4
        with pytest.raises(
            Exception, match=r"cannot be perturbed by 'camera' here \(possible: noise, words\)"
        ) as found:
            manager.reset(range(4), wrong)
    assert getattr(found.value, "is_user_error", False) or isinstance(found.value, UserError)
