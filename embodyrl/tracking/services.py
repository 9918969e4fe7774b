"""Tracking services as metric sinks: wandb, trackio, swanlab, mlflow.

A service is asked from a thread of its own, so that one that is slow or gone never holds up a run: the run waits for it
only at its beginning and at its end, at most `tracking.service.timeout_s` each. Nothing is ever asked on the terminal.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import math
import os
import queue
import re
import secrets
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from embodyrl.errors import RemediedError, without_controls
from embodyrl.files import write_whole
from embodyrl.runs import CONFIG_FILE, REPORT_FILE, SUMMARY_FILE, VIDEOS
from embodyrl.tracking.sinks import SinkContext

FOLDER = "tracking"
"""Folder of a run for what its services keep there."""
ID_FILE = "id.json"
"""Which run of the service this run is, so that a resume continues with it."""
ARTIFACTS = (CONFIG_FILE, REPORT_FILE, SUMMARY_FILE, f"{VIDEOS}/*.mp4")
"""Files of a run that its services get at the end."""
PROBES = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
"""What swanlab would else find out about the machine."""
MAX_LATE = 10_000
"""Most rows that wait for a service; one that is so late is given up."""


class ServiceError(RemediedError):
    """Raised when a tracking service cannot be used."""


class _ExitHook:
    """What a library has registered for the end of the program, run for a limited time: one that waits for a server
    that is gone would keep the program alive for ever.

    Args:
        hook: what it has registered, with its arguments.
        sink: name of the sink.
        timeout_s: longest time that the program waits for it [s].
    """

    def __init__(self, hook: Callable[..., object], sink: str, timeout_s: float) -> None:
        self._hook, self._sink, self._timeout_s = hook, sink, timeout_s
        self._begins, self._ended = threading.Event(), threading.Event()
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        # It exists from now on, because no thread can be started while the interpreter ends (Python 3.12).
        threading.Thread(target=self._run, name=f"exit of sink {sink}", daemon=True).start()

    def __eq__(self, other: object) -> bool:
        """Return whether it is a hook, so that the library can unregister it."""
        return bool(self._hook == other)

    def __hash__(self) -> int:
        """Return the hash of the hook."""
        return hash(self._hook)

    def _run(self) -> None:
        self._begins.wait()
        try:
            self._hook(*self._given[0], **self._given[1])
        except BaseException as error:  # as atexit does
            sys.stderr.write(without_controls(f"warning: sink {self._sink!r}, at exit: {describe_error(error)}\n"))
        finally:
            self._ended.set()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the hook."""
        self._given = (args, kwargs)
        self._begins.set()
        if not self._ended.wait(self._timeout_s):
            sys.stderr.write(
                f"warning: the library of sink {self._sink!r} has not ended within tracking.service.timeout_s = "
                f"{self._timeout_s:g} s: what it had not sent by then is lost there, and is in the run's own files\n"
            )


_services: dict[int, ServiceSink] = {}
"""Sinks by the thread that asks their service."""
_register = atexit.register


def _register_limited(hook: Callable[..., object], /, *args: Any, **kwargs: Any) -> Callable[..., object]:
    """Take the place of `atexit.register`: limits what the library of a service registers, and nothing else."""
    sink = _services.get(threading.get_ident())
    _register(hook if sink is None else _ExitHook(hook, sink.name, sink.options.timeout_s), *args, **kwargs)
    return hook


