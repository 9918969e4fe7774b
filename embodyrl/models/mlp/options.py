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


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """A distribution of actions behind a small network."""

    activation: Activation = setting(Activation.tanh)
    """Nonlinearity between its layers."""
    head: Distribution = setting(Distribution.gaussian)
    """Distribution of continuous actions. gaussian: Gaussians whose standard deviations do not depend on the
    observation, clipped to the action range; for PPO and its relatives. squashed: Gaussians whose standard deviations
    do, squeezed into the action range by tanh; for algorithms that learn from a replay (sac), whose critics take the
    place of the value network."""
    log_std_init: float = setting(-0.5, low=-5.0, high=2.0)
    """Start value of the exploration noise's log standard deviation, in units of half the action range (squashed:
    before tanh). Discrete actions have no such noise."""


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
    squashed = settings.head is Distribution.squashed
    # Where it only imitates, both heads have a most likely action. Of choices the simulator's rules say more.
    if learns is Learns.reparameterization and not squashed and not acts_by_choice(config):
        yield ConfigIssue(
            ("model.head", "algorithm.name"),
            f"algorithm {config.algorithm.name!r} learns from a replay, for which model.head = 'gaussian' does not "
            "serve: its spread ignores the observation, and it leaves the action range",
            f"set model.head to squashed, or algorithm to {on_policy_algorithms(config)}",
            fix={"model.head": "squashed"},
        )
    if squashed and learns is Learns.likelihood:
        with_it = (Learns.reparameterization, Learns.weighted_imitation, Learns.imitation)
        able = [name for name, needs in needs_of_all(config).items() if needs.learns in with_it]
        yield ConfigIssue(
            ("model.head", "algorithm.name"),
            f"model.head = 'squashed' has no value network and no entropy in closed form, which algorithm "
            f"{config.algorithm.name!r} learns with",
            f"set model.head to gaussian, or algorithm to {' or '.join(able)}",
            fix={"model.head": LEAVE_OUT},
        )
