from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.rewards import (
    NOISE,
    SIIRL_RADIUS,
    dbscan,
    dense,
    difference,
    progress_scores,
    random_projection,
    srpo,
    success,
    success_centres,
)
from embodyrl.config.schema import Compat

SUCCESS = torch.tensor([[[False, False], [True, True], [False, False]], [[False, True], [True, False], [False, False]]])
"""K = 2 decisions of C = 2 actions: slot 0 solves its task with the last action, slot 1 at once, slot 2 never."""
EXECUTED = torch.tensor([[[True, True], [True, True], [True, True]], [[True, True], [True, True], [True, False]]])


def test_dense_is_what_the_simulator_gave() -> None:
    rewards = torch.rand(2, 3, 2)
    assert torch.equal(dense(rewards=rewards), rewards)


def test_success_pays_the_first_action_that_solves_the_task() -> None:
    paid = success(success=SUCCESS, executed=EXECUTED)
    assert paid.nonzero().tolist() == [[0, 1, 0], [1, 0, 1]] and paid.sum() == 2


def test_success_after_the_end_of_an_episode_is_not_paid() -> None:
    late = torch.zeros(2, 3, 2, dtype=torch.bool)
    late[1, 2, 1] = True  # this action was not executed
    assert success(success=late, executed=EXECUTED).sum() == 0


def test_difference_adds_up_to_the_last_reward() -> None:
    rewards = torch.zeros(2, 3, 2)
    rewards[:, 0] = torch.tensor([[0.25, 0.5], [0.25, 1.0]])
    rewards[:, 2] = torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    gained = difference(rewards=rewards, executed=EXECUTED)
    assert gained[:, 0].tolist() == [[0.25, 0.25], [-0.25, 0.75]]
    assert gained[:, 2].tolist() == [[1.0, 1.0], [2.0, 0.0]]  # nothing for the action that was not executed


def test_episodes_with_the_same_last_reward_gained_the_same() -> None:
    rewards = torch.rand(100, 8, 2, generator=torch.Generator().manual_seed(0))
    rewards[-1, :, -1] = 0.7
    gained = difference(rewards=rewards, executed=torch.ones(100, 8, 2, dtype=torch.bool))
    assert gained.sum((0, 2)).float().unique().tolist() == [torch.tensor(0.7).item()]


def test_srpo_agrees_with_siirl(goldens: dict) -> None:
    case = goldens["other"]["siirl_srpo"]
    tasks = torch.tensor([int(name.split("_trial")[0].endswith("task_1")) for name in case["task"]])
    scores = progress_scores(
        torch.tensor(case["embeddings"]),
        torch.tensor(case["complete"]),
        tasks,
        scale=0.6,
        steepness=10.0,
        compat=Compat.siirl,
    )
    torch.testing.assert_close(scores, torch.tensor(case["scores"]), atol=1e-6, rtol=0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_srpo_by_hand() -> None:
    # One success at 0, failures at distances 1, 3 and 2 -> 0, 1 and 0.5 of the range: 0.6 * sigmoid(5, -5, 0).
    # The second task has no success to compare with, the third no failure, and the last episode was lost.
    embeddings = torch.tensor([[0.0, 1.0], [1.0, 1.0], [-3.0, 1.0], [0.0, 3.0], [5.0, 5.0], [6.0, 5.0], [0.0, 0.0]])
    solved = torch.tensor([True, False, False, False, False, True, True])
    task = torch.tensor([0, 0, 0, 0, 1, 2, 0])
    scores = progress_scores(embeddings, solved, task, scale=0.6, steepness=10.0, compat=Compat.none)
    expected = [1, 0.6 * sigmoid(5), 0.6 * sigmoid(-5), 0.3, 0, 1, 0]
    torch.testing.assert_close(scores, torch.tensor(expected))


def test_failures_that_are_all_equally_far_get_the_middle() -> None:
    embeddings = torch.tensor([[1.0], [2.0], [2.0]])
    scores = progress_scores(
        embeddings,
        torch.tensor([True, False, False]),
        torch.zeros(3, dtype=torch.long),
        scale=0.6,
        steepness=10.0,
        compat=Compat.none,
    )
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.3, 0.3]))


