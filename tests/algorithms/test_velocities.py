"""Losses that compare velocities, and their gradients, against sums written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.velocities import (
    contrast_losses,
    contrasted_errors,
    flow_log_ratios,
    matching_errors,
    optimality,
    ranking_losses,
    trusted_surrogate,
)

M, T, N = 12, 3, 5


def given(seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    velocities = torch.randn(M, T, N, generator=draw).double()
    return {
        "velocities": velocities.requires_grad_(),
        "old_velocities": velocities.detach() + 0.8 * torch.randn(M, T, N, generator=draw).double(),
        "wanted": torch.randn(M, T, N, generator=draw).double(),
        "shares": torch.rand(M, T, generator=draw).double(),
        "executed": torch.arange(N)[None] < torch.tensor([5, 5, 2, 3] * 3)[:, None],
        "advantages": torch.tensor([1.3, -0.8, 0.4, -2.0] * 3).double(),
    }


def slope(losses: Tensor, velocities: Tensor) -> np.ndarray:
    return torch.autograd.grad(losses.sum(), velocities)[0].numpy()


@pytest.mark.parametrize("per_point", [True, False])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_fpo_by_hand(per_point: bool, asymmetric: bool) -> None:
    x, low, high = given(), 0.3, 0.5
    errors, old = (matching_errors(x[name], x["wanted"], x["executed"]) for name in ("velocities", "old_velocities"))
    log_ratios = flow_log_ratios(errors, old, per_point=per_point)
    found = trusted_surrogate(log_ratios, x["advantages"], low=low, high=high, asymmetric=asymmetric)
    v, v_old, u = (x[name].detach().numpy() for name in ("velocities", "old_velocities", "wanted"))
    by_hand, gradient, kinds = np.zeros(found.shape), np.zeros((M, T, N)), set()
    for m in range(M):
        count, gain = int(x["executed"][m].sum()), float(x["advantages"][m])
        logs = [
            sum((v_old[m, t, n] - u[m, t, n]) ** 2 - (v[m, t, n] - u[m, t, n]) ** 2 for n in range(count)) / count
            for t in range(T)
        ]
        for t in range(found.shape[1]):
            ratio = math.exp(logs[t] if per_point else sum(logs) / T)
            plain, cut = ratio * gain, min(max(ratio, 1 - low), 1 + high) * gain
            if asymmetric and gain < 0:
                value, factor, kind = plain - abs(gain) / (2 * low) * (ratio - 1) ** 2, 0.0, "pulled"
                factor = gain - abs(gain) / low * (ratio - 1)
            else:
                value, factor, kind = (plain, gain, "free") if plain <= cut else (cut, 0.0, "cut")
            by_hand[m, t] = -value
            kinds.add(kind)
            # d ratio / d v = ratio * -2 (v - u), of each point of which the ratio is a mean.
            for point in [t] if per_point else range(T):
                for n in range(count):
                    part = -factor * ratio * -2 * (v[m, point, n] - u[m, point, n]) / count
                    gradient[m, point, n] += part if per_point else part / T
    assert kinds == {"free", "cut"} | ({"pulled"} if asymmetric else set()), "too easy: a branch was not taken"
    assert np.abs(found.detach().numpy() - by_hand).max() < 1e-9
    assert np.abs(slope(found, x["velocities"]) - gradient).max() < 1e-9


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_negative_aware_losses_by_hand(adaptive: bool, strength: float) -> None:
    x, limit = given(), 1.5
    positive, negative = contrasted_errors(
        *(x[name] for name in ("velocities", "old_velocities", "wanted", "shares", "executed")),
        strength=strength,
        adaptive=adaptive,
    )
    optimal = optimality(x["advantages"], limit)
    found = contrast_losses(positive, negative, optimal, strength=strength)
    ranked = ranking_losses(positive, negative, x["advantages"], scale=0.7)
    names = ("velocities", "old_velocities", "wanted", "shares")
    v, v_old, u, s = (x[name].detach().numpy() for name in names)
    by_hand, ranked_by_hand = np.zeros((M, T)), np.zeros((M, T))
    gradient, ranked_gradient = np.zeros((M, T, N)), np.zeros((M, T, N))
    for m in range(M):
        count, gain = int(x["executed"][m].sum()), float(x["advantages"][m])
        good = 0.5 + 0.5 * min(max(gain / limit, -1.0), 1.0)
        for t in range(T):
            errors, slopes = [], []
            for sign in (1.0, -1.0):
                said = v_old[m, t] + sign * strength * (v[m, t] - v_old[m, t])
                off = s[m, t] * (said - u[m, t])[:count]
                size = float(np.abs(off).mean()) if adaptive else 1.0
                errors.append(float((off**2).mean()) / size)
                slopes.append(2.0 * off * s[m, t] * sign * strength / count / size)
            by_hand[m, t] = (good * errors[0] + (1 - good) * errors[1]) / strength
            gradient[m, t, :count] = (good * slopes[0] + (1 - good) * slopes[1]) / strength
            logit = 0.5 * 0.7 * gain * (errors[0] - errors[1])
            ranked_by_hand[m, t] = math.log1p(math.exp(logit))
            ranked_gradient[m, t, :count] = (1 / (1 + math.exp(-logit))) * 0.5 * 0.7 * gain * (slopes[0] - slopes[1])
    assert np.abs(found.detach().numpy() - by_hand).max() < 1e-9
    assert np.abs(ranked.detach().numpy() - ranked_by_hand).max() < 1e-9
    whole = torch.autograd.grad(found.sum(), x["velocities"], retain_graph=True)[0].numpy()
    assert np.abs(whole - gradient).max() < 1e-9
    assert np.abs(slope(ranked, x["velocities"]) - ranked_gradient).max() < 1e-9


def test_the_first_step_goes_towards_good_chunks_and_away_from_bad_ones() -> None:
    x = given()
    v = x["old_velocities"].clone().requires_grad_()
    same = (v, x["old_velocities"], x["wanted"], x["shares"], x["executed"])
    positive, negative = contrasted_errors(*same, strength=0.5, adaptive=False)
    assert torch.equal(positive, negative), "both are the old policy"
    losses = contrast_losses(positive, negative, optimality(x["advantages"], 1.0), strength=0.5)
    (gradient,) = torch.autograd.grad(losses.sum(), v)
    towards = ((x["wanted"] - v) * -gradient * x["executed"][:, None]).sum((1, 2))
    assert torch.equal(towards.sign(), x["advantages"].sign())
