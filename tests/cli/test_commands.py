"""The program as a user runs it: a process, its exit code, its two streams."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import programs

PENDULUM = [
    "experiment/gym_pendulum",
    "env.num_envs=2",
    "env.max_episode_steps=10",
    "rollout.num_chunks=8",
    "algorithm.minibatches=2",
    "run.iterations=2",
    "eval.episodes=2",
]


def embodyrl(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], cwd=cwd)


FRONT = """
import sys
from embodyrl.cli.main import main
for command in ("--help", "validate", "list", "plan --help", "graph", "run --help", "run --print-config"):
    sys.argv = ["embodyrl", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
    heavy = {"torch", "tensordict", "gymnasium", "metaworld", "mujoco", "mani_skill", "sapien"} & set(sys.modules)
    assert not heavy, f"{command} imports {heavy}"
"""


def test_the_front_never_imports_torch_or_a_simulator() -> None:
    """In an interpreter of its own; `doctor` is tested with what it says."""
    done = subprocess.run([sys.executable, "-c", FRONT], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def in_a_shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `embodyrl ...`, each in an interpreter of its own."""
    program = f'embodyrl() {{ {shlex.quote(sys.executable)} -m embodyrl "$@"; }}; '
    return subprocess.run(["bash", "-c", program + command], capture_output=True, text=True, timeout=240, cwd=cwd)


def test_a_closed_stream_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = in_a_shell("embodyrl validate >&-; embodyrl validate 2>&-; embodyrl validate >&- 2>&-; echo $?", tmp_path)
    assert done.stderr == "error: stdout is closed, and embodyrl prints there: to see nothing of it, write >/dev/null\n"
    assert (
        done.stdout
        == "error: stderr is closed, and embodyrl prints there: to see nothing of it, write 2>/dev/null\n1\n"
    )


def test_too_little_address_space_for_torch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = in_a_shell("ulimit -v 400000; embodyrl run; embodyrl run --print-config", tmp_path)
    assert done.stderr.startswith("error: this shell allows a process 0.4 GB of address space (ulimit -v 400000), and ")
    assert done.stderr.count("\n") == 1 and "raise the limit" in done.stderr and "seed: 1" in done.stdout
    assert not list(tmp_path.iterdir())


PLAN = """
import sys
from embodyrl.cli.main import main
sys.argv = ["embodyrl", "plan"]
try:
    main()
finally:
    sys.stderr.write(" ".join({"metaworld", "mujoco", "mani_skill", "sapien"} & set(sys.modules)))
"""


def test_a_plan_needs_no_simulator() -> None:
    done = programs.run(["-c", PLAN], forget=("metaworld", "mujoco", "mani_skill", "sapien"))
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_command() -> None:
    done = embodyrl("--help")
    assert done.returncode == 0
    for command in ("run", "resume", "eval", "export", "report", "validate", "plan", "doctor", "list"):
        assert f"  {command} " in done.stdout
    assert "Exit codes" in done.stdout


def test_no_words_show_help_and_a_misspelt_command_is_guessed() -> None:
    assert "Usage: embodyrl" in embodyrl().stderr
    done = embodyrl("rnu")
    assert done.returncode == 2 and "run" in done.stderr


def test_validate_says_ok_and_faults_go_to_stderr_with_exit_code_2(tmp_path: Path) -> None:
    good = embodyrl("validate")
    assert (good.returncode, good.stderr) == (0, "") and "0 faults" in good.stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\nsede: 3\nrun: {iterations: -1}\n"
    )
    done = embodyrl("validate", "bad.yaml", "algorithm.gamma=2", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "bad.yaml:2:1: " in done.stderr and "did you mean 'seed'" in done.stderr
    assert "bad.yaml:3:" in done.stderr and "command line: " in done.stderr and "3 faults" in done.stderr
    run = embodyrl("run", "bad.yaml", "run.dir=out", cwd=tmp_path)
    assert run.returncode == 2 and not (tmp_path / "out").exists()


def test_a_printed_config_is_commented_and_a_run_of_it_shows_and_leaves_what_it_should(tmp_path: Path) -> None:
    printed = embodyrl("run", "--print-config", *PENDULUM)
    assert printed.returncode == 0
    lines = printed.stdout.splitlines()
    assert sum(line.lstrip().startswith("#") for line in lines) > 40
    assert all("{" not in line or line.endswith("{}") for line in lines if not line.lstrip().startswith("#"))
    (tmp_path / "mine.yaml").write_text(printed.stdout)
    again = embodyrl("run", "--print-config", "mine.yaml", cwd=tmp_path)
    assert again.stdout == printed.stdout

    done = embodyrl("run", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("config ", "machine ", "model ", "simulator ", "algorithm ", "output ", "evaluation ", "next: "):
        assert word in done.stdout, word
    (run_dir,) = (tmp_path / "runs" / "gym-pendulum").iterdir()
    assert str(run_dir.relative_to(tmp_path)) in done.stdout
    names = {path.name for path in run_dir.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "summary.json", "run.log", "report.html"}
    assert files | {"checkpoints", "tensorboard"} <= names
    summary = json.loads((run_dir / "summary.json").read_text())
    wanted = {"eval/success_once", "env_steps", "wall_s", "iterations", "env_steps_per_s", "config_hash", "versions"}
    assert wanted <= summary.keys() and summary["env_steps"] == 2 * 2 * 8
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    groups = {key.split("/")[0] for row in rows for key in row} - {"iteration"}
    assert groups == {"env", "rollout", "train", "eval", "time"}

    evaluated = embodyrl("eval", str(run_dir), "eval.episodes=3")
    assert evaluated.returncode == 0 and "3 episodes" in evaluated.stdout
    again = embodyrl("run", *PENDULUM, f"run.dir={run_dir}")
    assert again.returncode == 2 and "never overwritten" in again.stderr and "embodyrl resume" in again.stderr


def test_options_can_be_looked_at_before_they_go_together(tmp_path: Path) -> None:
    printed = embodyrl("run", "--print-config", "model=openvla_oft", cwd=tmp_path)
    assert "  action_head: discrete" in printed.stdout
    assert printed.returncode == 2 and "env.cameras names 0 cameras" in printed.stderr
    unreadable = embodyrl("run", "--print-config", "model=openvla_oft", "model.nothing=1", cwd=tmp_path)
    assert unreadable.returncode == 2 and unreadable.stdout == ""


def test_list_tells_what_is_usable_here(tmp_path: Path) -> None:
    everything = embodyrl("list")
    assert everything.returncode == 0
    for name in ("mlp", "metaworld", "maniskill", "gymnasium", "ppo", "gae", "tensorboard", "gym_pendulum_sac"):
        assert name in everything.stdout, name
    wrong = embodyrl("list", "modles")
    assert wrong.returncode == 2 and "did you mean 'models'" in wrong.stderr


def test_words_after_the_config_must_be_settings() -> None:
    done = embodyrl("run", "experiment/gym_pendulum", "second.yaml")
    assert done.returncode == 2 and "'second.yaml' is neither the config" in done.stderr


def run_breaking(tmp_path: Path, error: str) -> subprocess.CompletedProcess[str]:
    """`embodyrl run` with a simulator that raises `error` when it is stepped."""
    (tmp_path / "breaking.py").write_text(
        "from embodyrl.envs.gymnasium.simulator import Gymnasium\n"
        "from embodyrl.envs.options import GymnasiumConfig\n"
        "from embodyrl.errors import UserError\n"
        "from embodyrl.registry import SIMULATORS\n"
        "class Breaking(Gymnasium):\n"
        f"    def step_chunk(self, slots, actions): raise {error}\n"
        "SIMULATORS.register('breaking', target=Breaking, options=GymnasiumConfig, summary='breaks')\n"
    )
    (tmp_path / "my.yaml").write_text(
        "defaults: [model: mlp, algorithm: ppo, _self_]\nplugins: [breaking]\n"
        "env: {name: breaking, tasks: [Pendulum-v1], num_envs: 2}\nrollout: {num_chunks: 8}\n"
    )
    return embodyrl("run", "my.yaml", "run.dir=out", cwd=tmp_path)


def test_a_users_mistake_that_only_shows_in_the_simulator_is_one_sentence(tmp_path: Path) -> None:
    done = run_breaking(tmp_path, "UserError('the cable is unplugged: plug it in')")
    elsewhere = "; env 0 of this worker is env 1 of the run"  # where the second worker is the first to say so
    assert done.returncode == 1
    announced = f"plug-in breaking: {tmp_path / 'breaking.py'}\n"
    assert done.stderr.replace(elsewhere, "") == f"{announced}error: the cable is unplugged: plug it in\n"


def test_an_error_inside_the_simulator_shows_its_remote_traceback(tmp_path: Path) -> None:
    done = run_breaking(tmp_path, "ArithmeticError('the cable snapped')")
    assert done.returncode == 1
    assert "ArithmeticError" in done.stderr and "the cable snapped" in done.stderr
    assert 'breaking.py", line 6' in done.stderr
