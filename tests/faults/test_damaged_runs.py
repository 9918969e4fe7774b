"""Run directories and policies that were torn, emptied, or tampered with: whatever command meets them says in one
task description what is wrong, or does without; nobody sees a traceback, and `resume` mends what can be mended."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import only_slow
from typer.testing import CliRunner

from embodyrl.cli.main import app
from embodyrl.config import load_config
from embodyrl.errors import RunError, UserError, explain
from embodyrl.files import write_whole
from embodyrl.runs.metrics import read_rows
from embodyrl.runs.record import read_summary

pytestmark = pytest.mark.faults

TINY = [
    "env.num_envs=2",
    "env.workers=1",
    "env.max_episode_steps=8",
    "rollout.num_chunks=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[4]",
    "eval.episodes=2",
    "run.iterations=2",
    "run.save_every=1",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done."""
    from embodyrl.cli import train

    path = tmp_path_factory.mktemp("finished") / "run"
    assert train.run(load_config("experiment/gym_pendulum", [*TINY, f"run.dir={path}"])) == 0
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@dataclass
class Answer:
    """What a command said."""

    code: int
    text: str

    @property
    def is_one_sentence(self) -> bool:
        return self.text.startswith("error: ") and len(self.text.strip().splitlines()) == 1


def ask(*words: str) -> Answer:
    """Run a command as `main` does. An exception that is not for people is one of the test's."""
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, UserError | RunError):
        with pytest.MonkeyPatch.context() as patch:
            import io
            import sys

            patch.setattr(sys, "stderr", said := io.StringIO())
            code = explain(result.exception)
        return Answer(code, said.getvalue())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.output)


STARTING = {
    "summary": {"resume"},
    "metrics": {"resume"},
    "graph": {"resume"},
    "origin": {"resume", "eval"},
    "config": {"resume", "eval"},
}
"""By what is damaged, which commands that start simulators are tried; not named: all."""


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    """Every command that reads a run directory or a policy's folder."""
    policy = run / "checkpoints" / "last" / "policy"
    tiny = [*TINY, f"model.checkpoint={policy}"]
    return {
        "report": ["report", str(run)],
        "export": ["export", str(run), "--out", str(out / "exported")],
        "validate": ["validate", str(run / "config.yaml")],
        "validate its weights": ["validate", "experiment/gym_pendulum", *tiny],
        "plan": ["plan", str(run / "config.yaml")],
        "plan its weights": ["plan", "experiment/gym_pendulum", *tiny],
        "graph": ["graph", str(run / "config.yaml")],
        "eval": ["eval", str(run)],
        "run its weights": ["run", "experiment/gym_pendulum", *tiny, f"run.dir={out / 'new'}", "run.iterations=1"],
        "collect": [
            *("collect", "experiment/gym_pendulum", *TINY, "--policy", str(run), "--episodes", "1", "--keep", "all"),
            *("--out", str(out / "data")),
        ],
        "resume": ["resume", str(run)],
        "resume with more": ["resume", str(run), "run.iterations=3"],
    }


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_line(line: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(line + b"\n" + path.read_bytes() + line)


def containing(text: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode()) and None  # type: ignore


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def pickled_by_torch(path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, path)


def with_options(options: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"options": options}))

    return change


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        found = json.loads(path.read_text())
        del found[key]
        path.write_text(json.dumps(found))

    return change


SUMMARY, METRICS, ORIGIN, CONFIG = "summary.json", "metrics.jsonl", "origin.json", "config.yaml"
WEIGHTS, POLICY = "checkpoints/last/policy/model.safetensors", "checkpoints/last/policy/policy.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "summary torn": (SUMMARY, torn),
    "summary empty": (SUMMARY, containing("")),
    "summary missing": (SUMMARY, Path.unlink),
    "summary a list": (SUMMARY, containing("[]")),
    "summary of nothing": (SUMMARY, containing("{}")),
    "summary with odd evaluations": (SUMMARY, lambda path: containing(
        json.dumps(json.loads(path.read_text()) | {"evaluations": {"x": 5}}))(path)),
    "summary of bytes": (SUMMARY, containing(b"\xff\xfe\x00")),
    "metrics torn": (METRICS, torn),
    "metrics with a number": (METRICS, with_line(b"5")),
    "metrics with a word": (METRICS, with_line(b"hello")),
    "metrics with odd iterations": (METRICS, with_line(b'{"iteration": "two", "env/return": 1.0}')),
    "metrics without iterations": (METRICS, with_line(b'{"env/return": 1.0}')),
    "metrics with null": (METRICS, with_line(b'{"iteration": null}')),
    "metrics with words": (METRICS, with_line(b'{"iteration": 1, "env/return": "high", "time/iteration": []}')),
    "metrics beyond numbers": (METRICS, with_line(b'{"iteration": 1, "env/return": 1e999, "env/total_steps": NaN}')),
    "metrics of bytes": (METRICS, with_line(b"\xff\xfe\x00\x80")),
    "metrics very deep": (METRICS, with_line(b"[" * 100_000)),
    "metrics missing": (METRICS, Path.unlink),
    "origin torn": (ORIGIN, torn),
    "origin empty": (ORIGIN, containing("")),
    "origin missing": (ORIGIN, Path.unlink),
    "origin a list": (ORIGIN, containing("[]")),
    "origin with numbers": (ORIGIN, containing('{"source": 1, "plugin_dir": 2}')),
    "config torn": (CONFIG, torn),
    "config empty": (CONFIG, containing("")),
    "config of bytes": (CONFIG, containing(b"\xff\xfe\x00")),
    "weights torn": (WEIGHTS, torn),
    "weights empty": (WEIGHTS, containing("")),
    "weights pickled": (WEIGHTS, pickled),
    "weights pickled by torch": (WEIGHTS, pickled_by_torch),
    "weights a folder": (WEIGHTS, as_folder),
    "policy with a list of options": (POLICY, with_options([1])),
    "policy with a word for options": (POLICY, with_options("mlp")),
    "policy with no options": (POLICY, with_options(None)),
    "policy without spec": (POLICY, without("spec")),
    "policy torn": (POLICY, torn),
    "policy a list": (POLICY, containing("[]")),
    "policy with a dangling link": ("checkpoints/last/policy/link", lambda path: path.symlink_to("nowhere")),
    "manifest torn": ("checkpoints/last/manifest.json", torn),
    "graph of bytes": ("graph.mmd", containing(b"\xff\xfe")),
}  # fmt: skip


