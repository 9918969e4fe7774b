"""Tracking services: what every one of them has, by a service made here; and the real libraries, offline."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from embodyrl.config.schema import ServiceConfig
from embodyrl.registry import SINKS
from embodyrl.tracking import SinkContext
from embodyrl.tracking.services import ServiceError, ServiceSink
from embodyrl.tracking.sinks import TensorboardSink


class Service(ServiceSink):
    """Keeps what it gets."""

    name = "kept"
    answers = threading.Event()
    """Set once it answers."""
    answers.set()
    breaks_at: int | None = None

    def open(self, run_id: str | None) -> None:
        self.answers.wait()
        self.need_key("KEPT_KEY", False, "kept login")
        self.before, self.rows, self.files, self.ended = run_id, [], [], False
        self.keep_id(run_id or "first")

    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        if iteration == self.breaks_at:
            raise ConnectionError("gone")
        self.rows.append((iteration, metrics))

    def upload(self, path: Path, name: str) -> None:
        self.files.append(name)

    def end(self) -> None:
        self.ended = True


def context(folder: Path, said: list[str] | None = None, **service: object) -> SinkContext:
    return SinkContext(
        run_dir=folder,
        iterations=3,
        start_iteration=0,
        name="mine",
        settings={"seed": 1, "env.tasks": ["a", "b"], "model.checkpoint": None},
        service=ServiceConfig(**service),  # type: ignore[arg-type]
        warn=([] if said is None else said).append,
    )


def test_a_service_gets_rows_and_files_and_a_resume_goes_on_with_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "iteration_000002.mp4").write_bytes(b"...")
    said: list[str] = []
    sink = Service(context(tmp_path, said))
    sink.log(1, {"env/return": 1.0, "train/explained_variance": float("nan")})
    sink.log(2, {"env/return": 2.0})
    sink.close()
    assert sink.rows == [(1, {"env/return": 1.0}), (2, {"env/return": 2.0})]
    assert sink.files == ["config.yaml", "videos/iteration_000002.mp4"] and sink.ended and not said
    again = Service(context(tmp_path, artifacts=False))
    again.close()
    assert again.before == "first" and not again.files


def test_a_service_that_breaks_is_told_of_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "breaks_at", 2)
    said: list[str] = []
    sink = Service(context(tmp_path, said))
    for iteration in range(1, 5):
        sink.log(iteration, {"env/return": 1.0})
        time.sleep(0.05)
    sink.close()
    assert [iteration for iteration, _ in sink.rows] == [1] and not sink.ended
    assert len(said) == 1 and "sink 'kept' gets nothing more" in said[0] and "ConnectionError: gone" in said[0]


@pytest.mark.parametrize("when", ["open", "send", "end"])
def test_a_library_that_ends_its_thread_is_a_fault_as_any_other(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls sys.exit where it may not go on, which in a thread ends that alone, without a word."""
    for number, error in enumerate((SystemExit(3), KeyboardInterrupt(), GeneratorExit("gone"))):

        def stop(*_: object, error: BaseException = error) -> None:
            raise error

        said: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(Service, when, stop)
            folder = tmp_path / str(number)
            if when == "open":
                with pytest.raises(ServiceError, match=f"sink 'kept' cannot be used: {type(error).__name__}"):
                    Service(context(folder, said))
                continue
            sink = Service(context(folder, said))
            sink.log(1, {"env/return": 1.0})
            sink.close()
        assert (
            len(said) == 1
            and f"gets nothing more of this run, which has it all in its own files ({type(error).__name__}" in said[0]
        )


HANGING = """
import atexit, sys, threading, time
from pathlib import Path
from embodyrl.config.schema import ServiceConfig
from embodyrl.tracking import SinkContext
from embodyrl.tracking.services import ServiceSink

class Service(ServiceSink):
    name = "hanging"
    def open(self, run_id):
        atexit.register(print, "first, in its time", flush=True)
        atexit.register(threading.Event().wait)
        atexit.register(self.taken_back)
        atexit.unregister(self.taken_back)
    def taken_back(self): print("taken back", flush=True)
    def send(self, iteration, metrics): pass
    def upload(self, path, name): pass
    def end(self): pass

atexit.register(print, "the program's own", flush=True)
sink = Service(SinkContext(run_dir=Path(sys.argv[1]), iterations=3, start_iteration=0, name="mine", settings={},
    service=ServiceConfig(timeout_s=0.3, artifacts=False), warn=print))
sink.close()
sys.exit(5)
"""


