"""Train policies plainly and under perturbations, and measure what each perturbation costs both.

For every seed: a CNN that learns MetaWorld reach by PPO (metaworld_reach_cnn), or a tiny SmolVLA that learns the two
faucets from demonstrations and then by GRPO (tiny_smolvla_sft, tiny_smolvla_grpo); each once as shipped and once with
`env.perturb` of camera and light, from the same seed and with as many steps. Both then play the same held-out episodes
with `embodyrl eval --robustness`. About 45 CPU minutes for each seed of the CNN, and 30 of SmolVLA. What is there is
kept, and what was stopped with Ctrl-C goes on with the same command.

    python benchmarks/robustness.py --model cnn --work DIR      # writes benchmarks/results/robustness_cnn.json
    python benchmarks/robustness.py --model smolvla --work DIR
    python benchmarks/robustness.py --report                    # writes docs/results/robustness.md
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tiny_vla import Seconds, once
from tiny_vla_report import PAGES, RESULTS, TEXTS, seeds_and_work

PERTURB = "env.perturb={camera: [1, 5], light: [1, 5], share: 0.5}"
EPISODES = 200
LEVEL = "4"
ITERATIONS = {"cnn": 30, "smolvla": 50}
EXPERIMENT = {"cnn": "metaworld_reach_cnn", "smolvla": "tiny_smolvla_grpo"}
TRAINED = ("plain", "perturbed")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided 95 % quantiles of Student's t for the mean of so many seeds."""

Row = dict[str, Any]


def one_run(model: str, seed: int, work: Path, trained: str) -> Row:
    """Train and evaluate one policy."""
    seconds: Seconds = {}
    changes = [PERTURB] if trained == "perturbed" else []
    common = [f"seed={seed}", "tracking.sinks=[jsonl]", "eval.sample=false"]
    start = []
    if model == "smolvla":
        demonstrations, sft = work / "demonstrations", work / "sft"
        first = ["tiny_smolvla_sft", *common, *changes, f"data.path={demonstrations}"]
        recording = ["env.end_at_success=false", "--episodes", "300", "--pushes", "1.5", "--after-success", "3"]
        once(demonstrations, seconds, "collect", *first, *recording)
        once(sft, seconds, "run", *first, f"run.dir={sft}")
        start = [f"model.checkpoint={sft}/checkpoints/last/policy"]
    run = work / "run"
    settings = [f"run.iterations={ITERATIONS[model]}", "run.eval_every=0", f"eval.episodes={EPISODES}"]
    words = ["run", EXPERIMENT[model], *common, *changes, *start, *settings, f"run.dir={run}"]
    once(run, seconds, *words)
    robustness = run / "robustness"
    once(robustness, seconds, "eval", str(run), "--robustness", "--levels", LEVEL)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "seed": seed,
        "trained": trained,
        "iterations": summary["iterations"],
        "env_steps": summary["env_steps"],
        "robustness": json.loads((robustness / "results.json").read_text())["robustness"],
        "seconds": seconds,
    }


# ---- the page


def success(runs: Sequence[Row], trained: str) -> dict[str, list[float]]:
    """Return the success of each seed by kind and level; `none` is without perturbation."""
    found: dict[str, list[float]] = {}
    for run in (each for each in runs if each["trained"] == trained):
        for row in run["robustness"]:
            name = "none" if row["kind"] is None else f"{row['kind']} {row['level']}"
            found.setdefault(name, []).append(row["success"])
    return found


def with_interval(values: Sequence[float]) -> str:
    """Return the mean over seeds with its 95 % interval [points of 100]."""
    half = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{100 * fmean(values):+.0f} ± {100 * half:.0f}"


def table(runs: Sequence[Row]) -> str:
    """Return what each perturbation costs both, and what training under some wins back."""
    plain, changed = (success(runs, trained) for trained in TRAINED)
    heads = ["", "trained plainly", "drop", "trained under camera + light", "drop", "gain"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in plain:
        cells = [name]
        for rates in (plain, changed):
            seeds = ", ".join(f"{100 * rate:.0f}" for rate in rates[name])
            lost = [without - rate for without, rate in zip(rates["none"], rates[name], strict=True)]
            cells += [f"**{100 * fmean(rates[name]):.0f}** ({seeds})", "" if name == "none" else with_interval(lost)]
        cells.append(with_interval([two - one for one, two in zip(plain[name], changed[name], strict=True)]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report() -> None:
    """Write the page from the committed numbers."""
    parts: dict[str, Any] = {"episodes": EPISODES}
    for model in EXPERIMENT:
        runs = json.loads((RESULTS / f"robustness_{model}.json").read_text())["runs"]
        parts[model] = table(runs)
    (PAGES / "robustness.md").write_text((TEXTS / "robustness.md").read_text().format(**parts))


def main() -> None:
    """Run all seeds, or write the page."""
    parser = seeds_and_work(__doc__)
    parser.add_argument("--model", choices=EXPERIMENT, default="cnn")
    asked = parser.parse_args()
    if asked.report:
        report()
        return
    rows = []
    for seed in asked.seeds:
        for trained in TRAINED:
            rows.append(one_run(asked.model, seed, asked.work / f"seed{seed}" / trained, trained))
            text = json.dumps({"perturb": PERTURB, "runs": rows}, indent=1)
            (RESULTS / f"robustness_{asked.model}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
