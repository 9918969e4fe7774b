"""Draw the figures of docs/results and of the README from the committed results, with legends and 95 % intervals.

    python benchmarks/figures.py

Needs `embodyrl[figures]`. The same numbers give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import robustness as robustness_runs
from algorithms_report import TITLES
from sac_report import GOAL, NAMES
from tiny_vla_report import SMOOTHED, smoothed

from embodyrl.tracking.intervals import wilson_interval
from embodyrl.tracking.report.figures import draw, figure, save
from embodyrl.tracking.report.series import COLOURS, Series

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
MODELS = {
    "tiny_vla": "OpenVLA-OFT, GRPO",
    "tiny_pi0": "pi0, GRPO",
    "tiny_pi0_fast": "pi0-FAST, GRPO",
    "tiny_gr00t": "GR00T N1.5, GRPO",
    "tiny_gr00t_n17": "GR00T N1.7, GRPO",
    "tiny_smolvla": "SmolVLA, GRPO",
    "tiny_act": "ACT, PPO",
}
"""Results of tiny_vla.py, and what was trained how."""
TIMES = (("after demonstrations", 0, COLOURS[7]), ("after reinforcement learning", -1, COLOURS[0]))
"""Evaluations that are compared: name, place among those of a seed, colour."""
ROBUST = {
    "plain": "trained plainly",
    "perturbed": "trained under camera + light",
    "cnn": "CNN, PPO from images",
    "smolvla": "tiny SmolVLA, demonstrations and GRPO",
}
"""Names of what robustness.py compares."""
COLUMNS = 4
"""Panels side by side."""

Row = dict[str, Any]


def read(name: str) -> Row:
    """Return a committed result."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def by_seed(name: str, rows: Sequence[Row], episodes: int) -> None:
    """Success over iterations: a line for the training of each seed, points with intervals for its evaluations."""
    found = []
    for number, row in enumerate(rows):
        rates = [(int(at), rate) for at, rate in row["success"].items()]
        found.append(line("", smoothed(row["training"]), number, faint=True))
        found.append(points(f"seed {row['seed']}", rates, episodes, number))
    with figure(size=(6.2, 3.2)) as (drawn, axes):
        draw(axes, found, x_label="iteration", percent=True, whole=True)
        axes.set_ylabel("success")
        axes.set_title(
            f"points: evaluations, {episodes} episodes each, 95 % intervals; lines: training, means of {SMOOTHED}",
            fontsize=8,
            loc="left",
        )
        save(drawn, PAGES / f"{name}.svg")


def line(name: str, places: Sequence[tuple[float, float]], colour: int, *, faint: bool = False) -> Series:
    """Return a line through `(x, y)`."""
    x, y = [at for at, _ in places], [value for _, value in places]
    return Series(name=name, x=x, y=y, iterations=[0] * len(x), colour=colour, faint=faint)


def points(name: str, places: Sequence[tuple[float, float]], episodes: int, colour: int) -> Series:
    """Return success rates of so many episodes, with their intervals."""
    rates = [rate for _, rate in places]
    bounds = [wilson_interval(round(rate * episodes), episodes) for rate in rates]
    return Series(
        name=name,
        x=[at for at, _ in places],
        y=rates,
        iterations=[0] * len(rates),
        low=[low for low, _ in bounds],
        high=[high for _, high in bounds],
        points=True,
        colour=colour,
    )


