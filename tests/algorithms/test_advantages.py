from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.advantages import explained_variance, gae, normalize
from embodyrl.algorithms.critic_free import grpo, raw, reinforce_pp
from embodyrl.config.schema import NormLevel

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


def run_grpo(
    rewards: Tensor,
    valid: Tensor | None = None,
    *,
    group_size: int = 3,
    mean: str = "group",
    std: str = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    return grpo(
        rewards=rewards,
        valid=torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid,
        group_size=group_size,
        mean_level=NormLevel(mean),
        std_level=NormLevel(std),
        leave_one_out=leave_one_out,
        unbiased=unbiased,
        eps=eps,
    )


def test_grpo_by_hand() -> None:
    # Group one: returns 3, 0, 0 -> mean 1, unbiased std sqrt(3); group two: returns 2, 2, 2 -> no advantage.
    # Slot 1 ends after its first decision: the reward written there afterwards does not count.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 2.0, 0.0], [2.0, 9.0, 0.0, 1.0, 0.0, 2.0]])
    valid = torch.tensor([[True] * 6, [True, False, True, True, True, True]])
    advantages, returns = run_grpo(rewards, valid)
    root = 3.0**0.5
    expected = torch.tensor([[2 / root, -1 / root, -1 / root, 0, 0, 0], [2 / root, 0, -1 / root, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 0, 0, 2, 2, 2], [3.0, 0, 0, 2, 2, 2]]))


RETURNS = torch.tensor([[3.0, 0.0, 0.0, 1.0, 1.0, 4.0]])
"""Group means 1 and 2, batch mean 1.5."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # GRPO: deviations 2 -1 -1 over sqrt(6/2); -1 -1 2 over the same. Biased: over sqrt(6/3).
        ({}, [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]),
        ({"unbiased": False}, [2 / 2**0.5, -1 / 2**0.5, -1 / 2**0.5, -1 / 2**0.5, -1 / 2**0.5, 2 / 2**0.5]),
        ({"eps": 1.0}, [2 / (3**0.5 + 1), *[-1 / (3**0.5 + 1)] * 4, 2 / (3**0.5 + 1)]),
        # Dr.GRPO: the deviations as they are. RLOO: 3/2 of them, that is 3 - 0, 0 - 3/2, 1 - 5/2, 4 - 1.
        ({"std": "none"}, [2, -1, -1, -1, -1, 2]),
        ({"std": "none", "leave_one_out": True}, [3, -1.5, -1.5, -1.5, -1.5, 3]),
        # AReaL's REINFORCE++-baseline: deviations from the group means over their deviation in the batch, sqrt(12/5).
        ({"std": "batch"}, [2 / 2.4**0.5, *[-1 / 2.4**0.5] * 4, 2 / 2.4**0.5]),
        # The batch alone: deviations 1.5 -1.5 -1.5 -0.5 -0.5 2.5, squares add up to 13.5. Leave one out: 6/5 of them.
        ({"mean": "batch", "std": "none"}, [1.5, -1.5, -1.5, -0.5, -0.5, 2.5]),
        ({"mean": "batch", "std": "none", "leave_one_out": True}, [1.8, -1.8, -1.8, -0.6, -0.6, 3.0]),
        ({"mean": "batch", "std": "batch"}, [each / 2.7**0.5 for each in (1.5, -1.5, -1.5, -0.5, -0.5, 2.5)]),
        # No mean: squares of the returns themselves, 9/2 and 18/2.
        ({"mean": "none"}, [3 / 4.5**0.5, 0, 0, 1 / 3, 1 / 3, 4 / 3]),
        ({"mean": "none", "std": "none"}, [3, 0, 0, 1, 1, 4]),
    ],
    ids=str,
)
def test_levels_of_comparison_by_hand(settings: dict, expected: list[float]) -> None:
    torch.testing.assert_close(run_grpo(RETURNS, **settings)[0], torch.tensor([expected], dtype=torch.float32))


LOST = torch.tensor([[True, True, False, True, False, False]])
"""Of group one two episodes are left, of group two a single one."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 3 and 0: mean 1.5, unbiased std sqrt(4.5); a single episode has nothing to be compared with.
        ({}, [1.5 / 4.5**0.5, -1.5 / 4.5**0.5, 0, 0, 0, 0]),
        ({"unbiased": False}, [1, -1, 0, 0, 0, 0]),
        ({"std": "none", "leave_one_out": True}, [3, -3, 0, 0, 0, 0]),
        # The batch has 3, 0, 1: mean 4/3.
        ({"mean": "batch", "std": "none"}, [5 / 3, -4 / 3, 0, -1 / 3, 0, 0]),
    ],
    ids=str,
)
def test_lost_episodes_count_nowhere(settings: dict, expected: list[float]) -> None:
    advantages, returns = run_grpo(RETURNS + 7.0 * ~LOST, LOST, **settings)
    torch.testing.assert_close(advantages, torch.tensor([expected], dtype=torch.float32))
    assert returns.tolist() == [[3, 0, 0, 1, 0, 0]]


