"""Options of the MLP policy. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.infos import ModelInfo
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.needs import Learns
from embodyrl.config.rules import acts_by_choice, needs_of_all, on_policy_algorithms, replay_of
from embodyrl.config.schema import WIDEST_LAYER, Config, ModelConfig, setting
from embodyrl.models.mlp.check import check_saved


class Activation(StrEnum):
    """Nonlinearity between the layers."""

    tanh = "tanh"
    relu = "relu"
    elu = "elu"


class Distribution(StrEnum):
    """Distribution of continuous actions."""

    gaussian = "gaussian"
    squashed = "squashed"
    flow = "flow"
    one_step = "one_step"


OFFERS = {
    Distribution.gaussian: (Learns.likelihood, Learns.imitation, Learns.weighted_imitation),
    Distribution.squashed: (Learns.reparameterization, Learns.imitation, Learns.weighted_imitation),
    Distribution.flow: (Learns.flow, Learns.imitation),
    Distribution.one_step: (Learns.one_step, Learns.imitation),
}
"""What a policy with each head can be learned by."""
LEARNED = {
    Learns.likelihood: "by the likelihood of actions, and a value network",
    Learns.reparameterization: "actions that are differentiable functions of noise, with a density",
    Learns.weighted_imitation: "to imitate each action by its weight",
    Learns.flow: "a network of velocities, and chooses among the chunks that it makes of noise",
    Learns.one_step: "a network of velocities, and one that does in one step what it does in several",
}
"""What each of these is, for people."""
WHY_NOT = {
    (Distribution.gaussian, Learns.reparameterization): "algorithm {name!r} learns from a replay, for which model.head "
    "= 'gaussian' does not serve: its spread ignores the observation, and it leaves the action range",
    (Distribution.squashed, Learns.likelihood): "model.head = 'squashed' has no value network and no entropy in closed "
    "form, which algorithm {name!r} learns with",
}
"""More exactly, where most people meet it."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """A distribution of actions behind a small network."""

    activation: Activation = setting(Activation.tanh)
    """Nonlinearity between its layers."""
    head: Distribution = setting(Distribution.gaussian)
    """Distribution of continuous actions. gaussian: Gaussians whose standard deviations do not depend on the
    observation, clipped to the action range; for PPO and its relatives. squashed: Gaussians whose standard deviations
    do, squeezed into the action range by tanh; for algorithms that learn from a replay (sac), whose critics take the
    place of the value network. flow: no Gaussians, but a network of velocities that makes chunks of noise, whatever
    their distribution; for imitation, and for methods whose critics choose among chunks. one_step: besides, a network
    that does it in one step, by which the policy acts; for imitation, and for methods whose critics teach it."""
    denoising_steps: int = setting(10, low=1, high=1000, only_with={"head": ("flow", "one_step")})
    """Steps from noise to a chunk."""
    log_std_init: float = setting(-0.5, low=-5.0, high=2.0)
    """Start value of the exploration noise's log standard deviation, in units of half the action range (squashed:
    before tanh). Discrete actions have no such noise."""

    @property
    def is_flow(self) -> bool:
        """Whether chunks are made of noise by a network of velocities."""
        return self.head in (Distribution.flow, Distribution.one_step)


@dataclass(frozen=True, kw_only=True)
class MLPConfig(HeadConfig):
    """A policy and a value function, each a small network on the state observation."""

    hidden_sizes: list[int] = setting([128, 128], low=1, high=WIDEST_LAYER)
    """Widths of the hidden layers, of the policy and of the value network."""
    normalize_observations: bool = setting(True)
    """Scale observations by a running mean and standard deviation, updated once per iteration and saved with the
    policy. With a replay they begin with the decisions before learning."""


class MLPInfo(ModelInfo):
    """The MLP policy."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Check that the distribution of actions is one that the algorithm can learn, and that a replay keeps no images
        for nothing."""
        yield from check_head(config)
        yield from check_saved(config)
        if config.env.cameras and replay_of(config) is not None:
            yield ConfigIssue(
                ("env.cameras", "model.name"),
                f"env.cameras = {config.env.cameras}, so that the replay would keep images, but model 'mlp' reads "
                "states alone",
                "set env.cameras to [] (videos do without), or model to cnn",
            )


def check_head(config: Config) -> Iterator[ConfigIssue]:
    """Check that the distribution of actions is one that the algorithm can learn."""
    settings, learns = config.model, config.algorithm.needs(config).learns
    assert isinstance(settings, HeadConfig)
    head = settings.head
    # Of choices the simulator's rules say more, and other methods learn no actions.
    if learns not in LEARNED or learns in OFFERS[head] or (head is Distribution.gaussian and acts_by_choice(config)):
        return
    serving = [each.value for each, offered in OFFERS.items() if learns in offered]
    able = [name for name, needs in needs_of_all(config).items() if needs.learns in OFFERS[head]]
    others = on_policy_algorithms(config) if head is Distribution.gaussian else " or ".join(able)
    usual = f"algorithm {{name!r}} learns {LEARNED[learns]}, which model.head = {head.value!r} does not have"
    yield ConfigIssue(
        ("model.head", "algorithm.name"),
        WHY_NOT.get((head, learns), usual).format(name=config.algorithm.name),
        f"set model.head to {' or '.join(serving)}, or algorithm to {others}",
        fix={"model.head": LEAVE_OUT if serving[0] == Distribution.gaussian else serving[0]},
    )
