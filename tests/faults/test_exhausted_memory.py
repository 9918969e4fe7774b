"""Memory that runs out: an error with settings that help, and what was learned is saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import programs
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))  # where `small_runs` is

from small_runs import SMALL

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.errors import shell_command
from embodyrl.runner.checkpoint import find
from embodyrl.runner.memory import less_memory

pytestmark = pytest.mark.faults


def run(path: Path, where: str, how: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = [*SMALL, "run.save_every=0", "run.eval_every=0", f"run.dir={path}", *overrides]
    program = str(Path(__file__).with_name("exhausted.py"))
    return programs.run([program, where, how, "run", "experiment/gym_pendulum", *words])


@pytest.mark.parametrize(
    ("where", "how", "reason"),
    [
        ("learn", "torch", "can't allocate memory"),
        ("collect", "python", "memory ran out in iteration 3: MemoryError. What"),
        ("learn", "cuda", "CUDA out of memory. Tried to allocate 2.00 GiB. What"),
    ],
)
def test_what_was_learned_is_saved_and_the_run_goes_on_with_less(
    tmp_path: Path, where: str, how: str, reason: str
) -> None:
    path = tmp_path / "run"
    done = run(path, where, how, *(["run.save_async=true"] if how == "torch" else []))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: memory ran out in iteration 3: ") and reason in done.stderr
    assert "What was learned before it is saved" in done.stderr and "engine.micro_batch_size=24" in done.stderr
    assert shell_command("resume", path) in done.stderr and len(done.stderr.splitlines()) == 1
    assert find(path).place.name == "000002"
    assert train.resume(path, ["engine.micro_batch_size=12", "run.iterations=4", "run.save_async=false"]) == 0
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]


def test_only_what_is_not_in_use_is_recommended() -> None:
    tiny = load_config("experiment/tiny_oft_grpo", ["model.checkpoint=null"]).config
    assert less_memory(tiny).split(", ")[1] == "engine.gradient_checkpointing=true"

    def recommended(*overrides: str) -> str:
        return less_memory(load_config("experiment/gym_pendulum", list(overrides)).config)

    assert recommended("algorithm.minibatches=8", "env.num_envs=8", "rollout.num_chunks=64") == (
        "engine.micro_batch_size=32, engine.offload=all, env.offload=true"
    )
    assert recommended(
        "engine.micro_batch_size=8", "engine.offload=all", "env.offload=true", "run.save_async=true"
    ) == ("engine.micro_batch_size=4, run.save_async=false")
