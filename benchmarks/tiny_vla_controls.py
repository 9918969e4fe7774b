"""Check that the tiny VLA uses images and task description: its success without either.

Evaluates runs of tiny_oft_sft or tiny_oft_grpo on their held-out episodes as they are, with the task descriptions of
the two tasks swapped (if they are the two faucets), and with black images, and writes the success rates as JSON.

    python benchmarks/tiny_vla_controls.py RUN [RUN...] [--episodes 256] --out benchmarks/results/tiny_vla_controls.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import torch

from embodyrl.envs.metaworld.tasks import TASKS
from embodyrl.models import Policy, PolicyObservation
from embodyrl.models.policy import Inputs
from embodyrl.rollout.action_queue import Overlap
from embodyrl.runner.build import build_acting, open_simulators
from embodyrl.runner.checkpoint import POLICY, find_and_tell
from embodyrl.runner.evaluation import evaluate, evaluation_noise, held_out_episodes
from embodyrl.runner.rundir import read_saved

SWAPPED = {"faucet-open-v3": TASKS["faucet-close-v3"], "faucet-close-v3": TASKS["faucet-open-v3"]}
"""The task description of the other task."""


def blindfold(policy: Policy) -> None:
    """Have every image that the policy sees be black."""
    see = policy.preprocess

    def black(observation: PolicyObservation) -> Inputs:
        assert observation.images is not None, "these policies see"
        return see(dataclasses.replace(observation, images=torch.zeros_like(observation.images)))

    policy.preprocess = black  # type: ignore[method-assign]


def success(run: Path, episodes: int, *, swapped: bool = False, blind: bool = False) -> float:
    """Success of a run's last checkpoint, with sampled actions, on the episodes that its evaluations play."""
    checkpoint = find_and_tell(run)
    words = [f"{task}: {task_description}" for task, task_description in SWAPPED.items()]
    overrides = [f"env.task_descriptions={{{', '.join(words)}}}"] if swapped else []
    loaded = read_saved(checkpoint, ["eval.sample=true", f"eval.episodes={episodes}", *overrides])
    with tempfile.TemporaryDirectory() as logs, open_simulators(loaded, Path(logs)) as manager:
        engine = build_acting(loaded.config, manager, checkpoint / POLICY)
        if blind:
            blindfold(engine.policy)
        noise = evaluation_noise(loaded.config, engine)
        overlap = Overlap.of(loaded.config)
        played = evaluate(manager, engine, held_out_episodes(loaded.config), noise=noise, overlap=overlap)
        assert played.success_once is not None, "MetaWorld says what success is"
        return played.success_once


def main() -> None:
    """Evaluate all runs in all three ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for run in arguments.runs:
        config = read_saved(find_and_tell(run), []).config
        row = {"seed": config.seed, "unchanged": success(run, arguments.episodes)}
        if set(config.env.tasks) == SWAPPED.keys():
            row["task descriptions swapped"] = success(run, arguments.episodes, swapped=True)
        rows.append(row | {"black images": success(run, arguments.episodes, blind=True)})
        print(rows[-1], flush=True)
    arguments.out.write_text(json.dumps({"episodes": arguments.episodes, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
