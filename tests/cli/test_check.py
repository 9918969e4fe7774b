"""`embodyrl check`: what it prints and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest

sys.path.append(str(Path(__file__).parents[1] / "checking"))

from carts import write

import embodyrl
from embodyrl.checking.promises import State

NEXT_STEP = "wind = self.random.normal(0.0, 0.01)"


def check(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"}
    command = ["-m", "embodyrl", "check", config.name, *words]
    return programs.run(command, timeout=300, cwd=config.parent, env=environment)


def test_a_good_plugin_is_announced_and_keeps_all_promises(tmp_path: Path) -> None:
    config, module = write(tmp_path)
    done = check(config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(f"plug-in {module.stem}: {module}\n")
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith(("ok  ", "-   ")) for line in lines)
    assert all(len(line) <= 80 for line in lines if line.startswith("ok"))
    for text in (
        "reset with the same seed gives the same observation",
        "another process plays the same, and continues from a saved state",
        "evaluate gives the log-probs of act at equal weights",
        "one iteration runs: rollout, update, evaluation",
        "the checkpoint loads, and its policy decides as the one that was saved",
    ):
        assert f"ok  {text}" in lines
    assert "-   every camera sees the scene change: it has no cameras" in lines
    assert last == f"{sum(line.startswith('ok') for line in lines)} promises are kept, 0 broken, 5 not tried"
    assert not (tmp_path / "runs").exists()


def test_a_simulator_that_hangs_ends_in_a_sentence_and_the_model_is_tried(tmp_path: Path) -> None:
    config, module = write(tmp_path)
    text = module.read_text().replace(NEXT_STEP, f"time.sleep(600)\n        {NEXT_STEP}")
    module.write_text(text.replace("generator=generator)", "generator=None)"))
    done = check(config, "--timeout", "10")
    line = 1 + text[: text.index("time.sleep(600)")].count("\n")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    hang, draws = (each for each in lines if each.startswith("FAIL "))
    assert hang == (
        "FAIL observations and results have the declared shapes and types: no answer within 10 s "
        f"({module.name}:{line}) - let it return; --timeout gives it longer"
    )
    assert "one generator gave two actions: global random numbers are used" in draws
    assert "-   start states differ: the simulator hung or died before" in lines
    assert "ok  the policy is built for this simulator" in lines
    assert "-   one iteration runs: rollout, update, evaluation: the simulator hung or died" in lines


def test_from_python_a_process_that_dies_is_a_finding(tmp_path: Path) -> None:
    config, module = write(tmp_path)
    module.write_text(module.read_text().replace(NEXT_STEP, "import os; os._exit(3)"))
    found = [each for each in embodyrl.check(config, timeout_s=60) if each.state is State.broken]
    assert len(found) == 1 and "exited with code 3" in found[0].found
    assert module.name in found[0].place and found[0].remedy == "nothing may end the process"


def test_faults_of_the_config_come_first(tmp_path: Path) -> None:
    config, _ = write(tmp_path)
    done = check(config, "env.friction=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "env.friction = 2 is too large" in done.stderr


def test_plugins_of_a_stranger_are_not_run_unasked(tmp_path: Path) -> None:
    config, module = write(tmp_path)
    (tmp_path / "origin.json").write_text("{}")
    module.write_text("raise SystemExit('it ran')")
    done = check(config)
    assert (done.returncode, done.stdout) == (2, "")
    assert "say so with --trust" in done.stderr and "it ran" not in done.stderr
    assert "it ran" in check(config, "--trust").stderr


@pytest.mark.parametrize("mark", list(State))
def test_a_finding_is_one_line(mark: State) -> None:
    from embodyrl.checking.promises import Finding

    text = str(Finding(promise="it holds", state=mark, found="a\nb\x1b[0m", place=" (my.py:3)", remedy="do"))
    assert text == f"{mark:<4}{' ' * (mark is State.broken)}it holds: a b\\x1b[0m (my.py:3) - do"


LOSS = """
from embodyrl.registry import LOSSES

def soft(logprobs, advantages):
    return None

LOSSES.register("soft", target=soft, whole=False, summary="a loss of a plug-in")
"""
PLACE = """
from pathlib import Path
from embodyrl.checking.learning import LearningBench
from embodyrl.config import load_config
from embodyrl.errors import RunError
bench = LearningBench(load_config("my.yaml"), Path("folder"))
print(bench.place(RunError("loss my_loss.soft returned nothing"), "act"))
"""


def test_the_line_of_a_loss_is_named_not_that_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(LOSS)
    choices = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\n"
    (tmp_path / "my.yaml").write_text(f"{choices}plugins: [my_loss]\nalgorithm: {{loss: soft}}\n")
    done = programs.run(["-c", PLACE], cwd=tmp_path)
    assert done.stdout == " (my_loss.py:4)\n", done.stderr
