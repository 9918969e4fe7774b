"""Plans of runs whose critics look for themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodyrl.config import load_config
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.replay.critic_encoder import CODE_SIZE, EYE, LARGEST_SIDE, CriticEncoder
from embodyrl.models.critics.network import Critics
from embodyrl.planning.planner import Limits, Planner, assumed_spec

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

MY = """
defaults: [env: metaworld/faucets, model: pi0, algorithm: iql, _self_]
model: {state: none, scratch: {layers: 2}}
rollout: {chunk_size: 4, num_chunks: 4}
data: {path: somewhere}
algorithm: {off_policy: {batch_size: 32, replay: {capacity: 100, start_after: 32}, critics: {hidden_sizes: [32]}}}
"""


def test_plans_have_room_for_critics_their_encoder_and_a_policy_that_learns(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(MY)
    config = load_config(str(tmp_path / "my.yaml"), [], not_needed=[("data", "path")]).config
    plan = Planner(Limits(cuda=False, gpu=None, host=None), 1, None).plan(config)
    spec = assumed_spec(config)
    onlooker = CriticEncoder(spec, 4, seed=1)
    encoder = sum(each.numel() for each in onlooker.parameters())
    assert onlooker.feature_dim == CODE_SIZE + spec.proprio_dim + EYE.image_features and LARGEST_SIDE == 64
    inputs = onlooker.feature_dim + 4 * spec.action_dim
    critics = Critics(inputs, CriticsConfig(hidden_sizes=[32]), torch.Generator())
    weights = sum(each.numel() for each in critics.parameters())
    need = plan["needs"]["host"]["train"]
    assert need["critics"] == round(4 * (5 * weights + 4 * encoder) / 2**20, 2)
    assert need["gradients"] > 0 and need["optimiser"] > 0, "the policy learns, too"
    row = 64 * 64 * 3 + 4 * (spec.proprio_dim + 4 * spec.action_dim) + 8 + 4 * 5 + 3
    assert need["replay"] == round(100 * row / 2**20, 2), "with the task of each decision"