def test_a_batch_of_no_episodes_has_no_advantages() -> None:
    for level in NormLevel:
        assert run_grpo(torch.zeros(2, 0), mean=level.value, std=level.value)[0].shape == (2, 0)


def verl_scores(goldens: dict) -> tuple[Tensor, Tensor]:
    """Scores on the last token, and the mask: `[T, B]`, two groups of four."""
    case = goldens["verl"]["verl_grpo_stdTrue"]
    scores, valid = torch.tensor(case["scores"]), torch.tensor(case["mask"]).T.bool()
    last = valid.cumsum(0) == valid.sum(0)
    return scores * (last & valid), valid


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("verl_grpo_stdTrue", {"eps": 1e-6}),
        ("verl_grpo_stdFalse", {"std": "none"}),
        ("verl_rloo", {"std": "none", "leave_one_out": True}),
    ],
)
def test_grpo_dr_grpo_and_rloo_agree_with_verl(goldens: dict, name: str, settings: dict) -> None:
    rewards, valid = verl_scores(goldens)
    advantages, _ = run_grpo(rewards, valid, group_size=4, **settings)
    torch.testing.assert_close(advantages, torch.tensor(goldens["verl"][name]["adv"]).T, atol=1e-6, rtol=0)


def test_grpo_agrees_with_rlinf(goldens: dict) -> None:
    rewards = torch.zeros(3, 8)
    rewards[0] = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1])
    advantages, _ = run_grpo(rewards, group_size=4, eps=1e-6)
    torch.testing.assert_close(advantages, torch.tensor(goldens["other"]["rlinf_grpo"]), atol=1e-6, rtol=0)


def test_reinforce_pp_baseline_agrees_with_verl(goldens: dict) -> None:
    rewards, valid = verl_scores(goldens)
    advantages, _ = run_grpo(rewards, valid, group_size=4, std="none")
    expected = torch.tensor(goldens["verl"]["verl_reinpp_baseline"]["adv"]).T
    torch.testing.assert_close(normalize(advantages, valid), expected, atol=1e-6, rtol=0)


def test_reinforce_pp_by_hand() -> None:
    # An episode of two decisions and one of a single decision: 1 + 0.9*2 = 2.8, 2, and 3 on its own.
    ended = torch.tensor([[False], [True], [True]])
    advantages, returns = reinforce_pp(
        rewards=column(1.0, 2.0, 3.0), ended=ended, discounts=torch.full((3, 1), 0.9), valid=YES
    )
    torch.testing.assert_close(advantages, column(2.8, 2.0, 3.0))
    assert torch.equal(advantages, returns)


def test_reinforce_pp_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_reinpp_gamma0.9"]
    rewards, valid = torch.tensor(case["token_rewards"]).T, verl_scores(goldens)[1]
    advantages, returns = reinforce_pp(
        rewards=rewards, ended=torch.zeros_like(valid), discounts=torch.full(valid.shape, 0.9), valid=valid
    )
    torch.testing.assert_close(returns * valid, torch.tensor(case["returns"]).T, atol=1e-6, rtol=0)
    torch.testing.assert_close(normalize(advantages, valid), torch.tensor(case["adv"]).T, atol=1e-6, rtol=0)


def test_returns_of_normalised_step_rewards_agree_with_rl4vla(goldens: dict) -> None:
    # RL4VLA's "grpo": step rewards over the biased deviation of the buffer, summed up to the end of the episode.
    rewards = torch.tensor(goldens["other"]["rl4vla_ppo"]["rewards"]).squeeze(-1)
    scaled = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-5)
    valid = torch.ones(3, 2, dtype=torch.bool)
    returns, _ = reinforce_pp(rewards=scaled, ended=~valid, discounts=torch.ones(3, 2), valid=valid)
    expected = torch.tensor(goldens["other"]["rl4vla_grpo_nofix"]["returns"]).squeeze(-1)
    torch.testing.assert_close(returns, expected, atol=2e-6, rtol=0)


