"""Count how often MetaWorld tasks are solved by one constant motion, as a policy makes it that sees nothing.

    python benchmarks/constant_motions.py TASK [TASK ...] [--out benchmarks/results/constant_motions.json]

Tries 200 random motions on eight start states each, then 100 near the best ten of them, and the best five of all on 40
other start states, for as long as an episode of `metaworld/two_scenes`. A task that is to show that a policy looks at
images must not be solved so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.config import load_config
from embodyrl.envs import EpisodeSpec
from embodyrl.envs.metaworld.simulator import MetaWorldSlot
from embodyrl.envs.mujoco.rendering import Renderers

MOTIONS, NEAR, TRIED, BEST, CHECKED = 200, 100, 8, 5, 40


def solves(slot: MetaWorldSlot, task: str, start_state: int, motion: Any, steps: int) -> bool:
    """Return whether a motion solves an episode."""
    slot.reset(EpisodeSpec(task=task, start_state=start_state, seed=start_state))
    return any(slot.step(motion.astype(np.float32)).success for _ in range(steps))


def best_of(task: str) -> dict[str, float]:
    """Return the success of the best motion, and the mean of random ones."""
    words = ["env=metaworld/two_scenes", f"env.tasks=[{task}]", "env.cameras=[]", "env.proprio=full"]
    config: Any = load_config("metaworld_reach", words).config.env
    slot, draw = MetaWorldSlot(task, config, Renderers(most=1)), np.random.default_rng(0)
    steps = config.max_episode_steps

    def rated(motions: Any) -> Any:
        """Return the success of each motion on the first start states."""
        return np.array([[solves(slot, task, state, each, steps) for state in range(TRIED)] for each in motions]).mean(
            1
        )

    far = draw.normal(size=(MOTIONS, 4))
    far /= np.abs(far).max(1, keepdims=True)  # as fast as can be, in any direction
    first = rated(far)
    centres = far[np.argsort(first)[-2 * BEST :]]
    near = (np.repeat(centres, NEAR // len(centres), 0) + draw.normal(0.0, 0.15, (NEAR, 4))).clip(-1.0, 1.0)
    motions, tried = np.concatenate([far, near]), np.concatenate([first, rated(near)])
    checked = range(TRIED, TRIED + CHECKED)
    best = [
        float(np.mean([solves(slot, task, state, motions[number], steps) for state in checked]))
        for number in np.argsort(tried)[-BEST:]
    ]
    return {"best": round(max(best), 3), "mean": round(float(np.mean(first)), 4)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {}
    for task in arguments.tasks:
        found[task] = best_of(task)
        print(f"{task:24} best {found[task]['best']:.2f}   mean {found[task]['mean']:.3f}", flush=True)
    if arguments.out:
        result = {"motions": MOTIONS + NEAR, "episodes": CHECKED, "tasks": found}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
