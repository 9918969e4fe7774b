"""docs/recipes.md: its hours and costs are what its formula makes of the configs that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embodyrl.config import ConfigUse, load_config

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
SPEED = {"SmolVLA": 0.066}
"""PFLOP/s of the GPU that a recipe assumes, where it is not an H100."""
PRICE = {"SmolVLA": 0.5}
WORK = {
    "OpenVLA-OFT, adapters": ("libero_spatial_grpo_openvla_oft", 4.91, 9.95),
    "OpenVLA-OFT, all weights": ("libero_spatial_grpo_openvla_oft", 4.91, 14.7),
    "pi0.5": ("libero_10_ppo_pi05", 3.07, 3.07),
    "GR00T N1.5": ("libero_spatial_ppo_gr00t", 1.60, 3 * 1.60),
    "GR00T N1.7": ("libero_spatial_ppo_gr00t_n17", 0.97, 0.90),
    "pi0-FAST": ("libero_spatial_grpo_pi0_fast", 5.70, 11.5),
    "SmolVLA": ("libero_spatial_grpo_smolvla", 0.52, 0.08),
}
"""By recipe: experiment, TFLOP of a decision and of a learned sample, as the page has them."""


def rows() -> list[list[str]]:
    """The cells of each row of the table of hours and costs."""
    table = PAGE.partition("| recipe | GPUs | PFLOP an iteration")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: f"{cells[0]}, {cells[1]}")
def test_hours_and_costs_follow_from_the_formula_and_the_configs(cells: list[str]) -> None:
    name, (gpus, pflop, steps, seconds, iterations, hours, cost) = (
        cells[0],
        (float(re.sub(r"[$,]", "", cell)) for cell in cells[1:]),
    )
    experiment, decision, sample = WORK[name]
    config = load_config(experiment, use=ConfigUse.elsewhere).config
    episodes = config.env.num_envs * config.rollout.episodes_per_slot
    decisions = episodes * config.rollout.num_chunks
    assert pflop == pytest.approx(decisions * (decision + config.algorithm.epochs * sample) / 1000, abs=0.06)
    assert steps == episodes * (config.env.max_episode_steps or 0)
    found = pflop / (gpus * SPEED.get(name, 0.3956)) + steps * 0.0227 / (gpus * 16)
    assert seconds == pytest.approx(found, abs=0.6)
    assert hours == pytest.approx(iterations * found / 3600, abs=0.06)
    assert cost == pytest.approx(hours * gpus * PRICE.get(name, 3.0), abs=1.5)
    assert iterations in (config.run.iterations, 400)
    rounded = {f"{hours:.1f}", f"{hours:.0f}"} & set(re.findall(r"[\d.]+", PAGE.partition("Before any of them")[0]))
    assert rounded, f"the first table lacks the {hours} hours"