@pytest.mark.parametrize("size", range(2, 33))
def test_failures_on_both_sides_of_equal_successes_are_equally_far(size: int) -> None:
    for constant in (717.3, 900.1, 555.55):
        successes = torch.full((size, 3), constant)
        failures = torch.stack([successes[0] + 32.0, successes[0] - 32.0])  # exact in float32
        scores = progress_scores(
            torch.cat([successes, failures]),
            torch.arange(size + 2) < size,
            torch.zeros(size + 2, dtype=torch.long),
            scale=0.6,
            steepness=10.0,
            compat=Compat.none,
        )
        torch.testing.assert_close(scores, torch.tensor([1.0] * size + [0.3, 0.3]))
        assert torch.equal(success_centres(successes, Compat.none), successes[:1])


def test_srpo_is_paid_with_the_last_action_of_an_episode() -> None:
    embeddings = torch.tensor([[1.0], [2.0], [5.0]])
    paid = srpo(
        success=SUCCESS,
        executed=EXECUTED,
        task_index=torch.zeros(2, 3, dtype=torch.long),
        embeddings=embeddings,
        scale=0.6,
        steepness=10.0,
        compat=Compat.none,
    )
    assert paid.nonzero().tolist() == [[1, 0, 1], [1, 1, 1], [1, 2, 0]]
    assert paid[1, 2, 0] == pytest.approx(0.3)


def kinds_of_success(dim: int, compat: Compat) -> Tensor:
    """Centres found among four successes of each of two very different kinds."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(2, dim, generator=generator)
    return success_centres(centres.repeat_interleave(4, 0) + 0.1 * torch.randn(8, dim, generator=generator), compat)


def test_siirls_clustering_finds_nothing_in_many_dimensions_and_ours_does(goldens: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    tight = torch.randn(1408, generator=generator) + 1e-3 * torch.randn(8, 1408, generator=generator)
    scaled = (tight - tight.mean(0)) / tight.std(0, unbiased=False)
    labels = goldens["other"]["siirl_dbscan_1408d"]["tight_cluster_sigma1e_3"]
    assert dbscan(scaled, SIIRL_RADIUS).tolist() == labels == [NOISE] * 8
    assert len(kinds_of_success(1408, Compat.siirl)) == 1
    for dim in (2, 64, 1408):
        assert len(kinds_of_success(dim, Compat.none)) == 2


def test_one_kind_of_success_has_the_mean_as_its_centre() -> None:
    generator = torch.Generator().manual_seed(0)
    successes = torch.randn(8, 256, generator=generator)
    torch.testing.assert_close(success_centres(successes, Compat.none), successes.mean(0, keepdim=True))
    torch.testing.assert_close(success_centres(successes[:1], Compat.none), successes[:1])


def test_dbscan_by_hand() -> None:
    # 0 - 1 - 2 is a chain, 5 - 5.5 a pair, 9 is alone.
    points = torch.tensor([[0.0], [5.0], [1.0], [9.0], [2.0], [5.5]])
    assert dbscan(points, 1.0).tolist() == [0, 1, 0, NOISE, 0, 1]
    assert dbscan(points, 0.4).tolist() == [NOISE] * 6


def test_the_projection_is_the_same_in_every_run_and_keeps_distances() -> None:
    generator = torch.Generator().manual_seed(1)
    episodes = torch.randn(3, 16, 39, generator=generator)
    first = [random_projection(None, episode, dim=512) for episode in episodes]
    assert torch.equal(first[0], random_projection(None, episodes[0], dim=512))
    for one, other in ((0, 1), (1, 2)):
        true = float((episodes[one] - episodes[other]).norm()) / (16 * 39) ** 0.5
        projected = float((first[one] - first[other]).norm()) / 512**0.5
        assert projected == pytest.approx(true, rel=0.15)


def test_images_are_part_of_the_embedding() -> None:
    black, white = torch.zeros(4, 2, 32, 32, 3, dtype=torch.uint8), torch.full((4, 2, 32, 32, 3), 255).byte()
    proprio = torch.ones(4, 5)
    assert random_projection(black, None, dim=8).abs().sum() == 0
    assert not torch.equal(random_projection(black, proprio, dim=8), random_projection(white, proprio, dim=8))