FAST = {"summary torn", "metrics of bytes", "origin torn", "config torn", "weights torn", "policy torn"}
"""One damage of each file."""


def all_but_some_slow(kinds: tuple[str, ...]) -> list[Any]:
    """Names of damages, of which `make test` tries those in `FAST`."""
    return [name if name in FAST else only_slow(name) for name in DAMAGES if name.startswith(kinds)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", all_but_some_slow(("",)))
def test_no_command_falls_over_any_damage(run: Path, tmp_path: Path, damage: str) -> None:
    name, spoil = DAMAGES[damage]
    spoil(run / name)
    light = ("report", "export", "validate", "plan", "graph")
    tried = STARTING.get(damage.split()[0], set(commands(run, tmp_path)))
    chosen = [each for each in commands(run, tmp_path) if each.startswith(light) or each in tried]
    for number, command in enumerate(chosen):
        copy = Path(shutil.copytree(run, tmp_path / f"copy-{number}", symlinks=True))
        answer = ask(*commands(copy, tmp_path / f"out-{number}")[command])
        assert answer.code == 0 or answer.text.strip(), f"{command} says nothing"
        assert "Traceback" not in answer.text
        if answer.code == 1:
            assert answer.is_one_sentence, f"{command}: {answer.text}"


@pytest.mark.parametrize("damage", all_but_some_slow(("summary", "metrics", "origin")))
def test_what_is_not_in_a_checkpoint_is_mended_by_resume(run: Path, damage: str) -> None:
    before = read_summary(run)
    name, spoil = DAMAGES[damage]
    spoil(run / name)
    answer = ask("resume", str(run), "run.iterations=3", "tracking.report=true")
    assert answer.code == 0, answer.text
    after = read_summary(run)
    assert after["iterations"] == 3 and after["evaluations"].items() >= before["evaluations"].items()
    rows, odd = read_rows(run / METRICS)
    assert odd == 0 and rows[-1]["iteration"] == 3
    assert json.loads((run / ORIGIN).read_text())["source"]
    assert "</html>" in (run / "report.html").read_text()


@pytest.mark.parametrize("damage", ["summary torn", "summary missing"])
def test_a_run_that_is_done_gets_its_summary_back(run: Path, damage: str) -> None:
    before = read_summary(run)
    name, spoil = DAMAGES[damage]
    spoil(run / name)
    answer = ask("report", str(run))
    if damage == "summary missing":  # as of a run that was killed
        assert answer.code == 0 and "unfinished" in (run / "report.html").read_text()
    else:
        assert answer.code == 1 and answer.is_one_sentence and SUMMARY in answer.text
    assert ask("resume", str(run)).code == 0
    after = read_summary(run)
    assert {key: after[key] for key in ("evaluations", "env_steps", "config_hash")} == {
        key: before[key] for key in ("evaluations", "env_steps", "config_hash")
    }
    assert ask("report", str(run)).code == 0


def test_odd_lines_of_metrics_are_left_out_of_the_report_and_counted(run: Path) -> None:
    DAMAGES["metrics with words"][1](run / METRICS)
    answer = ask("report", str(run))
    assert answer.code == 0 and f"2 lines of {run / METRICS}" in answer.text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("weights torn", "damaged or cut short"),
        ("weights empty", "damaged or cut short"),
        ("weights pickled", "is a pickle, which could run code and is not read"),
        ("weights pickled by torch", "is a pickle, which could run code and is not read"),
        ("policy with a list of options", "options is [1], no object"),
        ("policy with a word for options", "options is 'mlp', no object"),
    ],
)
def test_damaged_weights_are_named(run: Path, tmp_path: Path, damage: str, said: str) -> None:
    name, spoil = DAMAGES[damage]
    spoil(run / name)
    answer = ask(*commands(run, tmp_path)["run its weights"])
    said_once = answer.text.removesuffix("1 fault; nothing was started.\n").strip()
    assert answer.code in (1, 2) and len(said_once.splitlines()) == 1
    assert said in answer.text and Path(name).name in answer.text


def test_what_cannot_be_exported_is_said_in_one_sentence(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a-file"
    out.write_text("in the way")
    answer = ask("export", str(run), "--out", str(out / "exported"))
    assert answer.code == 1 and answer.is_one_sentence and "could not be exported" in answer.text
    (run / "checkpoints/last/policy/link").symlink_to("nowhere")
    answer = ask("export", str(run / "checkpoints/last"), "--out", str(tmp_path / "exported"))
    assert answer.code == 1 and answer.is_one_sentence and "link" in answer.text
    assert not (tmp_path / "exported").exists() and not (tmp_path / ".exported.tmp").exists()


def test_what_a_killed_process_left_goes_when_the_run_goes_on(run: Path) -> None:
    leftovers = [run / ".summary.json.tmp", run / ".ranks", run / "videos" / ".iteration_000001.mp4.partial"]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    assert ask("resume", str(run), "run.iterations=3").code == 0
    assert not any(path.exists() for path in leftovers)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