def test_raw_is_the_reward_where_there_was_a_decision() -> None:
    valid = torch.tensor([[True], [False], [True]])
    advantages, _ = raw(rewards=column(1.0, 2.0, 3.0), valid=valid)
    torch.testing.assert_close(advantages, column(1.0, 0.0, 3.0))


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


CONSTANTS = [0.7, -2.56, 1.23, 0.1, 1 / 3, 1e-4, 12345.678]
METHODS = {
    "grpo": {},
    "grpo, biased": {"unbiased": False},
    "grpo, deviation of the batch": {"std": "batch"},
    "dr_grpo": {"std": "none"},
    "rloo": {"std": "none", "leave_one_out": True},
    "batch": {"mean": "batch", "std": "batch"},
    "batch, leave one out": {"mean": "batch", "std": "none", "leave_one_out": True},
}


@pytest.mark.parametrize("size", range(2, 33))
@pytest.mark.parametrize("method", METHODS)
def test_episodes_with_one_return_get_no_advantage(method: str, size: int) -> None:
    for constant in CONSTANTS:
        advantages, returns = run_grpo(
            torch.full((1, 2 * size), constant), group_size=size, eps=1e-8, **METHODS[method]
        )
        assert advantages.dtype == returns.dtype == torch.float32
        assert not advantages.any(), constant
        assert returns.unique().tolist() == [torch.tensor(constant).item()]
        assert not normalize(advantages, torch.ones_like(advantages, dtype=torch.bool)).any()


@pytest.mark.parametrize("size", [*range(2, 33), 1000, 4096])
def test_equal_numbers_are_normalised_to_nothing(size: int) -> None:
    for constant in CONSTANTS:
        numbers = torch.full((size + 1,), constant)
        numbers[0] = torch.nan
        assert not normalize(numbers, torch.arange(size + 1) > 0).any(), constant
        numbers[0] = 1e6
        scaled = normalize(numbers, torch.arange(size + 1) >= 0)  # n - 1 equal ones and another: by hand
        assert scaled.dtype == torch.float32
        assert float(scaled[0]) == pytest.approx(size / (size + 1) ** 0.5, rel=1e-4)
        assert scaled[1:].unique().numel() == 1


@pytest.mark.parametrize("size", [6, 7, 8, 10, 12])
def test_rewards_in_another_order_are_the_same_return(size: int) -> None:
    """Forty rewards of a tenth and a success, that comes earlier or later; and slots that other code adds up."""
    rewards = torch.full((41, 2 * size), -0.1)
    rewards[torch.randint(41, (2 * size,), generator=torch.Generator().manual_seed(size)), torch.arange(2 * size)] = 0.9
    assert not run_grpo(rewards, group_size=size, eps=1e-8)[0].any()


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1000.0), (1e4, 0.0), (1e-4, 0.0), (-3.0, 7.0), (0.1, -0.7)])
def test_advantages_of_scaled_and_shifted_returns(scale: float, shift: float) -> None:
    """Those of the returns themselves (which float32 rounds), with the sign of the scale."""
    returns = torch.randint(10, (1, 24), generator=torch.Generator().manual_seed(1)).float()
    returns[0, :6] = 4.0  # one group with nothing to learn from
    moved = (returns.double() * scale + shift).float()
    for settings in ({}, {"std": "batch"}, {"mean": "batch", "std": "batch"}):
        expected = run_grpo(returns, group_size=6, **settings)[0] * (1 if scale > 0 else -1)
        found = run_grpo(moved, group_size=6, **settings)[0]
        torch.testing.assert_close(found, expected, atol=1e-3 if shift == 1000.0 else 1e-5, rtol=0)
        assert settings.get("mean") == "batch" or not found[0, :6].any()


def test_a_group_with_one_other_return_keeps_its_advantages() -> None:
    # Nine of 0.7 and one of 0.8: mean 0.71, squares 9 * 0.01**2 + 0.09**2 = 0.009, deviation sqrt(0.001).
    returns = torch.tensor([[0.7] * 9 + [0.8]])
    expected = torch.tensor([[-0.01 / 0.001**0.5] * 9 + [0.09 / 0.001**0.5]])
    torch.testing.assert_close(run_grpo(returns, group_size=10)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [2, 3, 6, 7, 10, 1000])
def test_variance_of_equal_returns_is_nothing_to_explain(size: int) -> None:
    for constant in CONSTANTS:
        assert json.dumps(explained_variance(torch.rand(size), torch.full((size,), constant))) == "NaN"
        returns = torch.linspace(0, 1, size)
        assert explained_variance(torch.full((size,), constant), returns) == pytest.approx(0.0, abs=1e-9)