def algorithms() -> None:
    """A panel per algorithm, all with the same axes: a line per seed, and the interval of its last evaluation."""
    groups = {name: list(rows) for name, rows in groupby(read("algorithms")["runs"], key=lambda row: row["algorithm"])}
    rows = -(-len(groups) // COLUMNS)
    with figure(rows, COLUMNS, size=(9.4, 2.1 * rows), sharex=True, sharey=True) as (drawn, panels):
        for axes, (name, runs) in zip(panels.flat, groups.items(), strict=False):
            for row in runs:
                colour = COLOURS[row["seed"] - 1]
                axes.plot(*zip(*row["curve"], strict=True), color=colour, lw=1.3, label=f"seed {row['seed']}")
                final = row["final"]
                bars = [[final["once"] - final["low"]], [final["high"] - final["once"]]]
                axes.errorbar([row["env_steps"]], [final["once"]], yerr=bars, color=colour, fmt="o", ms=3.5, capsize=2)
            axes.set_title(TITLES[name], fontsize=9)
            axes.set_ylim(-0.03, 1.04)
            axes.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:.0f}k")
            axes.yaxis.set_major_formatter(lambda rate, _: f"{100 * rate:.0f} %")
        for axes in panels.flat[len(groups) :]:
            axes.set_axis_off()
        drawn.supxlabel("env steps", fontsize=9)
        drawn.supylabel("success", fontsize=9)
        handles, labels = panels.flat[0].get_legend_handles_labels()
        if rows * COLUMNS > len(groups):
            panels.flat[-1].legend(
                handles, labels, loc="center", title="points: 200 held-out episodes,\n95 % intervals"
            )
        save(drawn, PAGES / "algorithms.svg")


def soft_actor_critic() -> None:
    """Success over env steps, a line per seed, beside Stable-Baselines3."""
    found = read("sac")
    episodes = found["episodes"]["metaworld_reach_sac"]
    runs = [run for run in found["runs"] if run["job"] == "metaworld_reach_sac"]
    series = []
    for number, (who, name) in enumerate(NAMES.items()):
        for seed, run in enumerate(each for each in runs if each["who"] == who):
            places = [(point["env_steps"], point["success"]) for point in run["points"]]
            series.append(points(name if seed == 0 else "", places, episodes, number))
            series.append(line("", places, number, faint=True))
    with figure(size=(6.2, 3.2)) as (drawn, axes):
        axes.axhline(GOAL, color="#8a94a6", lw=0.8, ls="--")
        draw(axes, series, x_label="env steps", percent=True, whole=True)
        axes.set_ylabel("success")
        axes.set_title(
            f"{episodes} episodes per point, 95 % intervals; a line per seed; dashed: {GOAL:.0%}",
            fontsize=8,
            loc="left",
        )
        save(drawn, PAGES / "sac.svg")


def overview() -> None:
    """Success of small vision-language-action models before and after reinforcement learning, for the README."""
    with figure(size=(6.6, 3.5)) as (drawn, axes):
        for place, name in enumerate(reversed(MODELS)):
            rows = read(name)["seeds"]
            for label, at, colour in TIMES:
                rates = [list(row["success"].values())[at] for row in rows]
                successes = [round(rate * row["episodes"]) for rate, row in zip(rates, rows, strict=True)]
                low, high = wilson_interval(sum(successes), sum(row["episodes"] for row in rows))
                mean = sum(rates) / len(rates)
                style = {"fmt": "o", "ms": 6, "capsize": 3, "lw": 1.6, "color": colour}
                axes.errorbar([mean], [place], xerr=[[mean - low], [high - mean]], label=label, **style)
                axes.plot(rates, [place - 0.22] * len(rates), "|", color=colour, ms=6)
        axes.set_yticks(range(len(MODELS)), list(reversed(MODELS.values())))
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(-0.6, len(MODELS) - 0.4)
        axes.grid(axis="x")
        axes.xaxis.set_major_formatter(lambda rate, _: f"{100 * rate:.0f} %")
        axes.set_xlabel("success on held-out start states (256 episodes per seed; ticks: seeds; 95 % intervals)")
        handles, labels = axes.get_legend_handles_labels()
        drawn.legend(handles[:2], labels[:2], loc="outside upper center", ncols=2)
        save(drawn, PAGES / "overview.svg")


