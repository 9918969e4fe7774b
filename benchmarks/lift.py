"""Learn robosuite Lift from twenty demonstrations and 12,800 steps that are rewarded for success alone.

For every seed: demonstrations, and QC, QC-FQL and RLPD that begin with them; RLPD with the settings of push_rlpd, but
for when critics begin to teach, since there are fewer steps. What QC has after its offline iterations is what imitation
alone gives. Evaluations are of 100 start states that none of them showed. Runs that are in the folder already are not
made again.

    python benchmarks/lift.py --seeds 1 2 3 --work DIR       # writes benchmarks/results/lift.json
    python benchmarks/lift.py --report                       # prints the table of docs/results/push.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from push import result
from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS, seeds_and_work

from embodyrl.tracking.intervals import rate_text

EPISODES = 100
ENV = ["env=robosuite/lift", "env.max_episode_steps=100", "env.kwargs={dense: false, end_at_success: true}"]
STEPS = {
    "qc": ["lift_qc", "run.iterations=200"],  # 100 offline, then 100 of 128 steps
    "qc_fql": [
        *("lift_qc", "algorithm=qc_fql", "model.head=one_step", "run.iterations=200"),
        "algorithm.off_policy.distillation=10",
    ],
    "rlpd": ["push_rlpd", *ENV, "run.iterations=100", "algorithm.off_policy.critics_first=2000"],
}
PATH = RESULTS / "lift.json"


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    seconds, shown = Seconds(), work / "demonstrations"
    common = [f"seed={seed}", "tracking.sinks=[jsonl]", f"data.path={shown}"]
    once(shown, seconds, "collect", "lift_qc", *common, "--episodes", "20")
    for name, words in STEPS.items():
        evaluated = ["run.eval_every=100", f"eval.episodes={EPISODES}"]
        once(work / name, seconds, "run", *words, *common, *evaluated, "run.save_every=0", f"run.dir={work / name}")
    frames = json.loads((shown / "meta" / "info.json").read_text())["total_frames"]
    return {
        "seed": seed,
        "demonstrated_steps": frames,
        **{name: result(work / name) for name in STEPS},
        "seconds": seconds,
    }


def report() -> None:
    """Print a row for each seed and way of learning."""
    for row in json.loads(PATH.read_text()):
        for name in STEPS:
            cells = [rate_text(round(rate * EPISODES), EPISODES) for rate in row[name]["success"].values()]
            spent = row["seconds"].get(name, {})
            print(f"| {row['seed']} | {name} | " + " | ".join([*cells, str(spent.get("cpu"))]) + " |")


def main() -> None:
    """Run all seeds, or print the table."""
    arguments = seeds_and_work(__doc__).parse_args()
    if arguments.report:
        report()
        return
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        rows.append(one_seed(seed, arguments.work / f"seed{seed}"))
        PATH.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
