"""Engines that only act hold the weights and nothing to learn with."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.config import load_config
from embodyrl.envs import ActionField, SimulatorSpec

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

CONFIG = """\
defaults: [env: gym/pendulum_rgb, model: openvla_oft, algorithm: grpo, _self_]
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [48, 48]}
model: {dtype: bfloat16}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm: {minibatches: 2, kl_coef: 0.1}
"""


class Pendulum:
    """What an engine needs to know about simulators."""

    spec = SimulatorSpec(
        tasks={"Pendulum-v1": "swing the pendulum up"},
        actions=(ActionField(name="torque", meaning="native", unit="1", low=(-2.0,), high=(2.0,)),),
        proprio_dim=3,
        max_episode_steps=8,
        control_frequency=20.0,
        cameras=("render",),
        image_size=(48, 48),
    )


def test_it_has_no_reference_and_no_float32_copies_of_half_weights(tmp_path: Path) -> None:
    import torch

    from embodyrl.runner.build import build_acting, build_method

    (tmp_path / "run.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "run.yaml").config
    learning = build_method(config, Pendulum(), weights=None).engine
    acting = build_acting(config, Pendulum(), None)
    assert learning.reference is not None and acting.reference is None
    copies = [len(engine.optimizer.state_dict()["copies"]) for engine in (learning, acting)]
    assert copies[0] > 0 and copies[1] == 0
    pairs = zip(learning.policy.parameters(), acting.policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