def robustness() -> None:
    """A panel per model: success of both ways of training under each perturbation, with the seeds as ticks."""
    with figure(1, len(robustness_runs.EXPERIMENT), size=(9.4, 3.6), sharey=True) as (drawn, panels):
        for axes, model in zip(panels.flat, robustness_runs.EXPERIMENT, strict=True):
            runs = read(f"robustness_{model}")["runs"]
            for number, trained in enumerate(robustness_runs.TRAINED):
                rates = robustness_runs.success(runs, trained)
                places, colour = [at + 0.4 * number - 0.2 for at in range(len(rates))], COLOURS[(7, 0)[number]]
                means = [sum(each) / len(each) for each in rates.values()]
                axes.bar(places, means, 0.38, color=colour, alpha=0.75, label=ROBUST[trained])
                for place, each in zip(places, rates.values(), strict=True):
                    axes.plot([place] * len(each), each, "_", color="#2b3240", ms=6)
                axes.set_xticks(range(len(rates)), list(rates), rotation=60, ha="right")
            axes.set_title(ROBUST[model], fontsize=9)
            axes.set_ylim(0.0, 1.04)
            axes.yaxis.set_major_formatter(lambda rate, _: f"{100 * rate:.0f} %")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=2)
        save(drawn, PAGES / "robustness.svg")


def speed() -> dict[str, float]:
    """How many times as fast we are, by what is done and who else does it."""
    evaluated, of_metaworld = (read(f"evaluation_loops_{name}")["against"] for name in ("libero", "metaworld"))
    moved = {(row["contender"], row["processes"]): row["cpu_us"] for row in read("transport")["per_env_step"]}
    main_job, soft = read("vs_sb3"), read("sac_update")["median"]
    in_two = moved["EnvManager, 8 environments in fewer processes", 2]
    return {
        "evaluate LIBERO, chunks of 8: LeRobot": evaluated["embodyrl, chunks of 8"]["lerobot"],
        "evaluate LIBERO, chunks of 8: vla-eval": evaluated["embodyrl, chunks of 8"]["vla-eval"],
        "evaluate LIBERO, an image per action: LeRobot": evaluated["embodyrl, chunks of 1"]["lerobot"],
        "evaluate LIBERO, an image per action: vla-eval": evaluated["embodyrl, chunks of 1"]["vla-eval"],
        "evaluate MetaWorld, chunks of 8: LeRobot": of_metaworld["embodyrl, chunks of 8"]["lerobot"],
        "evaluate MetaWorld, an image per action: LeRobot": of_metaworld["embodyrl, chunks of 1"]["lerobot"],
        "move images of 8 envs, ours in 2 processes: Gymnasium": moved["gymnasium AsyncVectorEnv", 8] / in_two,
        "move images, 8 processes each: Gymnasium": moved["gymnasium AsyncVectorEnv", 8] / moved["EnvManager", 8],
        "move images, 8 processes each: Stable-Baselines3": moved["Stable-Baselines3 SubprocVecEnv", 8]
        / moved["EnvManager", 8],
        "PPO on MetaWorld as it comes: Stable-Baselines3": main_job["against_sb3"]["ratio"],
        "PPO on our MetaWorld: Stable-Baselines3": main_job["against_sb3_on_our_env"]["ratio"],
        "an update of PPO: Stable-Baselines3": read("ppo_update_256_128")["ratio"],
        "an update of SAC: Stable-Baselines3": soft["Stable-Baselines3, 2 x 256, batch 256"]["cpu_ms"]
        / soft["embodyrl, 2 x 256, batch 256"]["cpu_ms"],
    }


def performance() -> None:
    """Bars: how many times as fast we are as others."""
    found = speed()
    with figure(size=(7.0, 4.1)) as (drawn, axes):
        places = range(len(found) - 1, -1, -1)
        axes.barh(places, list(found.values()), 0.62, color=COLOURS[0], alpha=0.8)
        for place, ratio in zip(places, found.values(), strict=True):
            axes.text(ratio * 1.04, place, f"{ratio:.1f} x", va="center", fontsize=8)
        axes.axvline(1.0, color="#2b3240", lw=1.0)
        axes.set_xscale("log")
        axes.set_xlim(0.7, 1.7 * max(found.values()))
        axes.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axes.minorticks_off()
        axes.set_yticks(places, list(found), fontsize=8)
        axes.set_xlabel("times as fast as the other")
        save(drawn, PAGES / "performance.svg")


def main() -> None:
    """Draw all."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in MODELS:
        rows = read(name)["seeds"]
        by_seed(name, rows, rows[0]["episodes"])
    by_seed("metaworld_reach_cnn", read("cnn_reach")["seeds"], 256)
    algorithms()
    soft_actor_critic()
    overview()
    robustness()
    performance()


if __name__ == "__main__":
    main()
