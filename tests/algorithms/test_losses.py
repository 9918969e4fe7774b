from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.aggregation import token_weights
from embodyrl.algorithms.columns import LevelError
from embodyrl.algorithms.losses import LossOutput, kl_divergence, ppo, value_loss
from embodyrl.algorithms.variants import cpgd, decoupled_ppo, gspo, proximal_logprobs
from embodyrl.config.schema import Aggregation, Excess, KLEstimator, Proximal


def log(*ratios: float) -> Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def run_ppo(logprobs: Tensor, advantages: Tensor, dual_clip: float | None = None, low: float = 0.2, high: float = 0.3):
    return ppo(
        logprobs=logprobs,
        old_logprobs=torch.zeros_like(logprobs),
        advantages=advantages,
        clip_low=low,
        clip_high=high,
        dual_clip=dual_clip,
    )


SIGNS = torch.tensor([1.0, 1.0, -1.0, -1.0])


def test_ppo_by_hand() -> None:
    # ratio 1.5, A=+1: clipped at 1.3 -> -1.3        ratio 0.5, A=+1: not clipped -> -0.5
    # ratio 1.5, A=-1: not clipped -> +1.5           ratio 0.5, A=-1: clipped at 0.8 -> +0.8
    output = run_ppo(log(1.5, 0.5, 1.5, 0.5), SIGNS)
    torch.testing.assert_close(output.losses, torch.tensor([-1.3, -0.5, 1.5, 0.8]))
    assert output.metrics["clip_fraction"].tolist() == [1, 1, 1, 1]


def test_ppo_has_no_gradient_beyond_the_clip_on_the_improving_side() -> None:
    logprobs = log(1.5, 0.5, 1.5, 0.5).requires_grad_()
    run_ppo(logprobs, SIGNS).losses.sum().backward()
    assert [bool(entry != 0) for entry in logprobs.grad] == [False, True, True, False]


def test_dual_clip_by_hand() -> None:
    # A=-2: ratio 5 -> 10, at most 3 * 2 = 6, without gradient; ratio 2 -> 4 stays; A=+1 is not concerned.
    logprobs = log(5.0, 2.0, 5.0).requires_grad_()
    output = run_ppo(logprobs, torch.tensor([-2.0, -2.0, 1.0]), dual_clip=3.0)
    torch.testing.assert_close(output.losses, torch.tensor([6.0, 4.0, -1.3]))
    assert output.metrics["dual_clip_fraction"].tolist() == [1, 0, 0]
    output.losses.sum().backward()
    assert [bool(entry != 0) for entry in logprobs.grad] == [False, True, False]


def test_a_huge_ratio_stays_finite() -> None:
    assert bool(run_ppo(torch.tensor([1000.0]), torch.tensor([-1.0])).losses.isfinite().all())


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_ppo_agrees_with_verl(goldens: dict, how: str) -> None:
    case = goldens["verl"][f"verl_policy_loss_{how}"]
    output = ppo(
        logprobs=torch.tensor(case["logp"]).flatten(),
        old_logprobs=torch.tensor(case["old"]).flatten(),
        advantages=torch.tensor(case["adv"]).flatten(),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["clip_c"],
    )
    valid = torch.tensor(case["mask"]).flatten().bool()
    weights = token_weights(valid, torch.tensor([0, 0, 0, 1, 1, 1]), Aggregation(how.replace("-", "_")), 3)
    assert float((weights * output.losses).sum()) == pytest.approx(case["pg_loss"], abs=1e-6)
    assert float(output.metrics["clip_fraction"][valid].mean()) == pytest.approx(case["clipfrac"], abs=1e-6)
    lower = float(output.metrics["dual_clip_fraction"][valid].mean())
    assert lower == pytest.approx(case["clipfrac_lower"], abs=1e-6)


