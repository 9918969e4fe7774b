"""Write docs/results/sac.md from benchmarks/pages/sac.md and results: sac.json, sac_update.json, and those of
learning.py for the main job.

    python benchmarks/sac_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from embodyrl.tracking.intervals import wilson_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
PAGE = ROOT / "benchmarks" / "pages" / "sac.md"
GOAL = 0.9
QUANTILES = {3: 4.303, 5: 2.776}
"""97.5 % quantiles of Student's t, by the number of seeds."""
NAMES = {"embodyrl": "embodyrl", "sb3": "Stable-Baselines3"}


def reached(points: list[dict[str, float]]) -> dict[str, float] | None:
    """Return the first evaluation with the goal."""
    return next((point for point in points if point["success"] >= GOAL), None)


def interval(numbers: list[float]) -> str:
    """Return the mean of seeds with its 95 % interval, by Student's t."""
    half = QUANTILES[len(numbers)] * stdev(numbers) / len(numbers) ** 0.5
    return f"{mean(numbers):.0f} [{mean(numbers) - half:.0f}, {mean(numbers) + half:.0f}]"


def table_of_reach(runs: list[dict[str, Any]], episodes: int) -> str:
    """Return a row for each run."""
    lines = [
        f"| | seed | env steps to {GOAL:.2f} | success at the end |",
        "|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: (run["who"], run["seed"])):
        first, last = reached(run["points"]), run["points"][-1]
        low, high = wilson_interval(round(last["success"] * episodes), episodes)
        steps = f"{first['env_steps']:,.0f}" if first else "not"
        cells = (NAMES[run["who"]], str(run["seed"]), steps, f"{last['success']:.2f} [{low:.2f}, {high:.2f}]")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_returns(runs: list[dict[str, Any]]) -> str:
    """Return a row for each contender, with the returns of its seeds in the middle and at the end."""
    middle = len(runs[0]["points"]) // 2
    lines = [f"| | after {runs[0]['points'][middle]['env_steps']:,.0f} | at the end | mean |", "|---|---|---|---|"]
    for who, name in NAMES.items():
        own = [run["points"] for run in sorted(runs, key=lambda run: run["seed"]) if run["who"] == who]
        half, end = ([points[at]["return"] for points in own] for at in (middle, -1))
        cells = [", ".join(f"{each:.0f}" for each in column) for column in (half, end)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {interval(end)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the page; benchmarks/figures.py draws the diagram."""
    found = json.loads((RESULTS / "sac.json").read_text())
    update = json.loads((RESULTS / "sac_update.json").read_text())
    ppo = json.loads((RESULTS / "learning_metaworld_reach.json").read_text())["runs"]
    reach = [run for run in found["runs"] if run["job"] == "metaworld_reach_sac"]
    pendulum = [run for run in found["runs"] if run["job"] == "gym_pendulum_sac"]
    cartpole = [run for run in found["runs"] if run["job"] == "dm_control_swingup_sac"]
    half = next(iter(key for key in ppo[0]["success"] if key != "0"))
    assert all(run["success"][half] >= GOAL for run in ppo), "the page says so"
    every = reach[0]["points"][1]["env_steps"] - reach[0]["points"][0]["env_steps"]
    rows = [f"| {name} | {row['cpu_ms']:.1f} |" for name, row in update["median"].items()]
    text = PAGE.read_text().format(
        seeds=len({run["seed"] for run in reach}),
        episodes=found["episodes"]["metaworld_reach_sac"],
        goal=GOAL,
        every=round(every),
        reach=table_of_reach(reach, found["episodes"]["metaworld_reach_sac"]),
        ppo_steps=round(ppo[0]["env_steps"] * int(half) / max(map(int, ppo[0]["success"]))),
        ours_share=median(
            run["points"][-1]["seconds_of_updates"] / run["points"][-1]["seconds"]
            for run in reach
            if run["who"] == "embodyrl"
        ),
        pendulum_steps=round(pendulum[0]["points"][-1]["env_steps"]),
        pendulum=table_of_returns(pendulum),
        pendulum_episodes=found["episodes"]["gym_pendulum_sac"],
        cartpole_steps=round(cartpole[0]["points"][-1]["env_steps"]),
        cartpole_episodes=found["episodes"]["dm_control_swingup_sac"],
        cartpole=table_of_returns(cartpole),
        rounds=update["rounds"],
        updates=update["updates"],
        update="\n".join(["| | CPU [ms] |", "|---|---|", *rows]),
        ratio=update["ratio"],
        ratios=", ".join(f"{ratio:.2f}" for ratio in update["ratios"]),
    )
    (PAGES / "sac.md").write_text(text)


if __name__ == "__main__":
    main()
