"""Train one vision-language-action model on a CPU: demonstrations, fine-tuning, reinforcement learning.

Runs the experiments tiny_oft_sft and tiny_oft_grpo (or those of another model) with several seeds, one after the other,
and writes their results and times as JSON. About eight minutes for each seed on two idle cores.

    python benchmarks/tiny_vla.py --seeds 1 2 3 --work DIR --out benchmarks/results/tiny_vla.json
    python benchmarks/tiny_vla.py --model pi0 --work DIR --out benchmarks/results/tiny_pi0.json
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COOLER: dict[str, tuple[float, ...]] = {
    "oft": (0.8, 0.65),
    "pi0": (),
    "pi0_fast": (0.5,),
    "gr00t": (),
    "gr00t_n17": (),
    "smolvla": (),
    "act": (),
}
"""Temperatures below that of training at which the final policy is evaluated as well."""

SECOND = {"act": "ppo"}
"""Algorithm of the second half, where it is not GRPO."""

Seconds = dict[str, dict[str, float]]


def embodyrl(*words: str) -> str:
    """Run the program and return its output."""
    done = subprocess.run([sys.executable, "-m", "embodyrl", *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def timed(name: str, seconds: Seconds, *words: str) -> None:
    """Run the program and note its seconds under `name`: on the wall, and of all its processes on a CPU."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    embodyrl(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds[name] = {"wall": round(time.monotonic() - start, 1), "cpu": round(cpu, 1)}
    print(name, seconds[name], flush=True)


def once(folder: Path, seconds: Seconds, *words: str) -> None:
    """Run the program unless what it makes in a folder is there; it goes on with what was interrupted.

    The seconds are kept beside the folder, for parts that are not made again.
    """
    kept = folder.with_name(f"{folder.name}.seconds.json")
    if is_complete(folder):
        if kept.exists():
            seconds[folder.name] = json.loads(kept.read_text())
        return
    timed(folder.name, seconds, *(["resume", str(folder)] if folder.exists() else words))
    kept.write_text(json.dumps(seconds[folder.name]))


def is_complete(folder: Path) -> bool:
    """Return whether demonstrations, a run or an evaluation have come to their end."""
    results, summary = folder / "results.json", folder / "summary.json"
    if results.exists():
        found: bool = json.loads(results.read_text())["complete"]
        return found
    if summary.exists():  # a stopped run has one, too
        return json.loads(summary.read_text())["stopped_by"] is None
    return (folder / "meta" / "info.json").exists()


def success(run: Path, *overrides: str) -> float:
    """Success of a run's last checkpoint on its held-out episodes."""
    printed = re.search(r"success (\d\.\d\d)", embodyrl("eval", str(run), *overrides))
    assert printed is not None, "an evaluation prints its success"
    return float(printed[1])


def one_seed(model: str, seed: int, work: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Run all steps; `changes` are overrides of reinforcement learning."""
    demonstrations, sft, grpo = work / "demonstrations", work / "sft", work / "grpo"
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    first = [f"tiny_{model}_sft", *common, f"data.path={demonstrations}"]
    recording = ["env.end_at_success=false", "--episodes", "300", "--pushes", "1.5", "--after-success", "3"]
    seconds: Seconds = {}
    timed("demonstrations", seconds, "collect", *first, *recording)
    timed("sft", seconds, "run", *first, f"run.dir={sft}")
    checkpoint = f"model.checkpoint={sft}/checkpoints/last/policy"
    second = f"tiny_{model}_{SECOND.get(model, 'grpo')}"
    timed("grpo", seconds, "run", second, *common, checkpoint, f"run.dir={grpo}", *changes)
    summary = json.loads((grpo / "summary.json").read_text())
    evaluations = {step: each["eval/success_once"] for step, each in summary["evaluations"].items()}
    rows = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "changes": list(changes),
        "success": evaluations,
        "success_at_temperature": {str(each): success(grpo, f"model.temperature={each}") for each in COOLER[model]},
        "episodes": round(summary["eval/episodes"]),
        "iterations": summary["iterations"],
        "env_steps": summary["env_steps"],
        "seconds": seconds,
        "training": [round(row["env/success_once"], 4) for row in rows if "env/success_once" in row],
    }


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=COOLER, default="oft")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="folder for demonstrations and runs; must not exist")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the second half")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"python": platform.python_version(), "seeds": []}
    for seed in arguments.seeds:
        results["seeds"].append(one_seed(arguments.model, seed, arguments.work / f"seed{seed}", arguments.set))
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["seeds"][-1]), flush=True)


if __name__ == "__main__":
    main()
