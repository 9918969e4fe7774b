"""Denoising steps as distributions, checked by hand and against what the theory says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.models.flow.config import FlowConfig
from embodyrl.models.flow.denoising import (
    NoiseNetwork,
    TimeGrid,
    Transition,
    ValueHead,
    ends,
    euler,
    flow_cps,
    flow_noise,
    flow_sde,
    guidance_weight,
    prior,
)
from embodyrl.models.flow.policy import Denoised, FlowPolicy, guidable
from embodyrl.models.policy import PLAN, PLAN_WEIGHTS
from embodyrl.rollout.plans import plan_weights


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None, None]


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_both_clocks_share_the_same_amounts_of_noise(steps: int) -> None:
    falling, rising = TimeGrid.falling(steps), TimeGrid.rising(steps)
    assert len(falling) == len(rising) == steps
    torch.testing.assert_close(falling.shares, rising.shares)
    torch.testing.assert_close(falling.times, 1 - rising.times)
    assert falling.shares[0] == 1 and falling.shares[-1] == rising.shares[-1] == 0


def test_falling_times_add_up_as_the_public_sampler_does() -> None:
    time, found = torch.tensor(1.0), []
    while time >= 0.05:
        found.append(time.clone())
        time += torch.tensor(-0.1)
    assert torch.equal(TimeGrid.falling(10).times[:-1], torch.stack(found))
    assert not torch.equal(TimeGrid.falling(10).times, 1 - TimeGrid.rising(10).times)


@pytest.mark.parametrize("steps", [1, 3, 7, 10])
def test_falling_times_that_are_divided_are_those_of_float64(steps: int) -> None:
    wanted = [np.float32(1.0 - step / steps) for step in range(steps)]
    assert TimeGrid.falling(steps, summed=False).times.tolist() == pytest.approx([*wanted, 0.0], abs=0)
    assert TimeGrid.falling(steps).times.tolist() == pytest.approx([*wanted, 0.0], abs=4e-7)


def test_a_step_of_each_method_by_hand() -> None:
    # Share of noise 0.75 -> 0.5, x = 0.6, velocity 0.8: data = 0.6 - 0.8*0.75 = 0, noise = 0.6 + 0.8*0.25 = 0.8.
    x, velocity, before, after, level = (column(number) for number in (0.6, 0.8, 0.75, 0.5, 0.5))
    assert [end.item() for end in ends(x, velocity, before)] == pytest.approx([0.0, 0.8], abs=1e-6)
    assert euler(x, velocity, before, after).item() == pytest.approx(0.4)
    # sigma^2 = 0.25 * 0.75/0.25 = 0.75; noise keeps 0.5 - 0.75*0.25/(2*0.75) = 0.375; std = sqrt(0.75*0.25)
    sde = flow_sde(x, velocity, before, after, level)
    assert (sde.mean.item(), sde.std.item()) == pytest.approx((0.3, math.sqrt(0.1875)))
    # half of pi/2: noise keeps 0.5 * cos(pi/4), 0.5 * sin(pi/4) of it is new
    cps = flow_cps(x, velocity, before, after, level)
    assert (cps.mean.item(), cps.std.item()) == pytest.approx((0.8 * 0.5 * math.sqrt(0.5), 0.5 * math.sqrt(0.5)))
    learned = flow_noise(x, velocity, before, after, column(0.1))
    assert (learned.mean.item(), learned.std.item()) == pytest.approx((0.4, 0.1))


def test_noise_of_every_step_is_what_the_public_code_adds() -> None:
    shares = TimeGrid.falling(4).shares
    before, after, zeros = shares[:-1, None, None], shares[1:, None, None], torch.zeros(4, 1, 1)
    sde = flow_sde(zeros, zeros, before, after, column(0.5)).std.flatten()
    assert sde[[0, 1, 3]].tolist() == pytest.approx([0.5, 0.4330127, 0.14433756], abs=1e-7)
    cps = flow_cps(zeros, zeros, before, after, column(0.3)).std.flatten()
    assert cps[[0, 1, 3]].tolist() == pytest.approx([0.3404929, 0.22699527, 0.0], abs=1e-7)


@pytest.mark.parametrize(("method", "width"), [(flow_sde, 0.5), (flow_sde, 0.0), (flow_cps, 0.0)])
def test_random_steps_keep_the_distributions_of_the_flow(method: Callable[..., Transition], width: float) -> None:
    # Data N(2, width^2): the velocity E[noise - data | x] is known. Whichever path the noise takes, half way it must be
    # half data and half noise, and the data in the end. (flow_cps is exact where the network knows the noise.)
    draw, grid = torch.Generator().manual_seed(0), TimeGrid.falling(200)
    x = torch.randn(20_000, 1, 1, generator=draw)
    for step in range(len(grid)):
        s, after = grid.shares[step], grid.shares[step + 1]
        if step == len(grid) // 2:
            assert x.mean().item() == pytest.approx(1.0, abs=0.02)
            assert x.std().item() == pytest.approx(math.hypot(0.5, 0.5 * width), abs=0.02)
        variance = s**2 + (1 - s) ** 2 * width**2
        velocity = -2.0 + (s - (1 - s) * width**2) / variance * (x - (1 - s) * 2.0)
        x = method(x, velocity, s, after, torch.tensor(0.5)).sample(torch.randn(x.shape, generator=draw))
    assert x.mean().item() == pytest.approx(2.0, abs=0.02) and x.std().item() == pytest.approx(width, abs=0.03)


def test_logprob_and_entropy_are_those_of_a_normal_distribution() -> None:
    mean, std, reached = torch.randn(3, 2, 4), torch.rand(3, 2, 4) + 0.1, torch.randn(3, 2, 4)
    normal, transition = torch.distributions.Normal(mean, std), Transition(mean, std)
    torch.testing.assert_close(transition.logprob(reached), normal.log_prob(reached))
    torch.testing.assert_close(transition.entropy(), normal.entropy())
    torch.testing.assert_close(prior(reached).logprob(reached), torch.distributions.Normal(0.0, 1.0).log_prob(reached))


def test_a_certain_step_has_logprob_zero_and_no_gradient() -> None:
    mean = torch.zeros(1, 1, 2, requires_grad=True)
    transition = Transition(mean, torch.tensor([[[0.0, 0.5]]]))
    logprob = transition.logprob(torch.ones(1, 1, 2))
    assert logprob[0, 0, 0] == 0 and transition.entropy()[0, 0, 0] == 0
    logprob.sum().backward()
    assert mean.grad is not None and mean.grad[0, 0].tolist() == pytest.approx([0.0, 4.0])


def test_learned_noise_stays_within_its_limits() -> None:
    network = NoiseNetwork(6, 3, low=0.08, high=0.16)
    std = network(torch.randn(5, 2, 6) * 1e3)
    assert std.shape == (5, 2, 3) and std.min() >= 0.0799 and std.max() <= 0.1601
    network.mlp[-1].weight.data.zero_(), network.mlp[-1].bias.data.zero_()
    assert network(torch.zeros(1, 1, 6))[0, 0, 0].item() == pytest.approx(math.sqrt(0.08 * 0.16))


def test_values_begin_near_zero() -> None:
    values = ValueHead(6, [16, 8])(torch.randn(50, 6))
    assert values.shape == (50,) and 0 < values.abs().max() < 0.3


class Plain(FlowPolicy):
    """Knows no network: what is drawn depends on none."""

    def __init__(self) -> None:
        super().__init__(FlowConfig(name="plain", denoising_steps=2), None, 1)
        self.set_up_flow(TimeGrid.falling(2), horizon=3, action_dim=2, width=4, value_width=4)

    def condition(self, inputs: Any) -> Any:
        raise NotImplementedError

    denoise = value_features = finish = sft_targets = learning_times = condition
    naming = property(condition)


def test_times_of_imitation_follow_a_beta_distribution() -> None:
    """Beta(1.5, 1) has the distribution function x^1.5: Kolmogorov's distance of 100,000 draws is below 0.006 but once
    in a thousand times, and the seed is fixed."""
    draws = Plain().imitation_draws(100_000, torch.Generator().manual_seed(0))
    times = draws["time"].double().sort().values
    assert times[0] >= 0 and times[-1] <= 1
    steps = torch.arange(1, len(times) + 1, dtype=torch.float64) / len(times)
    assert float((times.pow(1.5) - steps).abs().max()) < 0.006
    assert times.mean().item() == pytest.approx(1.5 / 2.5, abs=0.003)


def test_noise_of_imitation_is_normal_and_no_other_time_s() -> None:
    draws = Plain().imitation_draws(20_000, torch.Generator().manual_seed(0))
    noise = draws["noise"]
    assert noise.shape == (20_000, 3, 2)
    assert noise.mean(0).abs().max() < 0.03 and (noise.std(0) - 1.0).abs().max() < 0.03
    together = torch.cat([noise.flatten(1), draws["time"][:, None]], dim=1).T.corrcoef()
    assert (together - torch.eye(7)).abs().max() < 0.03


# ---- real-time chunking


def test_weights_of_plans_are_those_of_the_paper() -> None:
    # Horizon 8, asked for 3 steps ago, there in 2: 8 - 3 = 5 steps are planned, of which 2 are executed anyway.
    shares = [1.0, 3 / 4, 2 / 4, 1 / 4]  # (5 - i) / (5 - 2 + 1) for i = 1 .. 4
    soft = [share * (math.exp(share) - 1) / (math.e - 1) for share in shares]
    wanted = [1.0, 1.0, *soft[1:], 0.0, 0.0, 0.0]
    assert plan_weights(8, torch.tensor([3]), torch.tensor([2]))[0].tolist() == pytest.approx(wanted)
    assert plan_weights(8, torch.tensor([8]), torch.tensor([0]))[0].tolist() == [0.0] * 8  # nothing is planned


def test_guidance_is_strongest_at_the_ends_and_limited() -> None:
    # Time 0.25 of the paper, r^2 = 0.75^2 / (0.25^2 + 0.75^2): (1 - 0.25) / (0.25 r^2) = 10 / 3.
    assert guidance_weight(torch.tensor([0.75, 0.5, 1.0]), 5.0).tolist() == pytest.approx([10 / 3, 2.0, 5.0])


class _Linear(FlowPolicy):
    """A flow whose velocity is a product with a matrix, so that its gradient is known."""

    def __init__(self, matrix: torch.Tensor, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = FlowConfig(name="linear", **options)
        self.matrix, self.grid = torch.nn.Parameter(matrix), TimeGrid.falling(4)
        self.register_buffer("start", torch.zeros(3, 2))

    def denoise(self, condition: Any, x: torch.Tensor, time: torch.Tensor) -> Any:
        return Denoised((x.flatten(1) @ self.matrix).view_as(x), x)


for _name in FlowPolicy.__abstractmethods__ - {"denoise"}:
    setattr(_Linear, _name, None)
_Linear.__abstractmethods__ = frozenset()


def test_a_guided_velocity_is_that_of_the_formula() -> None:
    draw = torch.Generator().manual_seed(1)
    matrix, x, plan = (torch.randn(*size, generator=draw) for size in ((6, 6), (2, 3, 2), (2, 3, 2)))
    weights, share = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]), 0.75
    policy = _Linear(matrix, rtc=5.0)
    with torch.inference_mode(), guidable({PLAN: plan, PLAN_WEIGHTS: weights}) as inputs:
        found = policy.guided(None, x.clone(), torch.tensor([share] * 2), torch.full((2, 1, 1), share), inputs).velocity
    # data = x - share * x M, so its derivative is 1 - share * M; velocities point away from the data.
    velocity, flat = x.flatten(1) @ matrix, x.flatten(1)
    missing = (plan.flatten(1) - (flat - share * velocity)) * weights.repeat_interleave(2, 1)
    wanted = velocity - 10 / 3 * missing @ (torch.eye(6) - share * matrix).T
    torch.testing.assert_close(found.flatten(1), wanted)
    torch.testing.assert_close(found[1].flatten(), velocity[1])  # nothing is planned there
    assert not found.requires_grad and policy.matrix.grad is None