def describe_error(error: BaseException) -> str:
    """Return type and text of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class ServiceSink(ABC):
    """Sends a run to a tracking service. A service has one subclass, with the calls of its library.

    Raises:
        ServiceError: the service cannot be reached, or wants a key that is not there.
    """

    name: ClassVar[str]
    """Name of the sink."""

    def __init__(self, context: SinkContext) -> None:
        self.context = context
        self.options = context.service
        self.project = context.service.project or "embodyrl"
        self.folder = context.run_dir / FOLDER / self.name
        """Folder for the files of the service."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_LATE)
        self._fault: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
        self._thread.start()
        tried = threading.Event()
        self._jobs.put(lambda: self._begin(tried))
        with quiet():
            answered = tried.wait(self.options.timeout_s)
        if isinstance(self._fault, ServiceError):
            raise self._fault
        if self._fault is not None or not answered:
            why = f"it gave no answer within tracking.service.timeout_s = {self.options.timeout_s:g} s"
            why = why if self._fault is None else describe_error(self._fault)
            raise ServiceError(
                f"sink {self.name!r} cannot be used: {why}",
                "set tracking.service.online=false, or take it out of tracking.sinks",
            ) from self._fault

    def _begin(self, tried: threading.Event) -> None:
        try:
            self.open(self._run_id())
        except BaseException as error:  # some libraries end the program where they may not continue
            self._fault = error
        finally:
            tried.set()

    # ---- what a service does

    @abstractmethod
    def open(self, run_id: str | None) -> None:
        """Begin the run at the service.

        Args:
            run_id: what `keep_id` kept, if this run has been there before.
        """

    @abstractmethod
    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        """Send the metrics of an iteration; all of them are finite."""

    @abstractmethod
    def upload(self, path: Path, name: str) -> None:
        """Send a file of the run; `name` is its path in the run directory."""

    @abstractmethod
    def end(self) -> None:
        """End the run at the service, once everything has been sent."""

    # ---- what every service needs

    def keep_id(self, run_id: str) -> None:
        """Keep which run of the service this is."""
        write_whole(self.folder / ID_FILE, json.dumps({"id": run_id}) + "\n")

    def _run_id(self) -> str | None:
        file = self.folder / ID_FILE
        return str(json.loads(file.read_text())["id"]) if file.is_file() else None

    def need_key(self, variable: str, found: bool, command: str) -> None:
        """Refuse to go online without a key, which the library would ask for on the terminal.

        Raises:
            ServiceError: there is none.
        """
        if self.options.online and not found:
            raise ServiceError(
                f"sink {self.name!r} is online (tracking.service.online) and has no key",
                f"set {variable}, or run `{command}` once, or set tracking.service.online=false",
            )

    # ---- as a sink

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of an iteration; does not wait."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._tell_fault()
        if self._fault is None:
            try:
                self._jobs.put_nowait(lambda: self.send(iteration, finite))
            except queue.Full:
                self._fault = TimeoutError(f"it is {MAX_LATE} rows late")

    def message(self, text: str) -> None:
        """Leave messages to run.log."""
        return

    def close(self) -> None:
        """Upload the run's files and end it there; waits at most `timeout_s`."""
        files = self._files() if self.options.artifacts else []
        try:
            for path in files:
                name = str(path.relative_to(self.context.run_dir))
                self._jobs.put_nowait(lambda path=path, name=name: self.upload(path, name))  # type: ignore[misc]
            self._jobs.put_nowait(self.end)
            self._jobs.put_nowait(None)
        except queue.Full:
            self._fault = TimeoutError(f"it is {MAX_LATE} rows late")
        with quiet():
            self._thread.join(self.options.timeout_s)
        if self._thread.is_alive() and self._fault is None:
            self._fault = TimeoutError(f"it has not taken everything within {self.options.timeout_s:g} s")
        self._tell_fault()

    def _files(self) -> list[Path]:
        return [path for pattern in ARTIFACTS for path in sorted(self.context.run_dir.glob(pattern)) if path.is_file()]

    def _work(self) -> None:
        """Do the jobs one after the other; after a fault none is done any more."""
        _services[threading.get_ident()] = self
        atexit.register = _register_limited  # type: ignore[assignment]
        try:
            while (job := self._jobs.get()) is not None:
                if self._fault is None:
                    try:
                        job()
                    except BaseException as error:  # SystemExit would end this thread alone, and in silence
                        self._fault = error
        finally:
            del _services[threading.get_ident()]

    def _tell_fault(self) -> None:
        """Say once that the service is not used any more. The run continues: its own files have everything."""
        if self._fault is not None and not self._told:
            self._told = True
            self.context.warn(
                f"warning: sink {self.name!r} gets nothing more of this run, which has it all in its own files "
                f"({describe_error(self._fault)})"
            )


def new_id() -> str:
    """Return an identifier for a run at a service; random, since it has to be unique there."""
    return secrets.token_hex(8)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what a library prints off the screen, which is the run's, and let it read nothing from the terminal."""
    stdin = sys.stdin
    with open(os.devnull) as nothing, redirect_stdout(io.StringIO()):
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


class WandbSink(ServiceSink):
    """Weights & Biases. Offline: `wandb sync <run>/tracking/wandb/wandb/offline-run-*` uploads later."""

    name = "wandb"

    def open(self, run_id: str | None) -> None:
        """See `ServiceSink`."""
        import wandb

        known = not self.options.online or bool(wandb.login(prompt=False, host=self.options.address))
        self.need_key("WANDB_API_KEY", known, "wandb login")
        run_id = run_id or new_id()
        self.keep_id(run_id)
        settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": self.options.timeout_s}
        # Nothing of the machine or of the user's code is sent unasked.
        settings |= {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True}
        if self.options.address is not None:
            settings["base_url"] = self.options.address
        self._run = wandb.init(
            project=self.project,
            name=self.context.name,
            id=run_id,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.context.settings),
            mode="online" if self.options.online else "offline",
            settings=wandb.Settings(**settings),
            reinit="create_new",
        )
        self._files_of_run = wandb.Artifact(f"run-{run_id}", type="run")
        # A run that continues does some iterations again, and steps of wandb only ever grow.
        self._run.define_metric("*", step_metric="iteration")

    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        """See `ServiceSink`."""
        self._run.log({"iteration": iteration} | metrics)

    def upload(self, path: Path, name: str) -> None:
        """See `ServiceSink`."""
        self._files_of_run.add_file(str(path), name=name)
        if path.suffix == ".mp4":
            import wandb

            self._run.log({Path(name).parent.name: wandb.Video(str(path), format="mp4")})

    def end(self) -> None:
        """See `ServiceSink`."""
        if self.options.artifacts:
            self._run.log_artifact(self._files_of_run)
        self._run.finish()


