"""Learn from a tiny pi0's own recorded attempts by what they were worth, beside imitating all of them alike.

For every seed: demonstrations and tiny_pi0_sft as in tiny_vla.py, 300 sampled attempts of that policy, then
tiny_pi0_iql on these, and the same with an advantage scale of 0, with which every attempt weighs the same. Parts that
are in the folder already are not made again.

    python benchmarks/tiny_iql.py --seeds 1 2 3 --work DIR      # writes benchmarks/results/tiny_iql.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, success, timed
from tiny_vla_report import RESULTS

from embodyrl.data.reader import Dataset

SAMPLED = "eval.sample=true"


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    demonstrations, sft, attempts = work / "demonstrations", work / "sft", work / "attempts"
    seconds: Seconds = {}
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    first = ["tiny_pi0_sft", *common, f"data.path={demonstrations}"]
    recording = ["env.end_at_success=false", "--episodes", "300", "--pushes", "1.5", "--after-success", "3"]
    if not (demonstrations / "meta" / "info.json").exists():
        timed("demonstrations", seconds, "collect", *first, *recording)
    if not (sft / "summary.json").exists():
        timed("sft", seconds, "run", *first, f"run.dir={sft}")
    second = ["tiny_pi0_iql", *common, f"model.checkpoint={sft}/checkpoints/last/policy", f"data.path={attempts}"]
    sampling = ["--policy", str(sft), "--sample", "--keep", "all", "--episodes", "300", "--after-success", "3"]
    if not (attempts / "meta" / "info.json").exists():
        timed("attempts", seconds, "collect", *second, *sampling)
    for name, scale in (("iql", []), ("cloning", ["algorithm.off_policy.advantage_scale=0"])):
        if not (work / name / "summary.json").exists():
            timed(name, seconds, "run", *second, *scale, f"run.dir={work / name}")
    dataset = Dataset(attempts)
    outcomes = [dataset.read(number, with_images=False).success for number in range(len(dataset.episodes))]
    solved = [outcome is not None and bool(outcome.any()) for outcome in outcomes]
    return {
        "seed": seed,
        "attempts": {"episodes": len(solved), "solved": sum(solved)},
        "sampled": {name: success(work / name, SAMPLED) for name in ("sft", "cloning", "iql")},
        "seconds": seconds,
    }


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="folder for demonstrations and runs")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        rows.append(one_seed(seed, arguments.work / f"seed{seed}"))
        (RESULTS / "tiny_iql.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
