"""A tiny pi0 that learns by RECAP from its own recorded attempts, then over two more rounds, beside ablations.

For every seed: demonstrations, tiny_pi0_sft and 300 sampled attempts as in tiny_iql.py; then tiny_pi0_recap with three
rounds, and its first round with other settings. Parts that are in the folder already are not made again.

    python benchmarks/tiny_recap.py --seeds 1 2 3 --work DIR      # writes benchmarks/results/tiny_recap.json
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tiny_dsrl import decisions, evaluations, every_seed, supervised
from tiny_vla import Seconds, once

HERE = Path(__file__).parent
ABLATIONS = {
    "no_guidance": ["model.indicator.guidance=1"],
    "no_indicator": ["algorithm.off_policy.dropout=1", "model.indicator.guidance=0"],
    "random_labels": [],
}


def randomly_judged(folder: Path) -> Path:
    """Write the experiment with the plug-in's method, and the plug-in beside it."""
    text, name = (HERE.parent / "configs/experiment/tiny_pi0_recap.yaml").read_text(), "recap_random"
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / f"{name}.py", folder)
    config = folder / "config.yaml"
    config.write_text(text.replace("\nalgorithm:\n", f"\nplugins: [{name}]\nalgorithm:\n  name: {name}\n"))
    return config


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    attempts, seconds = work / "attempts", Seconds()
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    sft = supervised(common, work, seconds)
    checkpoint = f"model.checkpoint={sft}/checkpoints/last/policy"
    second = [*common, checkpoint, f"data.path={attempts}"]
    sampling = ["--policy", str(sft), "--sample", "--keep", "all", "--episodes", "300", "--after-success", "3"]
    recorder = ["tiny_pi0_iql", *common, checkpoint, f"data.path={attempts}"]
    once(attempts, seconds, "collect", *recorder, *sampling)
    once(work / "recap", seconds, "run", "tiny_pi0_recap", *second, f"run.dir={work / 'recap'}")
    found = {"recap": evaluations(work / "recap")}
    for name, changes in ABLATIONS.items():
        config = str(randomly_judged(work / "plugin")) if name == "random_labels" else "tiny_pi0_recap"
        once(work / name, seconds, "run", config, *second, "run.iterations=1", *changes, f"run.dir={work / name}")
        found[name] = evaluations(work / name)
    return {"seed": seed, "success": found, "decisions": decisions(work / "recap"), "seconds": seconds}


if __name__ == "__main__":
    every_seed(one_seed, __doc__, "tiny_recap.json")
