"""Time of a short run on a Ray cluster that is up, beyond the same run on this machine alone.

    python benchmarks/ray_start.py --address 10.0.0.1:6379 [--rounds 5] [--out benchmarks/results/ray_start.json]

`embodyrl run` of one small iteration with two rollout workers, from the call to the return, by turns without and with
`placement.backend=ray`. The difference is what Ray costs: joining, looking at machines, reserving, actors, leaving.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
RUN = [
    *("experiment/gym_pendulum", "run.iterations=1", "run.eval_every=0", "eval.episodes=2", "env.num_envs=4"),
    *("env.max_episode_steps=20", "rollout.num_chunks=16", "rollout.blocks=2", "placement.rollout.workers=2"),
]


def seconds(*settings: str) -> float:
    """Return how long a run takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "embodyrl", "run", *RUN, f"run.dir={folder}/run", *settings]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "ray_start.json")
    options = parser.parse_args()
    rounds = [
        (seconds(), seconds("placement.backend=ray", f"placement.address={options.address}"))
        for _ in range(options.rounds)
    ]
    result = {
        "rounds": options.rounds,
        "load_average": round(os.getloadavg()[0], 2),
        "local_s": round(statistics.median(local for local, _ in rounds), 2),
        "ray_s": round(statistics.median(ray for _, ray in rounds), 2),
        "beyond_s": round(statistics.median(ray - local for local, ray in rounds), 2),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
