from __future__ import annotations

import math

import pytest
import torch

from embodyrl.algorithms.call import SignatureError, call_with
from embodyrl.algorithms.levels import decision_logprobs, decision_rewards
from embodyrl.algorithms.losses import masked_mean, ppo, value_loss


def log(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_ppo_by_hand() -> None:
    # ratio 1.5, A=+1: clipped at 1.3 -> -1.3        ratio 0.5, A=+1: not clipped -> -0.5
    # ratio 1.5, A=-1: not clipped -> +1.5           ratio 0.5, A=-1: clipped at 0.8 -> +0.8     mean 0.125
    output = ppo(
        logprobs=log(1.5, 0.5, 1.5, 0.5),
        old_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        valid=torch.ones(4, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.3,
    )
    assert float(output.loss) == pytest.approx(0.125)
    assert float(output.metrics["clip_fraction"]) == 1.0
    # k3 estimate: r - 1 - log r
    expected = (2 * (1.5 - 1 - math.log(1.5)) + 2 * (0.5 - 1 - math.log(0.5))) / 4
    assert float(output.metrics["approx_kl"]) == pytest.approx(expected)


def test_ppo_has_no_gradient_beyond_the_clip_on_the_improving_side() -> None:
    logprobs = log(1.5, 0.5, 1.5, 0.5).requires_grad_()
    ppo(
        logprobs=logprobs,
        old_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        valid=torch.ones(4, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.3,
    ).loss.backward()
    assert [bool(entry != 0) for entry in logprobs.grad] == [False, True, True, False]


def test_ppo_ignores_invalid_decisions() -> None:
    def loss(last: float) -> float:
        return float(
            ppo(
                logprobs=log(1.1, last),
                old_logprobs=torch.zeros(2),
                advantages=torch.ones(2),
                valid=torch.tensor([True, False]),
                clip_low=0.2,
                clip_high=0.2,
            ).loss
        )

    assert loss(1.0) == loss(3.0) == pytest.approx(-1.1)


def test_ppo_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_policy_loss_token-mean"]
    output = ppo(
        logprobs=torch.tensor(case["logp"]).flatten(),
        old_logprobs=torch.tensor(case["old"]).flatten(),
        advantages=torch.tensor(case["adv"]).flatten(),
        valid=torch.tensor(case["mask"]).flatten().bool(),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
    )
    assert float(output.loss) == pytest.approx(case["pg_loss"], abs=1e-6)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(case["clipfrac"], abs=1e-6)


def test_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([0.5, 1.2]), torch.tensor([0.0, 1.0]), torch.ones(2)
    valid = torch.ones(2, dtype=torch.bool)
    # (0.25 + 0.04) / 2 / 2, and with clip 0.2: the first value may only count as 0.2: ((0.8)^2 + 0.04) / 2 / 2
    assert float(value_loss(values, old, returns, valid)) == pytest.approx(0.0725)
    assert float(value_loss(values, old, returns, valid, clip=0.2)) == pytest.approx(0.17)


def test_value_loss_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_value_loss"]
    columns = [torch.tensor(case[name], dtype=torch.float32) for name in ("vpreds", "values", "returns")]
    loss = value_loss(*columns, torch.ones(2, dtype=torch.bool), clip=case["clip"])
    assert float(loss) == pytest.approx(case["loss"], abs=1e-6)


def test_masked_mean_of_nothing_is_zero() -> None:
    assert float(masked_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool))) == 0.0


def test_levels() -> None:
    assert decision_logprobs(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [3.0, 7.0]
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    assert decision_rewards(rewards, 1.0).tolist() == [7.0]
    assert decision_rewards(rewards, 0.5).tolist() == [1.0 + 1.0 + 1.0]


def test_a_function_gets_what_it_names_and_no_more() -> None:
    def estimator(*, rewards: int, scale: int = 2) -> int:
        return rewards * scale

    assert call_with(estimator, {"rewards": 3, "values": 9}) == 6
    assert call_with(estimator, {"rewards": 3, "scale": 5}) == 15


def test_an_argument_that_nobody_provides_is_named_with_a_near_match() -> None:
    def estimator(*, reward: int) -> int:
        return reward

    with pytest.raises(SignatureError, match=r"asks for 'reward', which is not available - did you mean 'rewards'\?"):
        call_with(estimator, {"rewards": 3})
