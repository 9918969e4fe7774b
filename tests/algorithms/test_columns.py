from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from embodyrl.algorithms.columns import (
    Bound,
    LevelError,
    SignatureError,
    chunk_rewards,
    executed_actions,
    expand_to_level,
    in_chunks,
    in_time,
    logprobs_at_level,
    require_same_shape,
    valid_at,
)
from embodyrl.config.schema import Level, LossConfig

ENTRIES = torch.arange(1.0, 13.0).view(2, 6)
"""Two chunks of C = 3 actions with D = 2 entries."""
EXECUTED = torch.tensor([[True, True, True], [True, False, False]])


def test_entries_are_summed_up_to_their_level() -> None:
    # Chunk 0: (1+2, 3+4, 5+6); chunk 1 ended after its first action: (7+8, -, -).
    assert logprobs_at_level(Level.token, ENTRIES, EXECUTED).tolist() == [
        [[1, 2], [3, 4], [5, 6]],
        [[7, 8], [0, 0], [0, 0]],
    ]
    assert logprobs_at_level(Level.action, ENTRIES, EXECUTED).tolist() == [[3, 7, 11], [15, 0, 0]]
    assert logprobs_at_level(Level.chunk, ENTRIES, EXECUTED).tolist() == [21, 15]


def test_what_counts_at_each_level() -> None:
    nothing = torch.tensor([[True, False], [False, False]])
    assert valid_at(Level.token, nothing, 2).tolist() == [[[True] * 2, [False] * 2], [[False] * 2, [False] * 2]]
    assert valid_at(Level.action, nothing, 2).tolist() == nothing.tolist()
    assert valid_at(Level.chunk, nothing, 2).tolist() == [True, False]


def test_the_action_that_ends_an_episode_counts_and_those_after_it_do_not(goldens: dict) -> None:
    # verl's mask counts tokens, 7 per action, of two episodes of 3 chunks of 2 actions: through the first done.
    case = goldens["verl"]["verl_vla_response_mask"]
    complete, counts = torch.tensor(case["complete"]), torch.tensor(case["mask_sum_per_step"])
    # The first episode is done with the first action of its second chunk, the second one never.
    steps = torch.tensor([[2, 1, 0], [2, 2, 2]])
    assert complete[0].flatten().nonzero()[0] == steps[0].sum() - 1
    executed = executed_actions(steps, steps > 0, 2)
    assert valid_at(Level.token, executed, 7).sum(-1).tolist() == counts.tolist()


def test_advantages_are_spread_down_and_never_up() -> None:
    of_chunks, of_actions = torch.tensor([1.0, 2.0]), torch.arange(6.0).view(2, 3)
    assert expand_to_level(Level.chunk, of_chunks, EXECUTED, 2).tolist() == [1, 2]
    assert expand_to_level(Level.action, of_chunks, EXECUTED, 2).tolist() == [[1] * 3, [2] * 3]
    assert expand_to_level(Level.token, of_chunks, EXECUTED, 2)[1].tolist() == [[2, 2]] * 3
    assert expand_to_level(Level.action, of_actions, EXECUTED, 2).tolist() == of_actions.tolist()
    assert expand_to_level(Level.token, of_actions, EXECUTED, 2)[1].tolist() == [[3, 3], [4, 4], [5, 5]]
    with pytest.raises(LevelError, match="advantages of actions do not fit one log-prob per chunk"):
        expand_to_level(Level.chunk, of_actions, EXECUTED, 2)


def test_actions_in_time_and_back() -> None:
    column = torch.arange(12).view(2, 3, 2)  # K = 2, B = 3, C = 2
    assert in_time(column)[:, 0].tolist() == [0, 1, 6, 7]
    assert torch.equal(in_chunks(in_time(column), 2), column)


def test_rewards_of_chunks() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    assert chunk_rewards(rewards, 1.0).tolist() == [7.0]
    assert chunk_rewards(rewards, 0.5).tolist() == [1.0 + 1.0 + 1.0]


def test_a_log_prob_of_the_wrong_rank_is_an_error_and_no_broadcast(goldens: dict) -> None:
    # RL4VLA sums a ratio [B, 7] that broadcasting made of [B, 1]: its loss is 7 times too large.
    assert goldens["other"]["rl4vla_broadcast"] == pytest.approx(-1.2 * 7)
    with pytest.raises(LevelError, match=r"one shape, got logprobs \(4, 1\), old_logprobs \(4, 7\)"):
        require_same_shape(logprobs=torch.zeros(4, 1), old_logprobs=torch.zeros(4, 7))


def test_shapes_that_do_not_fit_are_named() -> None:
    wanted = (
        r"shape \(2, 6\), and N = 6 is no multiple of the chunk size C = 4, .* algorithm\.logprob_level: action\. Pol"
    )
    with pytest.raises(LevelError, match=wanted):
        logprobs_at_level(Level.action, ENTRIES, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(LevelError, match=r"entries have shape \(2, 6\), executed actions \(3, 2\)"):
        logprobs_at_level(Level.chunk, ENTRIES, torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(LevelError, match=r"advantages have shape \(3,\), expected \(2,\) or \(2, 3\)"):
        expand_to_level(Level.action, torch.zeros(3), EXECUTED, 2)
    with pytest.raises(LevelError, match=r"\(2, 3\), expected \[K, B, C\]"):
        in_time(torch.zeros(2, 3))
    with pytest.raises(LevelError, match=r"\(5, 3\), expected \[K\*2, B\]"):
        in_chunks(torch.zeros(5, 3), 2)


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(LossConfig):
    scale: int = 5
    other: int = 1


def test_a_function_gets_what_it_names_and_no_more() -> None:
    def estimator(*, rewards: int, scale: int = 2) -> int:
        return rewards * scale

    bound = Bound(estimator, LossConfig())
    assert bound({"rewards": 3, "values": 9}) == 6
    assert bound({"rewards": 3, "scale": 4}) == 12  # a column may fill an argument with a default
    assert bound.takes("rewards") and bound.takes("scale") and not bound.takes("values")
    own = Bound(estimator, ScaleConfig())
    assert own({"rewards": 3}) == 15
    assert not own.takes("scale")


def test_an_argument_that_nobody_provides_is_named_with_a_near_match() -> None:
    def estimator(*, reward: int, scale: int) -> int:
        return reward

    with pytest.raises(SignatureError) as caught:
        Bound(estimator, ScaleConfig())({"rewards": 3, "valid": 1})
    assert str(caught.value).endswith(
        "estimator asks for 'reward', which is not available - did you mean 'rewards'? (available: rewards, scale, "
        "valid)"
    )
