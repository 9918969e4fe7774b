"""CrossQ: renormalised batches by hand, one batch for what is and what follows, no slow copies, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from learning import LearningEngine, learning_engine

from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import EngineConfig, OptimizerConfig
from embodyrl.methods.crossq.config import CrossConfig, CrossQConfig, NormedCriticsConfig
from embodyrl.methods.crossq.critics import BatchRenorm
from embodyrl.models.mlp.options import Distribution, MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from tests.methods.test_td3 import SPEC, minibatch


def make_engine(**critics: Any) -> LearningEngine:
    torch.manual_seed(0)
    return learning_engine(
        MLPPolicy(MLPConfig(name="mlp", hidden_sizes=[16], head=Distribution.squashed), SPEC, 1),
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=100.0)),
        algorithm=CrossQConfig(
            name="crossq",
            off_policy=CrossConfig(critics=NormedCriticsConfig(hidden_sizes=[16, 8], **critics), actor_every=2),
        ),
        iterations=10,
        seed=1,
    )


def test_a_batch_is_renormalised_as_algorithm_1_says() -> None:
    norm = BatchRenorm(2, 3, NormedCriticsConfig(momentum=0.1, plain_updates=1)).double()
    draw = torch.Generator().manual_seed(1)
    running_mean, running_deviation = torch.zeros(2, 3).double(), torch.ones(2, 3).double()
    for update in range(3):
        x = (torch.randn(2, 50, 3, generator=draw).double() * 4.0 + 9.0).requires_grad_()
        found = norm.learned(x)
        mean, deviation = x.detach().mean(1), x.detach().var(1, correction=0).sqrt()
        scale = (deviation / running_deviation).clamp(1 / 3, 3.0) if update else torch.ones(2, 3)
        shift = ((mean - running_mean) / running_deviation).clamp(-5.0, 5.0) if update else torch.zeros(2, 3)
        unit = (x.detach() - mean[:, None]) / deviation[:, None]
        assert torch.allclose(found, unit * scale[:, None] + shift[:, None], atol=1e-6)
        # The gradient is that of the batch's own normalisation, times r, which is a constant.
        (gradient,) = torch.autograd.grad((found * x.detach()).sum(), x)
        weight = x.detach()
        by_hand = weight - weight.mean(1, keepdim=True) - unit * (weight * unit).mean(1, keepdim=True)
        assert torch.allclose(gradient, by_hand / deviation[:, None] * scale[:, None], atol=1e-6)
        running_mean, running_deviation = running_mean.lerp(mean, 0.1), running_deviation.lerp(deviation, 0.1)
        judged = norm.judged(x.detach())
        assert torch.allclose(judged, (x.detach() - running_mean[:, None]) / running_deviation[:, None], atol=1e-9)


def test_the_target_is_the_newest_critics_value_in_the_same_batch_and_carries_no_gradient() -> None:
    engine = make_engine()
    learner, found = engine.learner, minibatch()
    critics = copy.deepcopy(learner.critics)
    with torch.no_grad():
        noise = torch.randn(2, 32, 2, generator=copy.deepcopy(learner.noise))[0]
        seen = learner.encode(found)
        actions, logprobs = engine.policy.draw(seen.following, noise)
        values = critics(torch.cat([seen.features, seen.following]), torch.cat([seen.actions, actions]))
        soft = values[:, 32:].min(0).values - 0.01 * logprobs
        wanted = found.columns["rewards"].squeeze(1) + 0.99 * soft * ~found.columns["terminated"]
        loss = (values[:, :32] - wanted).square().sum(0).mean()
    assert learner.learn([found])["train/critic_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert learner.targets is learner.critics, "there are no slow copies"
    assert torch.equal(learner.critics.norms[0].updates, torch.tensor(1)), "one pass for both"


def test_a_resumed_learner_learns_the_same_bits() -> None:
    whole, again = make_engine(plain_updates=1), make_engine(plain_updates=1)
    whole.learner.learn([minibatch(1), minibatch(2)])
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        engine.learner.learn([minibatch(3), minibatch(4)])
    for one, other in ((whole.learner.critics, again.learner.critics), (whole.policy, again.policy)):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_settings_of_slow_copies_and_several_ranks_are_faults() -> None:
    settings = ["algorithm=crossq", "model.head=squashed"]
    assert load_config("experiment/gym_pendulum", settings).config.algorithm.name == "crossq"
    for name, value in (("tau", "0.01"), ("subset", "1"), ("layer_norm", "false")):
        with pytest.raises(ConfigError, match=f"critics.{name} is set, .* no slow copies"):
            load_config("experiment/gym_pendulum", [*settings, f"algorithm.off_policy.critics.{name}={value}"])
    with pytest.raises(ConfigError, match="statistics of whole minibatches"):
        load_config("experiment/gym_pendulum", [*settings, "engine.parallel.world_size=2"])
    with pytest.raises(ConfigError, match="differentiable functions of noise"):
        load_config("experiment/tiny_pi0_grpo", ["algorithm=crossq"])
