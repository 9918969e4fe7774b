"""Steer a tiny frozen pi0 through its noise, beside GRPO with as many decisions, which changes its weights.

For every seed: demonstrations and tiny_pi0_sft as in tiny_vla.py, then tiny_pi0_dsrl, and tiny_pi0_grpo with a schedule
that ends after about as many decisions. Seconds of demonstrations and supervised learning are those of both. Parts that
are in the folder already are not made again.

    python benchmarks/tiny_dsrl.py --seeds 1 2 3 --work DIR      # writes benchmarks/results/tiny_dsrl.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, once, success
from tiny_vla_report import RESULTS

GRPO_ITERATIONS = 20
"""Of 64 episodes of up to eight chunks: about 10,000 decisions."""
SAMPLED = "eval.sample=true"


def evaluations(run: Path) -> dict[str, float]:
    """Success of a run by iteration."""
    summary = json.loads((run / "summary.json").read_text())
    return {step: each["eval/success_once"] for step, each in summary["evaluations"].items()}


def decisions(run: Path) -> int:
    """Chunks of four actions that a run has executed, those that an end cut short not counted as whole ones."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return round(max(float(row.get("env/total_steps", 0.0)) for row in rows) / 4)


def supervised(common: list[str], work: Path, seconds: Seconds, model: str = "pi0") -> Path:
    """Make what is not there yet of demonstrations and supervised learning of a tiny model; returns the run."""
    demonstrations, sft = work / "demonstrations", work / "sft"
    first = [f"tiny_{model}_sft", *common, f"data.path={demonstrations}"]
    recording = ["env.end_at_success=false", "--episodes", "300", "--pushes", "1.5", "--after-success", "3"]
    once(demonstrations, seconds, "collect", *first, *recording)
    once(sft, seconds, "run", *first, f"run.dir={sft}")
    return sft


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    dsrl, grpo = work / "dsrl", work / "grpo"
    seconds: Seconds = {}
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    sft = supervised(common, work, seconds)
    second = [*common, f"model.checkpoint={sft}/checkpoints/last/policy"]
    once(dsrl, seconds, "run", "tiny_pi0_dsrl", *second, f"run.dir={dsrl}")
    brief = [f"run.iterations={GRPO_ITERATIONS}", "run.eval_every=0"]
    once(grpo, seconds, "run", "tiny_pi0_grpo", *second, *brief, f"run.dir={grpo}")
    return {
        "seed": seed,
        "decisions": {"dsrl": decisions(dsrl), "grpo": decisions(grpo)},
        "dsrl": evaluations(dsrl),
        "sampled": {"sft": success(sft, SAMPLED), "dsrl": success(dsrl, SAMPLED), "grpo": success(grpo, SAMPLED)},
        "seconds": seconds,
    }


def every_seed(one_seed: Callable[[int, Path], dict[str, Any]], about: str | None, results: str) -> None:
    """Run a function for every seed asked for on the command line, and write what it returns to a file of results."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="folder for demonstrations and runs")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        rows.append(one_seed(seed, arguments.work / f"seed{seed}"))
        (RESULTS / results).write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    every_seed(one_seed, __doc__, "tiny_dsrl.json")
