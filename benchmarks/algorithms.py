"""Success of every algorithm on MetaWorld reach-v3 before and after training, over several seeds.

    python benchmarks/algorithms.py [--seeds 3] [--only grpo dapo ...] [--runs runs/algorithms]

PPO learns from the dense reward and from random weights. All others learn from success only, which gives no signal to a
policy that never succeeds. So each of their runs starts from the weak policy of its seed: the shipped PPO experiment,
stopped as soon as an evaluation reaches 20 % (`WEAK`). Every run is `embodyrl run` with overrides only.

Success is that of the deterministic policy on 200 start states that neither training nor the choice of the weak policy
uses. Rows are added to benchmarks/results/algorithms.json as they are done. Existing rows are run again only if their
settings have changed. At the end docs/results/algorithms.md is made from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms_report import RESULTS, write_report
from tiny_vla import is_complete

WEAK = ("experiment/metaworld_reach", "run.stop_at_success=0.2", "run.eval_every=2", "run.save_every=0")
"""Judges on other start states than `JUDGED`, or the choice of the moment would flatter the start."""

JUDGED = ("eval.episodes=200", "eval.first_start_state=20000", "run.save_every=0")


@dataclass(frozen=True)
class Contender:
    """An algorithm and the settings that choose it."""

    name: str
    settings: tuple[str, ...]
    """Experiment, then `key=value`."""
    from_weak: bool = True
    """Whether it starts from the weak policy of its seed, not from random weights."""


GRPO, DAPO = "experiment/metaworld_reach_grpo", "experiment/metaworld_reach_dapo"
CONTENDERS = (
    Contender("ppo", ("experiment/metaworld_reach", "run.eval_every=20"), from_weak=False),
    Contender("grpo", (GRPO,)),
    Contender("dapo", (DAPO,)),
    Contender("rloo", (GRPO, "algorithm=rloo")),
    Contender("reinforce_pp", (GRPO, "algorithm=reinforce_pp", "rollout.group_size=1")),
    Contender("reinforce_pp_baseline", (GRPO, "algorithm=reinforce_pp_baseline")),
    Contender("dr_grpo", (GRPO, "algorithm=dr_grpo")),
    Contender("cpgd", (GRPO, "algorithm=cpgd")),
    Contender("gspo", (GRPO, "algorithm=gspo")),
    Contender("srpo", (GRPO, "algorithm=srpo", "algorithm.reward=srpo")),
    Contender("decoupled_ppo", (DAPO, "algorithm.loss=decoupled_ppo", "algorithm.loss.clip_high=0.28")),
)


def train(run_dir: Path, settings: tuple[str, ...]) -> float:
    """`embodyrl run` into `run_dir`; returns the seconds from the start of the program to its end."""
    if run_dir.exists():  # what an earlier, interrupted benchmark left
        shutil.rmtree(run_dir)
    command = [sys.executable, "-m", "embodyrl", "run", *settings, f"run.dir={run_dir}"]
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - start, 1)


def weak_policy(runs: Path, seed: int) -> Path:
    """Return the folder of the weak policy of a seed; train it if it does not exist yet."""
    run_dir = runs / f"weak-{seed}"
    if not is_complete(run_dir):
        train(run_dir, (*WEAK, f"seed={seed}"))
    return run_dir / "checkpoints" / "last" / "policy"


def evaluations_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's evaluations; the first is before training."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/success_once" in row]


def judged(evaluation: dict[str, float]) -> dict[str, float]:
    """Return the success rate and its 95 % interval."""
    return {name: round(evaluation[f"eval/success_{name}"], 3) for name in ("once", "low", "high")}


def run_row(contender: Contender, seed: int, runs: Path) -> dict[str, Any]:
    """Train one algorithm with one seed and return its row."""
    origin: dict[str, Any] = {}
    settings = (*contender.settings, *JUDGED, f"seed={seed}")
    if contender.from_weak:
        policy = weak_policy(runs, seed)
        origin = {"weak_env_steps": json.loads((runs / f"weak-{seed}" / "summary.json").read_text())["env_steps"]}
        settings += (f"model.checkpoint={policy}",)
    run_dir = runs / f"{contender.name}-{seed}"
    seconds = train(run_dir, settings)
    evaluations = evaluations_of(run_dir)
    return {
        "algorithm": contender.name,
        "seed": seed,
        "settings": contender.settings,
        **origin,
        "start": judged(evaluations[0]),
        "final": judged(evaluations[-1]),
        "curve": [[int(each.get("env/total_steps", 0)), each["eval/success_once"]] for each in evaluations],
        "iterations": evaluations[-1]["iteration"],
        "env_steps": int(evaluations[-1]["env/total_steps"]),
        "seconds": seconds,
        "load_average": round(os.getloadavg()[0], 2),
    }


def known_rows() -> list[dict[str, Any]]:
    """Return rows of earlier benchmarks whose settings are unchanged."""
    if not RESULTS.exists():
        return []
    current = {contender.name: list(contender.settings) for contender in CONTENDERS}
    found = json.loads(RESULTS.read_text())
    if found["weak"] != list(WEAK) or found["judged"] != list(JUDGED):
        return []
    return [row for row in found["runs"] if current.get(row["algorithm"]) == row["settings"]]


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Write all rows so far, by algorithm in the order above."""
    order = [contender.name for contender in CONTENDERS]
    rows.sort(key=lambda row: (order.index(row["algorithm"]), row["seed"]))
    RESULTS.parent.mkdir(exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    RESULTS.write_text(f'{{"weak": {json.dumps(WEAK)},\n "judged": {json.dumps(JUDGED)},\n "runs": [\n  {lines}\n]}}\n')


def main() -> None:
    """Run missing rows one at a time, and write the report."""
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ALGORITHM")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"), help="where run directories go")
    options = parser.parse_args()
    rows = known_rows()
    for seed in range(1, options.seeds + 1):
        for contender in CONTENDERS:
            known = any((row["algorithm"], row["seed"]) == (contender.name, seed) for row in rows)
            if contender.name in options.only and not known:
                row = run_row(contender, seed, options.runs.resolve())
                rows.append(row)
                write_rows(rows)
                rates = " -> ".join(f"{rate:.2f}" for _, rate in row["curve"])
                print(f"{contender.name:22} seed {seed}   {rates}   {row['seconds']:.0f} s", flush=True)
    write_report()


if __name__ == "__main__":
    main()
