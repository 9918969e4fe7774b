"""Python programs that tests start as real processes, without paying for the same imports each time.

`Program([...])` is a `subprocess.Popen` and `run([...])` a `subprocess.run` of `python ...`, for words such as
`-m embodyrl run ...`, `-c CODE` or `FILE ...`. The process is forked from a server that has imported torch and embodyrl
already. It is a child of the test's process all the same: it has its own signals, process group, environment, streams,
and the exit code of its interpreter. What a fresh interpreter alone can show (which modules a command imports,
variables that libraries read when they are loaded, terminals) is tested with `subprocess` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORTED = ("torch.utils.tensorboard", "tensordict", "av", "gymnasium", "PIL.Image", "embodyrl.tracking.report.page")
"""What the server imports; the last one, Bokeh."""
ROOMS = ("algorithms", "engine", "pipelines", "rollout", "runner", "tracking", "cli")
"""Parts of embodyrl of which it imports every module."""
WARM_UP = (["plan", "experiment/gym_pendulum"], ["run", "--print-config", "experiment/gym_pendulum"])
"""Commands that the server runs itself, so that what they import and remember is there in every program."""
VLA = ("embodyrl.models.libraries",)
"""What programs with a vision-language-action model need beside that; for `preload`."""
LONGEST_MESSAGE = 1 << 18
PR_SET_CHILD_SUBREAPER = 36


class Program(subprocess.Popen):
    """A Python program in a process of its own.

    Args:
        words: what stands after `python` on a command line.
        preload: modules that the server imports first if it has not yet.
        options: of `subprocess.Popen`; `cwd`, `env`, the three streams, `text`, and those about the process group.
    """

    def __init__(self, words: Sequence[str], *, preload: Sequence[str] = (), **options: Any) -> None:
        self._preload = list(preload)
        super().__init__([str(word) for word in words], **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        """Ask the server for a process, where `Popen` forks one itself."""
        _, _, _, _, cwd, env, _, _, _, *pipes = options[:15]
        *_, new_session, process_group = options
        stdin, _, _, stdout, _, stderr = pipes
        request = {
            "words": args,
            "preload": self._preload,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": {name: os.fspath(value) for name, value in (os.environ if env is None else env).items()},
            "new_session": new_session,
            "process_group": process_group,
        }
        fds = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        self.pid = server().start(request, fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(
    words: Sequence[str], *, timeout: float = 100.0, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end; returns its exit code and what it wrote, as text.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout` [s], and was killed.
        subprocess.CalledProcessError: it failed, and `check` is true.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Program(words, **{**streams, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Server:
    """The process that programs are forked from, as tests see it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._line, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_MESSAGE)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            # One thread for libraries that read this when they are loaded; programs have their own variables.
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is none of its business
            )

    def start(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Start a program; returns the id of its process, which is a child of this one."""
        # Its parent ends at once, and whoever is a subreaper then becomes its parent. Only for that moment: other
        # orphans of tests are none of ours.
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._line, [json.dumps(request).encode()], list(fds))
            answer = json.loads(self._line.recv(LONGEST_MESSAGE) or "{}")
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if "pid" not in answer:
            raise RuntimeError(f"no program could be forked: {answer.get('error', 'the server died')}")
        return int(answer["pid"])

    def close(self) -> None:
        """End it; programs that run stay."""
        self._line.close()
        self._process.wait(60)


@functools.cache
def server() -> Server:
    """The server of this test process, started when it is first needed."""
    return Server()


def close() -> None:
    """End the server, if there is one."""
    if server.cache_info().currsize:
        server().close()
        server.cache_clear()


# ------------------------------------------------------------------------------------------------------ in the server


def serve(line: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Returns in such a process only: what it was asked to be."""
    hear_signals()
    gc.disable()  # until a program begins: nothing that is imported is garbage
    warm_up()
    done = set(sys.modules)
    while True:
        data, fds, _, _ = socket.recv_fds(line, LONGEST_MESSAGE, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        request = json.loads(data)
        modules = [name for name in request["preload"] if name not in done]
        try:
            for name in modules:
                importlib.import_module(name)
        except ImportError as error:
            line.send(json.dumps({"error": repr(error)}).encode())
            continue
        done.update(modules)
        gc.freeze()  # a program's collector would write to all pages, and unshare them
        if (tasks := len(os.listdir("/proc/self/task"))) > 1:
            line.send(json.dumps({"error": f"importing {modules} started {tasks - 1} thread(s)"}).encode())
            continue
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for fd in (reader, line.detach()):
                os.close(fd)
            gc.enable()
            become(request, fds)
            os.write(writer, str(os.getpid()).encode())  # not before its session and group are what they will be
            os.close(writer)
            return request
        os.waitpid(between, 0)
        for fd in (writer, *fds):
            os.close(fd)
        pid = os.read(reader, 20)
        os.close(reader)
        line.send(json.dumps({"pid": int(pid)} if pid else {"error": "it died at once"}).encode())


def hear_signals() -> None:
    """Undo that signals are ignored: a shell without job control has what it starts in the background ignore SIGINT."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def warm_up() -> None:
    """Import what programs will need, and fill the caches of the package."""
    rooms = [importlib.import_module(f"embodyrl.{room}") for room in ROOMS]
    modules = [each.name for room in rooms for each in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]
    for name in (*IMPORTED, *modules):
        importlib.import_module(name)
    from embodyrl.cli.main import app

    with contextlib.redirect_stdout(io.StringIO()):
        for words in WARM_UP:
            app(words, standalone_mode=False)
    gc.collect()


def become(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Make this process what a fresh interpreter with these words would be."""
    if request["new_session"]:
        os.setsid()
    elif request["process_group"] != -1:
        os.setpgid(0, request["process_group"])
    else:
        os.setpgid(0, os.getpgid(os.getppid()))
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    kind, *arguments = request["words"]
    first = {"-m": request["cwd"], "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    own = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *own, *(path for path in sys.path[1:] if path not in own)]
    sys.argv[:] = {"-m": arguments, "-c": ["-c", *arguments[1:]]}.get(kind, request["words"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def be(words: Sequence[str]) -> None:
    """Run the program."""
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asked = serve(socket.socket(fileno=int(sys.argv[1])))
    # At the top of the file, so that the program ends as any other: its exceptions are the interpreter's business.
    be(asked["words"])
