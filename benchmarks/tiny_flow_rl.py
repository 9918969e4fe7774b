"""Flow policies that learn without log-probs, beside GRPO with as many decisions.

For every seed: demonstrations and supervised learning as in tiny_vla.py, then NFT and FPO with schedules that end after
20 and 75 iterations of 64 episodes. Decisions are counted: episodes become shorter where they succeed. Parts that are
in the folder already are not made again.

    python benchmarks/tiny_flow_rl.py --seeds 1 2 3 --work DIR      # writes benchmarks/results/tiny_flow_rl.json
    python benchmarks/tiny_flow_rl.py --model smolvla --work DIR    # benchmarks/results/tiny_flow_rl_smolvla.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_dsrl import decisions, evaluations, supervised
from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS

ITERATIONS = {"brief": 20, "long": 75}
"""Of 64 episodes."""
FLOW = ["model.noise_method=none", "eval.sample=true"]


def one_seed(model: str, seed: int, work: Path, methods: list[str], schedules: list[str]) -> dict[str, Any]:
    """Run all parts of a seed."""
    seconds: Seconds = {}
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    sft = supervised(common, work, seconds, model)
    rows: dict[str, Any] = {"seed": seed, "seconds": seconds}
    for method in methods:
        for schedule in schedules:
            run, count = work / f"{method}_{schedule}", ITERATIONS[schedule]
            # The experiment of GRPO with another method: settings that this does not have are left out.
            grpo = method == "grpo"
            changed = [] if grpo else [f"algorithm={method}", *FLOW]
            settings = [*common, *changed, f"model.checkpoint={sft}/checkpoints/last/policy", f"run.dir={run}"]
            brief = [f"run.iterations={count}", f"run.eval_every={count if schedule == 'brief' else 25}"]
            once(run, seconds, "run", f"tiny_{model}_grpo", *settings, *brief)
            rows[f"{method}_{schedule}"] = {"success": evaluations(run), "decisions": decisions(run)}
    return rows


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0", choices=["pi0", "smolvla", "gr00t"])
    parser.add_argument("--methods", nargs="+", default=["nft", "fpo"], choices=["nft", "fpo", "grpo"])
    parser.add_argument("--schedules", nargs="+", default=[*ITERATIONS], choices=ITERATIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="folder for demonstrations and runs")
    given = parser.parse_args()
    results = RESULTS / ("tiny_flow_rl.json" if given.model == "pi0" else f"tiny_flow_rl_{given.model}.json")
    rows = []
    for seed in given.seeds:
        rows.append(one_seed(given.model, seed, given.work / f"seed{seed}", given.methods, given.schedules))
        results.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
