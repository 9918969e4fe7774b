from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.advantages import explained_variance, gae, grpo, normalize

YES = torch.ones(3, 1, dtype=torch.bool)
NO = ~YES


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def run_gae(**changes: Tensor | float) -> tuple[Tensor, Tensor]:
    arguments: dict[str, Tensor | float] = {
        "rewards": column(1.0, 2.0, 3.0),
        "values": column(0.5, 1.0, 1.5),
        "next_values": column(1.0, 1.5, 4.0),
        "ended": NO,
        "discounts": torch.full((3, 1), 0.9),
        "valid": YES,
        "gae_lambda": 0.5,
    }
    return gae(**(arguments | changes))  # type: ignore[arg-type]


def test_gae_by_hand() -> None:
    # delta_2 = 3 + 0.9*4   - 1.5 = 5.1    A_2 = 5.1
    # delta_1 = 2 + 0.9*1.5 - 1.0 = 2.35   A_1 = 2.35 + 0.45*5.1   = 4.645
    # delta_0 = 1 + 0.9*1   - 0.5 = 1.4    A_0 = 1.4  + 0.45*4.645 = 3.49025
    advantages, returns = run_gae()
    torch.testing.assert_close(advantages, column(3.49025, 4.645, 5.1))
    torch.testing.assert_close(returns, column(3.99025, 5.645, 6.6))


def test_gae_stops_at_the_end_of_an_episode_but_keeps_the_value_of_a_truncated_one() -> None:
    # The episode is cut off in decision 1: its final observation is worth 7, and decision 2 is another episode.
    # delta_1 = 2 + 0.9*7 - 1 = 7.3 = A_1    A_0 = 1.4 + 0.45*7.3 = 4.685
    ended = torch.tensor([[False], [True], [False]])
    advantages, _ = run_gae(ended=ended, next_values=column(1.0, 7.0, 4.0))
    torch.testing.assert_close(advantages, column(4.685, 7.3, 5.1))


def test_gae_discounts_each_decision_by_its_own_factor() -> None:
    # A decision of two actions is discounted by 0.81: delta_0 = 1 + 0.81*1 - 0.5 = 1.31, A_0 = 1.31 + 0.405*4.645
    advantages, _ = run_gae(discounts=column(0.81, 0.9, 0.9))
    torch.testing.assert_close(advantages[0], torch.tensor([1.31 + 0.405 * 4.645]))


def test_gae_is_zero_where_nothing_was_decided() -> None:
    valid = torch.tensor([[True], [True], [False]])
    advantages, returns = run_gae(valid=valid, ended=torch.tensor([[False], [True], [False]]))
    assert advantages[2] == 0 and returns[2] == 0


def test_gae_agrees_with_rlinf(goldens: dict) -> None:
    case, inputs = goldens["other"]["rlinf_gae"], goldens["other"]["rl4vla_ppo"]
    values = torch.tensor(inputs["values"]).squeeze(-1)
    ended = torch.zeros(3, 2, dtype=torch.bool)
    ended[2] = True
    advantages, returns = gae(
        rewards=torch.tensor(inputs["rewards"]).squeeze(-1),
        values=values[:-1],
        next_values=values[1:] * ~ended,
        ended=ended,
        discounts=torch.full((3, 2), 0.99),
        valid=torch.ones(3, 2, dtype=torch.bool),
        gae_lambda=0.95,
    )
    torch.testing.assert_close(advantages, torch.tensor(case["adv"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.tensor(case["returns"]), atol=1e-6, rtol=0)


def test_gae_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_gae"]
    rewards, values = torch.tensor(case["rewards"]).T, torch.tensor(case["values"]).T
    valid = torch.tensor(case["mask"]).T.bool()
    ended = torch.tensor([[False, False], [False, False], [False, True], [True, False]])
    following = torch.cat([values[1:], torch.zeros(1, 2)]) * ~ended
    advantages, returns = gae(
        rewards=rewards,
        values=values,
        next_values=following,
        ended=ended,
        discounts=torch.full((4, 2), case["gamma"]),
        valid=valid,
        gae_lambda=case["lam"],
    )
    torch.testing.assert_close(returns[valid], torch.tensor(case["returns"]).T[valid], atol=1e-6, rtol=0)
    whitened = torch.tensor(case["adv_whitened"]).T[valid]
    torch.testing.assert_close(normalize(advantages, valid)[valid], whitened, atol=1e-6, rtol=0)


def test_grpo_by_hand() -> None:
    # Group one: returns 3, 0, 0 -> mean 1, unbiased std sqrt(3); group two: returns 2, 2, 2 -> no advantage.
    # Slot 1 ends after its first decision: the reward written there afterwards does not count.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 2.0, 0.0], [2.0, 9.0, 0.0, 1.0, 0.0, 2.0]])
    valid = torch.tensor([[True] * 6, [True, False, True, True, True, True]])
    advantages, returns = grpo(rewards=rewards, valid=valid, group_size=3, epsilon=0.0 + 1e-12)
    root = 3.0**0.5
    expected = torch.tensor([[2 / root, -1 / root, -1 / root, 0, 0, 0], [2 / root, 0, -1 / root, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 0, 0, 2, 2, 2], [3.0, 0, 0, 2, 2, 2]]))


def test_grpo_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_grpo_stdTrue"]
    scores, mask = torch.tensor(case["scores"]), torch.tensor(case["mask"]).T.bool()
    rewards = torch.zeros(3, 8)
    rewards[0] = scores
    advantages, _ = grpo(rewards=rewards, valid=mask, group_size=4, epsilon=case["eps"])
    torch.testing.assert_close(advantages, torch.tensor(case["adv"]).T, atol=1e-6, rtol=0)


def test_normalize_leaves_invalid_entries_out() -> None:
    advantages = torch.tensor([1.0, 3.0, 1000.0])
    scaled = normalize(advantages, torch.tensor([True, True, False]))
    root_half = 0.5**0.5
    torch.testing.assert_close(scaled, torch.tensor([-root_half, root_half, 0.0]))


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.ones(3), returns) == pytest.approx(0.0)
    assert json.dumps(explained_variance(returns, torch.ones(3))) == "NaN"
