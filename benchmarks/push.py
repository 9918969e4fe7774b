"""Learn MetaWorld push-v3 from few demonstrations and what comes after them, beside behaviour cloning of the same.

For every seed: five demonstrations, from which push_rlpd, push_qc, push_qc_fql, push_dagger and its variant in which
the expert takes over (HG-DAgger) begin; twenty that are disturbed, for behaviour cloning and push_iql; and twenty of
which every other one is. Every evaluation is of 200 start states that neither showed. About eighteen minutes for each
seed on two cores. Runs that are in the folder already are not made again.

    python benchmarks/push.py --seeds 1 2 3 --work DIR       # writes benchmarks/results/push.json
    python benchmarks/push.py --report                       # prints the tables of docs/results/push.md
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS, seeds_and_work

from embodyrl.data.reader import Dataset
from embodyrl.data.writer import DatasetWriter
from embodyrl.tracking.intervals import rate_text

EPISODES = 200
HG = [
    *("algorithm.off_policy.intervene.labels=executed", "algorithm.off_policy.intervene.after=40"),
    "algorithm.off_policy.updates_per_step=3",
]
CLONING = """
defaults: [env: metaworld/push, model: mlp, algorithm: sft, _self_]
run: {name: push-cloning, iterations: 20, eval_every: 10, save_every: 0}
eval: {episodes: 200}
model: {head: squashed, activation: relu, log_std_init: -2.0}
data: {path: runs/push-disturbed, steps: 200, batch_size: 128}
engine: {optimizer: {lr: 1.0e-3, eps: 1.0e-8, max_grad_norm: 10.0}}
"""
"""Behaviour cloning of the disturbed demonstrations, with the minibatches and the steps of push_iql."""


def result(run: Path) -> dict[str, Any]:
    """Success by iteration, env steps, and seconds of a run."""
    summary = json.loads((run / "summary.json").read_text())
    rates = {step: each["eval/success_once"] for step, each in summary["evaluations"].items()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [row["env/interventions"] for row in rows if "env/interventions" in row]
    return {
        "success": rates,
        "env_steps": summary["env_steps"],
        "wall_s": summary["wall_s"],
        "taken_over": round(sum(taken) / len(taken), 3) if taken else 0.0,
    }


def alternate(disturbed: Path, calm: Path, into: Path) -> None:
    """Write a dataset with every other episode of each of two, which begin alike."""
    datasets = Dataset(disturbed), Dataset(calm)
    with DatasetWriter(into, datasets[0].spec) as writer:
        for number in range(len(datasets[0].episodes)):
            episode = datasets[number % 2].read(number, with_images=False)
            if number % 2:  # of these nothing but the recorded actions was executed
                never = np.zeros(len(episode), np.bool_)
                episode = dataclasses.replace(episode, perturbed=never, executed=episode.actions)
            writer.add(episode)


def one_seed(seed: int, work: Path, only: list[str]) -> dict[str, Any]:
    """Run all parts of a seed, or only these."""
    five, disturbed, calm, half = work / "five", work / "disturbed", work / "calm", work / "half"
    cloning = work / "cloning.yaml"
    cloning.write_text(CLONING)
    common, seconds = [f"seed={seed}", "tracking.sinks=[jsonl]"], Seconds()
    for name, folder, options in (
        ("push_rlpd", five, ["--episodes", "5"]),
        ("push_iql", disturbed, ["--episodes", "20", "--pushes", "8"]),
        ("push_iql", calm, ["--episodes", "20"]),
    ):
        once(folder, seconds, "collect", name, *common, f"data.path={folder}", *options)
    if not (half / "meta" / "info.json").exists():
        alternate(disturbed, calm, half)
    runs = {
        "dagger": ["push_dagger", f"data.path={five}", "run.eval_every=2"],
        "hg_dagger": ["push_dagger", f"data.path={five}", "run.eval_every=2", *HG],
        "rlpd": ["push_rlpd", f"data.path={five}"],
        "qc": ["push_qc", f"data.path={five}"],
        "qc_fql": ["push_qc_fql", f"data.path={five}"],
        "cloning": [str(cloning), f"data.path={disturbed}"],
        "iql": ["push_iql", f"data.path={disturbed}"],
        "cloning_of_half": [str(cloning), f"data.path={half}"],
        "iql_of_half": ["push_iql", f"data.path={half}"],
    }
    runs = {name: words for name, words in runs.items() if name in (only or runs)}
    for name, words in runs.items():
        once(work / name, seconds, "run", *words, *common, f"run.dir={work / name}")
    info = json.loads((five / "meta" / "info.json").read_text())
    return {
        "seed": seed,
        "demonstrated_steps": info["total_frames"],
        **{name: result(work / name) for name in runs},
        "seconds": seconds,
    }


def report() -> None:
    """Print a table for each way of learning."""
    rows = json.loads((RESULTS / "push.json").read_text())
    for name in ("dagger", "hg_dagger", "rlpd", "qc", "qc_fql", "cloning", "iql", "cloning_of_half", "iql_of_half"):
        print(f"\n{name}")
        for row in rows:
            if name not in row:  # made before this one was there
                continue
            cells = [rate_text(round(rate * EPISODES), EPISODES) for rate in row[name]["success"].values()]
            spent = row["seconds"].get(name, {})
            print(f"| {row['seed']} | " + " | ".join([*cells, str(spent.get("cpu")), str(spent.get("wall"))]) + " |")


def main() -> None:
    """Run all seeds, or print the tables."""
    parser = seeds_and_work(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="runs whose rows are written anew; others stay")
    arguments = parser.parse_args()
    if arguments.report:
        report()
        return
    file = RESULTS / "push.json"
    rows = {row["seed"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for seed in arguments.seeds:
        folder = arguments.work / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        before, found = rows.get(seed, {"seconds": {}}), one_seed(seed, folder, arguments.only)
        rows[seed] = before | found | {"seconds": before["seconds"] | found["seconds"]}
        file.write_text(json.dumps([*rows.values()], indent=1) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
