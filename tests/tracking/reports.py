"""Run directories to report on, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodyrl.tracking.intervals import wilson_interval

SCRIPT = "<img src=x onerror=\"document.documentElement.dataset.hacked='1'\"></script><script>alert(1)</script>"
"""A text that runs where a page takes it for HTML."""
TIMES = {"time/iteration": 4.0, "time/simulate": 1.0, "time/train": 3.0}
EVALUATION_TIMES = {"time/eval": 2.0, "time/eval/simulate": 0.5, "time/eval/render": 1.5}
CONFIG = """seed: {seed}  # <script>
run: {{name: by-hand, iterations: 3}}
env: {{name: metaworld, task_descriptions: {{push: push <b>it</b>}}}}
eval: {{episodes: 36}}
algorithm: {{name: ppo, gamma: {gamma}}}
tracking: {{video: {{episodes: 4}}}}
"""


def evaluation(successes: int) -> dict[str, float]:
    low, high = wilson_interval(successes, 36)
    return {
        "eval/success_once": successes / 36,
        "eval/success_low": low,
        "eval/success_high": high,
        "eval/return": 2.0,
        "eval/episode_length": 50.0,
        "eval/episodes": 36.0,
    }


def make_run(folder: Path, *, seed: int = 1, gamma: float = 0.5, successes: int = 27) -> None:
    """Three iterations, evaluated before and after; its name and one of its two tasks are scripts."""
    folder.mkdir(parents=True, exist_ok=True)
    first, last = evaluation(0), evaluation(successes)
    summary: dict[str, Any] = {
        "name": f"by hand {SCRIPT}",
        "seed": seed,
        "iterations": 3,
        "env_steps": 300,
        "wall_s": 3.0,
        "env_steps_per_s": 66.0,
        "stopped_by": None,
        "versions": {"embodyrl": "0.1.0", SCRIPT: SCRIPT},
        "machine": {"processor": "a processor"},
        "memory_mib": {"main process, largest": 512.0},
        "config_hash": "0123456789abcdef",
        "evaluations": {"3": last, "0": first},
    }
    rows = [
        {"iteration": 0, **first},
        {"iteration": 1, "env/total_steps": 100.0, "env/return": 1.0, "train/explained_variance": None, **TIMES},
        {"iteration": 2, "env/total_steps": 200.0, "env/return": 3.0, "train/explained_variance": 0.5, **TIMES},
        {"iteration": 3, "env/total_steps": 300.0, "env/return": 5.0, "time/env_steps_per_s": 25.0}
        | last | TIMES | EVALUATION_TIMES,
    ]  # fmt: skip
    # Of every two episodes the second is the script's task; those that fail are the last ones of the other.
    failed = 36 - successes
    episodes = [
        {
            "task": SCRIPT if number % 2 else "push",
            "start_state": 10_000 + number // 2,
            "seed": number,
            "success": bool(number % 2) or number // 2 >= failed,
            "success_at_end": False,
            "total_reward": float(number),
            "length": 50,
        }
        for number in range(36)
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(CONFIG.format(seed=seed, gamma=gamma))
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "000003.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