def test_a_hook_of_a_library_that_hangs_does_not_keep_the_program_alive(tmp_path: Path) -> None:
    """In an interpreter of its own, whose end it is about."""
    words = [sys.executable, "-c", HANGING, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 5, done.stderr
    assert done.stdout == "first, in its time\nthe program's own\n"
    assert (
        "warning: the library of sink 'hanging' has not ended within tracking.service.timeout_s = 0.3 s" in done.stderr
    )


def test_a_service_that_does_not_answer_or_wants_a_key_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServiceError, match=r"has no key: set KEPT_KEY, or run `kept login` once"):
        Service(context(tmp_path, online=True))
    monkeypatch.setattr(Service, "answers", threading.Event())
    with pytest.raises(ServiceError, match=r"no answer within tracking.service.timeout_s = 0.2 s"):
        Service(context(tmp_path, timeout_s=0.2))
    Service.answers.set()


# Each in a process of its own: the libraries start processes and threads, and keep settings for good.
PROGRAM = """
import json, sys
from pathlib import Path
import psutil
from embodyrl.config.schema import ServiceConfig
from embodyrl.registry import SINKS
from embodyrl.tracking import SinkContext

name, folder = sys.argv[1], Path(sys.argv[2])
for start in (0, 2):
    sink = SINKS.load(name)(SinkContext(
        run_dir=folder, iterations=4, start_iteration=start, name="mine", settings={"seed": 1, "env.tasks": ["a"]},
        service=ServiceConfig(project="tests"), warn=lambda text: print("WARN", text)))
    for step in (1, 2):
        sink.log(start + step, {"env/return": float(start + step)})
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    ports = [port.laddr for each in mine for port in each.net_connections(kind="inet") if port.status == "LISTEN"]
    sink.close()
    print("ID", json.loads((folder / "tracking" / name / "id.json").read_text())["id"], "PORTS", ports)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab", "mlflow"])
def test_the_real_library_takes_a_run_and_its_resume_offline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := SINKS.entry(name).missing():
        pytest.skip(f"{missing[0].module} is not installed: {missing[0].install}")
    if name == "mlflow" and importlib.util.find_spec("sqlalchemy") is None:
        pytest.skip("sqlalchemy is not installed, which mlflow's SQLite store needs: pip install 'embodyrl[mlflow]'")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    command = [sys.executable, "-c", PROGRAM, name, str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ID ", "WARN "))]
    assert done.returncode == 0 and len(lines) == 2, done.stdout + done.stderr
    assert lines[0] == lines[1] and lines[0].startswith("ID ") and lines[0].endswith("PORTS []")
    run_id = lines[0].split()[1]
    if name == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/tracking/mlflow/mlflow.db")
        history = client.get_metric_history(run_id, "env/return")
        assert sorted((each.step, each.value) for each in history) == [(step, float(step)) for step in (1, 2, 3, 4)]
        assert client.get_run(run_id).data.params == {"seed": "1", "env.tasks": "['a']"}
        assert [file.path for file in client.list_artifacts(run_id)] == ["config.yaml"]
    elif name == "wandb":
        files = sorted((tmp_path / "tracking" / "wandb" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
        assert len(files) == 2 and all(b"env/return" in file.read_bytes() for file in files)
    elif name == "swanlab":
        files = sorted((tmp_path / "tracking" / "swanlab").glob(f"run-*-{run_id}/run-{run_id}.swanlab"))
        assert files and any(file.stat().st_size for file in files)
    else:
        import sqlite3

        with sqlite3.connect(tmp_path / "store" / "tests.db") as store:
            rows = store.execute("select step, metrics from metrics where run_name = ? order by step", (run_id,))
            assert [(step, json.loads(row)["env/return"]) for step, row in rows] == [
                (step, float(step)) for step in (1, 2, 3, 4)
            ]


def test_tensorboard_has_a_page_of_charts_and_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorboardSink(context(tmp_path))
    sink.log(1, {"env/return": 1.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert "env/return" in tags["scalars"] and "custom_scalars__config__" in tags["tensors"]
    found = events.summary_metadata
    assert found["_hparams_/session_start_info"].plugin_data.plugin_name == "hparams"
