"""Train a CNN on MetaWorld reach-v3 from pixels alone: by reinforcement, from demonstrations, and by both in turn.

For every seed: PPO as shipped (metaworld_reach_cnn); 100 demonstrations of the scripted expert; supervised learning of
them (metaworld_reach_cnn_sft); PPO from there; and PPO from nothing, with as many environment steps as demonstrations
and that PPO have together. Final policies are also evaluated with black images. About fourteen minutes for
each seed on two cores.

    python benchmarks/cnn_reach.py --seeds 1 2 3 --work DIR       # writes benchmarks/results/cnn_reach.json
    python benchmarks/tiny_vla_controls.py DIR/seed?/whole --episodes 1024
        --out benchmarks/results/cnn_reach_controls.json          # in one line
    python benchmarks/cnn_reach.py --report                       # writes docs/results/metaworld_reach_cnn.md
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, timed
from tiny_vla_report import PAGES, RESULTS, SMOOTHED, TEXTS, seeds_and_work, smoothed

NAME = "metaworld_reach_cnn"
SHORT = 10
"""Iterations of PPO from nothing in the comparison with demonstrations."""
EPISODES = 256

Row = dict[str, Any]


def summary(run: Path) -> dict[str, Any]:
    """What a run says of itself."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def last_success(run: Path) -> float:
    """Success in a run's last evaluation."""
    evaluations = summary(run)["evaluations"]
    rate: float = evaluations[max(evaluations, key=int)]["eval/success_once"]
    return rate


def one_seed(seed: int, work: Path) -> Row:
    """Run all parts of a seed."""
    from tiny_vla_controls import success

    demonstrations = work / "demonstrations"
    whole, short, sft, both = (work / name for name in ("whole", "short", "sft", "both"))
    common, seconds = [f"seed={seed}", "tracking.sinks=[jsonl]"], Seconds()
    timed("ppo", seconds, "run", NAME, *common, f"run.dir={whole}")
    teaching = [f"{NAME}_sft", *common, f"data.path={demonstrations}"]
    timed("demonstrations", seconds, "collect", *teaching, "--episodes", "100", "--pushes", "1.5")
    timed("sft", seconds, "run", *teaching, f"run.dir={sft}")
    shown = json.loads((demonstrations / "meta" / "info.json").read_text())["total_frames"]
    per_iteration = summary(whole)["env_steps"] // summary(whole)["iterations"]
    # Rounded down: what follows demonstrations has no more steps, theirs included, than what it is compared with.
    left = (SHORT * per_iteration - shown) // per_iteration
    start = f"model.checkpoint={sft}/checkpoints/last/policy"
    brief = [*common, "run.eval_every=0"]
    timed("ppo after sft", seconds, "run", NAME, *brief, start, f"run.dir={both}", f"run.iterations={left}")
    timed("short ppo", seconds, "run", NAME, *brief, f"run.dir={short}", f"run.iterations={SHORT}")
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "success": {step: each["eval/success_once"] for step, each in summary(whole)["evaluations"].items()},
        "env_steps": summary(whole)["env_steps"],
        "training": [round(row["env/success_once"], 4) for row in rows if "env/success_once" in row],
        "compared": {
            "demonstrated_steps": shown,
            "steps": SHORT * per_iteration,
            "steps_with_sft": shown + left * per_iteration,
            "sft": last_success(sft),
            "ppo": last_success(short),
            "both": last_success(both),
        },
        "black_images": {run.name: success(run, EPISODES, blind=True) for run in (whole, sft, both)},
        "seconds": seconds,
    }


def report() -> None:
    """Write the page and its image from the committed numbers."""
    rows: list[Row] = json.loads((RESULTS / "cnn_reach.json").read_text())["seeds"]
    steps = list(rows[0]["success"])
    learned = table(
        ["seed", *(f"iteration {step}" for step in steps), "black images", "CPU-minutes", "minutes"],
        [
            [
                *(f"{row['success'][step]:.2f}" for step in steps),
                f"{row['black_images']['whole']:.2f}",
                *(f"{row['seconds']['ppo'][kind] / 60:.1f}" for kind in ("cpu", "wall")),
            ]
            for row in rows
        ],
        rows,
    )
    compared = table(
        ["seed", "demonstrations alone", "PPO alone", "PPO after demonstrations", "black images"],
        [
            [
                f"{row['compared']['sft']:.2f}",
                f"{row['compared']['ppo']:.2f}",
                f"**{row['compared']['both']:.2f}**",
                f"{row['black_images']['both']:.2f}",
            ]
            for row in rows
        ],
        rows,
    )
    constant = json.loads((RESULTS / "constant_motions.json").read_text())
    controls = json.loads((RESULTS / "cnn_reach_controls.json").read_text())
    text = (TEXTS / f"{NAME}.md").read_text()
    numbers = {
        "episodes": EPISODES,
        "env_steps": f"{rows[0]['env_steps']:,}",
        "ninety": " / ".join(f"{steps_until(0.9, row):,}" for row in rows),
        "motions": constant["motions"],
        "constant": constant["tasks"]["reach-v3"]["best"],
        "more_episodes": controls["episodes"],
        "more_black": ", ".join(f"{run['black images']:.2f}" for run in controls["runs"]),
        "steps": f"{rows[0]['compared']['steps']:,}",
        "shown": " / ".join(f"{row['compared']['demonstrated_steps']:,}" for row in rows),
    }
    (PAGES / f"{NAME}.md").write_text(text.format(learned=learned, compared=compared, **numbers))


def steps_until(rate: float, row: Row) -> int:
    """Environment steps until the smoothed success of training episodes reaches `rate`."""
    means = [mean for _, mean in smoothed(row["training"])]
    iterations = SMOOTHED + next(number for number, mean in enumerate(means) if mean >= rate)
    return iterations * int(row["env_steps"]) // len(row["training"])


def table(heads: list[str], cells: list[list[str]], rows: list[Row]) -> str:
    """A table with a line for each seed."""
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += [f"| {row['seed']} | " + " | ".join(each) + " |" for row, each in zip(rows, cells, strict=True)]
    return "\n".join(lines)


def main() -> None:
    """Run all seeds, or write the page."""
    arguments = seeds_and_work(__doc__).parse_args()
    if arguments.report:
        report()
        return
    results: dict[str, Any] = {"python": platform.python_version(), "seeds": []}
    for seed in arguments.seeds:
        results["seeds"].append(one_seed(seed, arguments.work / f"seed{seed}"))
        (RESULTS / "cnn_reach.json").write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["seeds"][-1]), flush=True)


if __name__ == "__main__":
    main()
