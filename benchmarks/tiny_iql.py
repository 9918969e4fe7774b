"""Learn from a tiny pi0's own recorded attempts by what they were worth, beside imitating all of them alike.

For every seed: demonstrations and tiny_pi0_sft as in tiny_vla.py, 300 sampled attempts of that policy, then
tiny_pi0_iql on these, and the same with an advantage scale of 0, with which every attempt weighs the same. Parts that
are in the folder already are not made again.

    python benchmarks/tiny_iql.py --seeds 1 2 3 --work DIR      # writes benchmarks/results/tiny_iql.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_dsrl import SAMPLED, every_seed, supervised
from tiny_vla import Seconds, once, success

from embodyrl.data.reader import Dataset


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    attempts = work / "attempts"
    seconds: Seconds = {}
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    sft = supervised(common, work, seconds)
    second = ["tiny_pi0_iql", *common, f"model.checkpoint={sft}/checkpoints/last/policy", f"data.path={attempts}"]
    sampling = ["--policy", str(sft), "--sample", "--keep", "all", "--episodes", "300", "--after-success", "3"]
    once(attempts, seconds, "collect", *second, *sampling)
    for name, scale in (("iql", []), ("cloning", ["algorithm.off_policy.advantage_scale=0"])):
        once(work / name, seconds, "run", *second, *scale, f"run.dir={work / name}")
    dataset = Dataset(attempts)
    outcomes = [dataset.read(number, with_images=False).success for number in range(len(dataset.episodes))]
    solved = [outcome is not None and bool(outcome.any()) for outcome in outcomes]
    return {
        "seed": seed,
        "attempts": {"episodes": len(solved), "solved": sum(solved)},
        "sampled": {name: success(work / name, SAMPLED) for name in ("sft", "cloning", "iql")},
        "seconds": seconds,
    }


if __name__ == "__main__":
    every_seed(one_seed, __doc__, "tiny_iql.json")
