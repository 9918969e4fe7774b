"""Measure how long `embodyrl plan` takes, in this source tree and in others.

    python benchmarks/plans.py [--rounds 3] [--tree before=DIR] [--out benchmarks/results/plans.json]

Seconds of the whole command, medians over rounds in which the trees take turns. A tree is a checkout, for instance of
an earlier commit (`git archive`). Weights are not needed: a published model's shapes are known. Beside them the import
of torch, and of what the policies import.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from startup import RESULTS, ROOT, seconds_of

EXPERIMENTS = (
    "metaworld_reach",
    "metaworld_reach_cnn",
    "libero_spatial_grpo_smolvla",
    "libero_spatial_ppo_pi0",
    "libero_spatial_grpo_pi0_fast",
    "libero_spatial_ppo_gr00t",
    "libero_spatial_ppo_gr00t_n17",
    "libero_spatial_grpo_openvla_oft",
)
IMPORTS = {"torch": "torch", "libraries of policies": "embodyrl.models.libraries"}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, default=RESULTS / "plans.json")
    arguments = parser.parse_args()
    trees = {name: Path(folder) for name, _, folder in (each.partition("=") for each in arguments.tree)} | {"now": ROOT}
    commands = {name: ["-c", f"import {module}"] for name, module in IMPORTS.items()}
    commands |= {name: ["-m", "embodyrl", "plan", f"experiment/{name}"] for name in EXPERIMENTS}
    rows = {}
    for what, words in commands.items():
        found: dict[str, list[float]] = {name: [] for name in (["now"] if what in IMPORTS else trees)}
        for number in range(arguments.rounds):
            for name in found if number % 2 == 0 else reversed(found):
                found[name].append(seconds_of(words, trees[name]))
        rows[what] = {name: round(statistics.median(each), 2) for name, each in found.items()}
        print(f"{what:34s} " + "  ".join(f"{name} {value:6.2f} s" for name, value in rows[what].items()), flush=True)
    result = {"seconds": rows, "rounds": arguments.rounds, "cores": len(os.sched_getaffinity(0))}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
