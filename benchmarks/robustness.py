"""Train policies plainly and under perturbations, and measure what each perturbation costs both.

For every seed: a CNN that learns MetaWorld reach by PPO (metaworld_reach_cnn), or a tiny SmolVLA that learns the two
faucets from demonstrations and then by GRPO (tiny_smolvla_sft, tiny_smolvla_grpo); each once as shipped and once with
`env.perturb` of camera and light, from the same seed and with as many steps. Both then play the same held-out episodes
with `embodyrl eval --robustness`. About half an hour for each seed and model on two cores; what is there is kept, so a
run that was stopped goes on with the same command.

    python benchmarks/robustness.py --model cnn --work DIR      # writes benchmarks/results/robustness_cnn.json
    python benchmarks/robustness.py --model smolvla --work DIR
    python benchmarks/robustness.py --report                    # writes docs/results/robustness.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, timed
from tiny_vla_report import RESULTS

PERTURB = "env.perturb={camera: [1, 5], light: [1, 5], share: 0.5}"
EPISODES = 200
LEVELS = "3,5"
ITERATIONS = {"cnn": 30, "smolvla": 50}
EXPERIMENT = {"cnn": "metaworld_reach_cnn", "smolvla": "tiny_smolvla_grpo"}
TRAINED = ("plain", "perturbed")

Row = dict[str, Any]


def once(made: Path, seconds: Seconds, *words: str) -> None:
    """Run the program unless what it makes is there."""
    if not made.exists():
        timed(str(made.parent), seconds, *words)


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
        once(demonstrations / "meta" / "info.json", seconds, "collect", *first, *recording)
        once(sft / "summary.json", seconds, "run", *first, f"run.dir={sft}")
        start = [f"model.checkpoint={sft}/checkpoints/last/policy"]
    run = work / "run"
    settings = [f"run.iterations={ITERATIONS[model]}", "run.eval_every=0", f"eval.episodes={EPISODES}"]
    words = ["run", EXPERIMENT[model], *common, *changes, *start, *settings, f"run.dir={run}"]
    once(run / "summary.json", seconds, *words)
    results = run / "robustness" / "results.json"
    once(results, seconds, "eval", str(run), "--robustness", "--levels", LEVELS)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "seed": seed,
        "trained": trained,
        "iterations": summary["iterations"],
        "env_steps": summary["env_steps"],
        "robustness": json.loads(results.read_text())["robustness"],
        "seconds": seconds,
    }


def main() -> None:
    """Run all seeds, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--model", choices=EXPERIMENT, default="cnn")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--work", type=Path, help="folder for demonstrations and runs")
    what.add_argument("--report", action="store_true", help="write the page from what was measured")
    asked = parser.parse_args()
    rows = []
    for seed in asked.seeds:
        for trained in TRAINED:
            rows.append(one_run(asked.model, seed, asked.work / f"seed{seed}" / trained, trained))
            text = json.dumps({"perturb": PERTURB, "runs": rows}, indent=1)
            (RESULTS / f"robustness_{asked.model}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