class TrackioSink(ServiceSink):
    """trackio, in its own store (TRACKIO_DIR), which `trackio show` reads; online: in a Space or on a server."""

    name = "trackio"

    def open(self, run_id: str | None) -> None:
        """See `ServiceSink`."""
        if self.options.online and self.options.address is None:
            raise ServiceError(
                "sink 'trackio' is online (tracking.service.online) and has no place to go to",
                "set tracking.service.address to a Space (owner/name) or to a server (http://...)",
            )
        import trackio

        run_id = run_id or f"{self.context.name}-{new_id()}"
        self.keep_id(run_id)
        address = self.options.address if self.options.online else None
        server = address is not None and address.startswith(("http://", "https://"))
        self._run = trackio.init(
            project=self.project,
            name=run_id,
            resume="allow",
            config=_plain(self.context.settings),
            space_id=None if server else address,
            server_url=address if server else None,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        """See `ServiceSink`."""
        self._run.log(metrics, step=iteration)

    def upload(self, path: Path, name: str) -> None:
        """See `ServiceSink`."""
        import trackio

        kind = path.suffix.lstrip(".")
        artifact = trackio.Artifact(re.sub(r"[^\w.-]", "-", f"{self._run.name}-{name}"), type=kind)
        artifact.add_file(str(path), name=name)
        self._run.log_artifact(artifact)

    def end(self) -> None:
        """See `ServiceSink`."""
        self._run.finish()


class SwanlabSink(ServiceSink):
    """SwanLab. Offline: `swanlab sync <run>/tracking/swanlab/run-*` uploads later."""

    name = "swanlab"

    def open(self, run_id: str | None) -> None:
        """See `ServiceSink`."""
        key = "SWANLAB_API_KEY" in os.environ or (Path.home() / ".swanlab" / ".netrc").is_file()
        self.need_key("SWANLAB_API_KEY", key, "swanlab login")
        import swanlab

        # It takes over stdout and describes the machine and the user's repository unless a setting says not to.
        settings: dict[str, Any] = {"interactive": False, "terminal": {"proxy_type": "none"}, "probe": PROBES}
        if self.options.address is not None:
            settings["api_host"] = self.options.address
        run_id = run_id or new_id()
        self.keep_id(run_id)
        self._run = swanlab.init(
            project=self.project,
            name=self.context.name,
            id=run_id,
            resume="allow",
            log_dir=str(self.folder),
            config=_plain(self.context.settings),
            mode="online" if self.options.online else "offline",
            settings=swanlab.Settings(**settings),
        )

    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        """See `ServiceSink`."""
        self._run.log(metrics, step=iteration)

    def upload(self, path: Path, name: str) -> None:
        """See `ServiceSink`."""
        if path.suffix == ".mp4":
            import swanlab

            self._run.log({"videos": swanlab.Video(str(path), caption=name)})
        else:
            self._run.save(str(path), base_path=str(self.context.run_dir), policy="now")

    def end(self) -> None:
        """See `ServiceSink`."""
        self._run.finish()


class MlflowSink(ServiceSink):
    """MLflow, in a SQLite file of the run, or at `tracking.service.address` (a server, or `sqlite:///FILE`)."""

    name = "mlflow"

    def open(self, run_id: str | None) -> None:
        """See `ServiceSink`."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of the tables that it makes
        from mlflow.tracking import MlflowClient

        place = self.folder.absolute()
        self._client = MlflowClient(tracking_uri=self.options.address or f"sqlite:///{place / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(self.project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            where = None if self.options.address is not None else str(place / "artifacts")
            number = self._client.create_experiment(self.project, artifact_location=where)
        if run_id is None:
            run_id = self._client.create_run(number, run_name=self.context.name).info.run_id
            self.keep_id(run_id)
            for name, value in self.context.settings.items():
                self._client.log_param(run_id, name, str(value)[:500])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_at = run_id

    def send(self, iteration: int, metrics: dict[str, float]) -> None:
        """See `ServiceSink`."""
        for name, value in metrics.items():
            self._client.log_metric(self._run_at, name, value, step=iteration)

    def upload(self, path: Path, name: str) -> None:
        """See `ServiceSink`."""
        parent = str(Path(name).parent)
        self._client.log_artifact(self._run_at, str(path), None if parent == "." else parent)

    def end(self) -> None:
        """See `ServiceSink`."""
        self._client.set_terminated(self._run_at)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return plain
