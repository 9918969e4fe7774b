"""Weights that turn into NaN while a run goes on: no simulator gets an action of theirs, and nothing is learned from
one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from counter_simulator import COUNTING
from known_numbers import make_collector

from embodyrl.config.build import build_section
from embodyrl.config.schema import ModelConfig
from embodyrl.engine.guard import NumericsError
from embodyrl.models import build_policy
from embodyrl.registry import SupportedModel
from embodyrl.rollout.collector import Collector
from embodyrl.rollout.episodes import evaluation_episodes
from embodyrl.runner.evaluation import evaluate

PRISMATIC = {"scratch": {"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48}}
PI = {"denoising_steps": 2, "scratch": {"layers": 2}}
GR00T = {"denoising_steps": 2, "scratch": {"layers": 1, "action_layers": 2, "action_horizon": 4}}
MODELS = {
    "mlp": {},
    "mlp of choices": {},
    "openvla": PRISMATIC,
    "openvla_oft": PRISMATIC,
    "pi0": PI,
    "pi05": PI,
    "pi0_fast": {"scratch": {"layers": 2}},
    "gr00t": GR00T,
    "gr00t_n17": GR00T,
}


def collector_of(name: str) -> Any:
    """A collector with a tiny model that acts at random."""
    kind = name.partition(" ")[0]
    for requirement in SupportedModel.entry(kind).missing():
        pytest.skip(f"needs {requirement.module}: {requirement.install}")
    config = build_section(ModelConfig, {"name": kind} | MODELS[name])
    return make_collector(
        simulator="chooser" if "choices" in name else "counter",
        cameras=() if kind == "mlp" else ("front",),
        chunk_size=1 if kind == "openvla" else 2,
        num_chunks=2,
        policy=lambda simulator, chunk: build_policy(config, simulator, chunk_size=chunk, seed=1),
    )


def spoil(collector: Collector) -> None:
    with torch.no_grad():
        for parameter in collector.engine.policy.parameters():
            parameter.fill_(torch.nan)


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_nan_move_no_simulator(name: str) -> None:
    with collector_of(name) as collector:
        collector.collect()
        before = collector.manager.observe([0, 1, 2]).proprio.copy()
        spoil(collector)
        message = "after 0 updates .* for 3 of 3 envs .* tensors of weights are not finite themselves, .* Lower engine"
        with pytest.raises(NumericsError, match=message):
            collector.collect()
        assert np.array_equal(collector.manager.observe([0, 1, 2]).proprio, before)
        episodes = evaluation_episodes(COUNTING.sources, first_start_state=0, count=2, seed=1)
        with pytest.raises(NumericsError, match="for 2 of 2 envs"):
            evaluate(collector.manager, collector.engine, episodes)
        assert collector.manager.observe([0, 1]).proprio.tolist() == [[0, 0], [0, 0]], "no episode went on"


def test_numbers_of_finite_weights_are_blamed_on_what_went_in() -> None:
    with collector_of("mlp of choices") as collector:
        with torch.no_grad():
            collector.engine.policy.actor[-1].bias.fill_(3e38)
            collector.engine.policy.actor[-1].bias.mul_(torch.tensor([1.0, -1.0] * 5))
            collector.engine.policy.actor[-1].weight.fill_(3e38)
        with pytest.raises(NumericsError, match=r"its weights are finite\..* Check the observations"):
            collector.collect()