def arrays(goldens: dict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    case = goldens["other"]["rlinf_decoupled"]
    logprobs, old, proximal, advantages = (torch.tensor(case[name]) for name in ("logp", "old", "prox", "adv"))
    return logprobs, old, proximal, advantages


def test_ppo_agrees_with_rlinf(goldens: dict) -> None:
    logprobs, old, _, advantages = arrays(goldens)
    output = ppo(
        logprobs=logprobs, old_logprobs=old, advantages=advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    assert float(output.losses.mean()) == pytest.approx(goldens["other"]["rlinf_ppo"], abs=1e-6)


def run_decoupled(
    logprobs: Tensor, old: Tensor, proximal: Tensor, advantages: Tensor, cap: float | None, excess: Excess = Excess.mask
) -> LossOutput:
    return decoupled_ppo(
        logprobs=logprobs,
        old_logprobs=old,
        proximal_logprobs=proximal,
        advantages=advantages,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        behaviour_cap=cap,
        behaviour_excess=excess,
    )


@pytest.mark.parametrize(
    ("name", "cap", "excess"),
    [
        ("rlinf_decoupled", None, Excess.mask),
        ("areal_decoupled_mask5", 5.0, Excess.mask),
        ("areal_decoupled_mask1.05", 1.05, Excess.mask),
        ("areal_decoupled_clamp1.05", 1.05, Excess.clamp),
    ],
)
def test_decoupled_ppo_agrees_with_areal_and_rlinf(goldens: dict, name: str, cap: float | None, excess: Excess) -> None:
    case = goldens["other"][name]
    loss = float(run_decoupled(*arrays(goldens), cap, excess).losses.mean())
    assert loss == pytest.approx(case["loss"] if isinstance(case, dict) else case, abs=1e-6)


def test_areal_without_rejection_is_ppo_around_the_proximal_policy(goldens: dict) -> None:
    # Its "none" leaves the behaviour weight out altogether; here that is a behaviour policy equal to the proximal one.
    logprobs, _, proximal, advantages = arrays(goldens)
    loss = float(run_decoupled(logprobs, proximal, proximal, advantages, None).losses.mean())
    assert loss == pytest.approx(goldens["other"]["areal_decoupled_none"], abs=1e-6)


def test_decoupled_ppo_by_hand() -> None:
    # w = prox/old = 2 and 4 (cap 3); r = pi/prox = 1.5 -> 1.28 for A=+1, 0.5 -> 0.8 for A=-1.
    # Losses of the surrogate: -1.28 and +0.8.
    arguments = (log(1.5 * 2, 0.5 * 4), torch.zeros(2), log(2.0, 4.0), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(run_decoupled(*arguments, 3.0).losses, torch.tensor([-1.28 * 2, 0.0]))
    torch.testing.assert_close(run_decoupled(*arguments, 3.0, Excess.clamp).losses, torch.tensor([-1.28 * 2, 0.8 * 3]))
    torch.testing.assert_close(run_decoupled(*arguments, None).losses, torch.tensor([-1.28 * 2, 0.8 * 4]))


def test_loglinear_proximal_log_probs_agree_with_areal(goldens: dict) -> None:
    logprobs, old, _, advantages = arrays(goldens)
    case = goldens["other"]["rlinf_decoupled_versions"]
    versions = torch.tensor(case["versions"])
    proximal = proximal_logprobs(logprobs, old, versions, case["current"], Proximal.loglinear)
    expected = torch.tensor(goldens["other"]["areal_prox"]["loglinear"])
    torch.testing.assert_close(proximal, expected, atol=1e-6, rtol=0)
    loss = float(run_decoupled(logprobs, old, proximal, advantages, None).losses.mean())
    assert loss == pytest.approx(case["loss"], abs=1e-6)


def test_a_fresh_decisions_proximal_policy_is_the_one_that_decided() -> None:
    # The version that this update makes is 4; version 3 decided, so nothing lies between.
    old = torch.tensor([[-1.0, -2.0]])
    proximal = proximal_logprobs(torch.zeros(1, 2), old, torch.tensor([3]), 4, Proximal.loglinear)
    assert torch.equal(proximal, old)
    # One update in between: half way.
    stale = proximal_logprobs(torch.zeros(1, 2), old, torch.tensor([2]), 4, Proximal.loglinear)
    assert torch.equal(stale, old / 2)


def test_cpgd_by_hand() -> None:
    # log pi_old = 0, clips log 1.3 above and log 0.8 below; drift = min(r - 1, 2) * log pi * 0.1.
    # r=2,   A=+1: -log 1.3          + 0.1 * 1    * log 2
    # r=0.5, A=-2: +2 log 0.8        + 0.1 * -0.5 * log 0.5
    # r=5,   A=-1: +log 5 (no clip)  + 0.1 * 2    * log 5
    logprobs = log(2.0, 0.5, 5.0).requires_grad_()
    output = cpgd(
        logprobs=logprobs,
        old_logprobs=torch.zeros(3),
        advantages=torch.tensor([1.0, -2.0, -1.0]),
        clip_low=0.2,
        clip_high=0.3,
        drift_coef=0.1,
    )
    expected = [
        -math.log(1.3) + 0.1 * math.log(2),
        2 * math.log(0.8) - 0.05 * math.log(0.5),
        math.log(5) + 0.2 * math.log(5),
    ]
    torch.testing.assert_close(output.losses, torch.tensor(expected))
    assert output.metrics["clip_fraction"].tolist() == [1, 1, 0]
    output.losses.sum().backward()
    # Beyond the clip only the drift pulls, back to the old policy.
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.1, -0.05, 1.2]))


