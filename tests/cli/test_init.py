import io
import os
import pty
import select
import shlex
import sys
import time

import programs
import pytest
import yaml
from slow import only_slow, rest_slow

from embodyrl.cli import init
from embodyrl.cli.arguments import CommandLineError
from embodyrl.config import load_config

NOTHING = {"env": None, "model": None, "algorithm": None}


def test_what_is_proposed_is_written_and_runs(tmp_path, capsys):
    file = tmp_path / "my job.yaml"
    pytest.importorskip("metaworld")
    assert init.run(file, NOTHING, agreed=True) == 0
    loaded = load_config(file)
    assert (loaded.config.env.name, loaded.config.model.name, loaded.config.algorithm.name) == (
        "metaworld",
        "mlp",
        "ppo",
    )
    assert loaded.config.run.name == "my-job"
    assert capsys.readouterr().out.endswith(f"next: embodyrl run {shlex.quote(str(file))}\n")
    with pytest.raises(CommandLineError, match="never overwritten"):
        init.run(file, NOTHING, agreed=True)


@pytest.mark.parametrize(
    ("env", "algorithm", "task"), [("gym/pendulum", "sac", "Pendulum-v1"), ("gym/cartpole", "grpo", "CartPole-v1")]
)
def test_what_is_given_is_written(tmp_path, env, algorithm, task):
    file = tmp_path / "my.yaml"
    init.run(file, {"env": env, "model": "mlp", "algorithm": algorithm}, agreed=False)
    config = load_config(file).config
    assert (config.env.tasks, config.algorithm.name) == ([task], algorithm)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [("nft", "pi0"), ("qc", "mlp")],
)
def test_what_is_proposed_suits_an_algorithm_that_is_given(tmp_path, algorithm, model):
    file = tmp_path / "my.yaml"
    pytest.importorskip("metaworld")
    init.run(file, {**NOTHING, "algorithm": algorithm}, agreed=True)
    written = yaml.safe_load(file.read_text())
    assert {"model": model} in written["defaults"] and {"algorithm": algorithm} in written["defaults"]


def test_an_algorithm_that_fits_nothing_beside_what_is_given_is_refused(tmp_path):
    with pytest.raises(CommandLineError, match="--algorithm crossq does not fit env gym/cartpole"):
        init.run(tmp_path / "my.yaml", {**NOTHING, "env": "gym/cartpole", "algorithm": "crossq"}, agreed=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "gym/pendulun"}, "did you mean 'gym/pendulum'"),
        only_slow(({"env": "gym/pendulum", "model": "cnn"}, "--model cnn does not fit env gym/pendulum")),
        (
            {"env": "gym/pendulum", "model": "mlp", "algorithm": "dsrl"},
            "--algorithm dsrl does not fit",
        ),
        ({}, "stdin is no terminal: give --env, --model, --algorithm, or --yes"),
    ],
)
def test_what_cannot_be(tmp_path, monkeypatch, given, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(CommandLineError) as caught:
        init.run(tmp_path / "my.yaml", {**NOTHING, **given}, agreed=False)
    assert message in str(caught.value)
    assert not (tmp_path / "my.yaml").exists()


def test_the_file_must_be_yaml(tmp_path):
    with pytest.raises(CommandLineError, match="no YAML file"):
        init.run(tmp_path / "my.txt", NOTHING, agreed=True)


@pytest.mark.parametrize("given", rest_slow([["--model", "mlp"], []]), ids=["two questions", "three questions"])
def test_questions_on_a_terminal(tmp_path, given):
    ours, theirs = pty.openpty()
    words = ["-m", "embodyrl", "init", "my.yaml", *given]
    with programs.Program(words, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown, answers = "", ["gym/pendulun", "gym/pendulum", *([] if given else ["1"]), "ppo"]
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                if answers and shown.endswith("] "):
                    os.write(ours, f"{answers.pop(0)}\n".encode())
                    shown += " "
                continue
            try:
                shown += os.read(ours, 65536).decode()
            except OSError:  # it has ended
                break
        assert process.wait(10) == 0, shown
    os.close(ours)
    assert "'gym/pendulun' is none of them: did you mean 'gym/pendulum'?" in shown
    asked = [group for group, question in init.QUESTIONS.items() if question in shown]
    assert asked == [group for group in init.GROUPS if f"--{group}" not in given]
    assert max(len(line) for line in shown.splitlines() if line[:4].strip().isdigit()) <= 80
    assert load_config(tmp_path / "my.yaml").config.env.tasks == ["Pendulum-v1"]
