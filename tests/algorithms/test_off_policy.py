"""Soft actor-critic against its formulas in plain Python, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from embodyrl.algorithms.off_policy import (
    actor_losses,
    critic_losses,
    decision_returns,
    following_factors,
    soft_targets,
    temperature_losses,
)
from embodyrl.config.schema import Bootstrap, CriticUse, DiscountPer
from embodyrl.methods.sac.config import largest_entropy, usual_target_entropy
from embodyrl.models.sampling import squashed_logprobs

GAMMA, ALPHA = 0.9, 0.2

# A decision of four actions: it goes on; it ends by success in its second action; the time limit cuts it off in its
# third. The same for single actions.
REWARDS = {
    4: [[1.0, 2.0, -3.0, 0.5], [0.25, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]],
    1: [[1.5], [4.0], [-2.0]],
}
STEPS = {4: [4, 2, 3], 1: [1, 1, 1]}
TERMINATED, TRUNCATED = [False, True, False], [False, False, True]
VALUES = [[5.0, 7.0, -1.0], [4.0, 8.0, 2.0]]
LOGPROBS = [-1.0, 0.5, 2.0]


def by_hand(chunk: int, per: DiscountPer, bootstrap: Bootstrap, entropy: bool) -> list[float]:
    """The targets, in plain Python."""
    targets = []
    for row in range(3):
        rewards, steps = REWARDS[chunk][row][: STEPS[chunk][row]], STEPS[chunk][row]
        if per is DiscountPer.action:
            total, factor = sum(GAMMA**i * reward for i, reward in enumerate(rewards)), GAMMA**steps
        else:
            total, factor = sum(rewards), GAMMA
        over = TERMINATED[row] or (TRUNCATED[row] and bootstrap is Bootstrap.none)
        following = min(VALUES[0][row], VALUES[1][row]) - (ALPHA * LOGPROBS[row] if entropy else 0.0)
        targets.append(total + (0.0 if over else factor * following))
    return targets


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("bootstrap", list(Bootstrap))
@pytest.mark.parametrize("per", list(DiscountPer))
@pytest.mark.parametrize("chunk", [1, 4])
def test_targets(chunk: int, per: DiscountPer, bootstrap: Bootstrap, entropy: bool) -> None:
    returns = decision_returns(torch.tensor(REWARDS[chunk]), gamma=GAMMA, discount_per=per)
    factors = following_factors(
        torch.tensor(STEPS[chunk]),
        torch.tensor(TERMINATED),
        torch.tensor(TRUNCATED),
        gamma=GAMMA,
        discount_per=per,
        bootstrap=bootstrap,
    )
    found = soft_targets(
        returns,
        factors,
        torch.tensor(VALUES),
        torch.tensor(LOGPROBS),
        temperature=torch.tensor(ALPHA),
        entropy=entropy,
    )
    assert found.tolist() == pytest.approx(by_hand(chunk, per, bootstrap, entropy), abs=1e-6)


def test_a_termination_at_the_time_limit_is_a_termination() -> None:
    both = torch.tensor([True])
    factors = following_factors(
        torch.tensor([1]), both, both, gamma=0.9, discount_per=DiscountPer.chunk, bootstrap=Bootstrap.truncation
    )
    assert factors.item() == 0.0


def test_losses_of_critics_are_summed_over_critics() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)
    losses = critic_losses(values, torch.tensor([2.0, 0.5]))
    assert losses.tolist() == [1.0 + 1.0, 2.25 + 2.25]
    losses.mean().backward()
    assert values.grad is not None and values.grad.tolist() == [[-1.0, 1.5], [1.0, -1.5]]


@pytest.mark.parametrize(("use", "wanted"), [(CriticUse.min, [-1.2, 2.1]), (CriticUse.mean, [-2.2, 0.6])])
def test_losses_of_the_policy(use: CriticUse, wanted: list[float]) -> None:
    values = torch.tensor([[1.0, 1.0], [3.0, -2.0]])
    found = actor_losses(values, torch.tensor([-1.0, 0.5]), temperature=torch.tensor(0.2), use=use)
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_temperature_grows_while_the_entropy_is_below_its_target() -> None:
    log_temperature = torch.tensor(math.log(0.5), requires_grad=True)
    logprobs = torch.tensor([1.0, 3.0], requires_grad=True)
    losses = temperature_losses(log_temperature, logprobs, target_entropy=-1.0)
    assert losses.tolist() == pytest.approx([-0.5 * 0.0, -0.5 * 2.0], abs=1e-6)
    losses.mean().backward()
    # d/d log alpha of -alpha (log pi + H) is the loss itself, and a step goes against it.
    assert log_temperature.grad is not None and log_temperature.grad.item() == pytest.approx(-0.5, abs=1e-6)
    assert logprobs.grad is None


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        critic_losses(torch.zeros(2, 3, 1), torch.zeros(3))


def test_log_probabilities_of_squashed_samples() -> None:
    means, log_stds = torch.tensor([0.3, -0.5], dtype=torch.float64), torch.tensor([-0.2, 0.4], dtype=torch.float64)
    sample = torch.tensor([0.7, -1.5], dtype=torch.float64)
    gaussian = torch.distributions.Normal(means, log_stds.exp()).log_prob(sample)
    wanted = gaussian - torch.log(1.0 - sample.tanh() ** 2)
    assert torch.allclose(squashed_logprobs(sample, means, log_stds), wanted, atol=1e-12)


@pytest.mark.parametrize("place", [8.0, 20.0, -50.0])
def test_they_are_finite_where_tanh_rounds_to_one(place: float) -> None:
    sample = torch.tensor([place], requires_grad=True)
    found = squashed_logprobs(sample, torch.tensor([place]), torch.tensor([-1.0]))
    # log(1 - tanh(z)^2) is 2 log 2 - 2 |z| for large |z|.
    wanted = 1.0 - 0.5 * math.log(2.0 * math.pi) - (2.0 * math.log(2.0) - 2.0 * abs(place))
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    found.sum().backward()
    assert sample.grad is not None and bool(torch.isfinite(sample.grad).all())


def test_the_density_of_squashed_samples_is_one_in_all() -> None:
    unit = torch.linspace(-1.0, 1.0, 200_001, dtype=torch.float64)[1:-1]
    zero = torch.zeros(1, dtype=torch.float64)
    density = squashed_logprobs(unit.atanh(), zero + 0.3, zero - 0.5).exp()
    assert torch.trapezoid(density, unit).item() == pytest.approx(1.0, abs=1e-4)


def test_entropies() -> None:
    assert usual_target_entropy(4) == -2.0
    assert largest_entropy(4) == pytest.approx(4 * math.log(2.0))