def run_gspo(logprobs: Tensor, advantages: Tensor, valid: Tensor, sequence: Tensor) -> LossOutput:
    return gspo(
        logprobs=logprobs,
        old_logprobs=torch.zeros_like(logprobs),
        advantages=advantages,
        valid=valid,
        sequence=sequence,
        clip_low=0.2,
        clip_high=0.3,
    )


def test_gspo_by_hand() -> None:
    # Sequence 5: ratios 4 and 1, geometric mean 2: clipped at 1.3 for A=+1, not for A=-1.
    # Sequence 2: ratios 0.25 and 1 (and an entry that does not count): geometric mean 0.5.
    logprobs = log(4.0, 0.25, 1.0, 1.0, 9.0).requires_grad_()
    output = run_gspo(
        logprobs,
        torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0]),
        torch.tensor([True, True, True, True, False]),
        torch.tensor([5, 2, 5, 2, 2]),
    )
    torch.testing.assert_close(output.losses[:4], torch.tensor([-1.3, -0.5, 2.0, 0.8]))
    output.losses[:4].sum().backward()
    # d(-A s pi/sg(pi))/d log pi = -A s where it is not clipped.
    torch.testing.assert_close(logprobs.grad[:4], torch.tensor([0.0, -0.5, 2.0, 0.0]))


def test_gspo_of_single_entries_is_ppo_and_lower_levels_are_means_over_tokens() -> None:
    logprobs, sequence, valid = log(1.5, 0.5, 1.5, 0.5), torch.arange(4), torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(run_gspo(logprobs, SIGNS, valid, sequence).losses, run_ppo(logprobs, SIGNS).losses)
    tokens = log(4.0, 1.0, 0.25, 1.0).view(2, 2)
    losses = run_gspo(tokens, torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 1])).losses
    torch.testing.assert_close(losses, torch.tensor([[-1.3, -1.3], [-0.5, -0.5]]))


def test_kl_estimators_by_hand() -> None:
    # log pi - log ref = log 2: k1 = log 2, k2 = (log 2)^2 / 2, k3 = 1/2 - 1 + log 2.
    logprobs, reference = log(2.0), log(1.0)
    values = [float(kl_divergence(logprobs, reference, estimator)) for estimator in KLEstimator]
    assert values == pytest.approx([math.log(2), math.log(2) ** 2 / 2, math.log(2) - 0.5])


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_agrees_with_verl(goldens: dict, estimator: KLEstimator) -> None:
    case = goldens["verl"]["verl_policy_loss_token-mean"]
    divergence = kl_divergence(torch.tensor(case["logp"]), torch.tensor(case["old"]), estimator)
    expected = torch.tensor(goldens["verl"][f"verl_kl_{estimator.value}"])
    torch.testing.assert_close(divergence, expected, atol=1e-6, rtol=0)


def test_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([0.5, 1.2]), torch.tensor([0.0, 1.0]), torch.ones(2)

    def loss(clip: float | None = None, huber: float | None = None) -> list[float]:
        return value_loss(values, old, returns, clip=clip, huber=huber).tolist()

    assert loss() == pytest.approx([0.125, 0.02])
    # With clip 0.2 the first value may only count as 0.2.
    assert loss(clip=0.2) == pytest.approx([0.32, 0.02])
    # Huber with delta 0.1: 0.1 * (0.5 - 0.05), 0.1 * (0.2 - 0.05); clipped the first error is 0.8.
    assert loss(huber=0.1) == pytest.approx([0.045, 0.015])
    assert loss(clip=0.2, huber=0.1) == pytest.approx([0.075, 0.015])


def test_value_loss_agrees_with_verl(goldens: dict) -> None:
    case = goldens["verl"]["verl_value_loss"]
    columns = [torch.tensor(case[name], dtype=torch.float32) for name in ("vpreds", "values", "returns")]
    loss = value_loss(*columns, clip=case["clip"], huber=None).mean()
    assert float(loss) == pytest.approx(case["loss"], abs=1e-6)


def test_losses_do_not_broadcast() -> None:
    with pytest.raises(LevelError, match=r"logprobs \(4, 1\), old_logprobs \(4, 1\), advantages \(4,\)"):
        run_ppo(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(LevelError, match=r"returns \(2, 1\)"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), clip=None, huber=None)
