"""Python programs that tests start as real processes, without paying for the same imports each time.

`Program([...])` is a `subprocess.Popen` and `run([...])` a `subprocess.run` of `python ...`, for words such as
`-m embodyrl run ...`, `-c CODE` or `FILE ...`. The process is forked from a server that has imported torch and embodyrl
already. It is a child of the test's process all the same: it has its own signals, process group, environment, streams,
and the exit code of its interpreter. What a fresh interpreter alone can show (which modules a command imports,
variables that libraries read when they are loaded, terminals) is tested with `subprocess` itself.

What embodyrl starts (ranks, rollout workers, the process that simulators are forked from, runs of a sweep) is forked
likewise: in such a program, unless it is a `Program(..., children="fresh")`, and in a test's own process, unless the
test uses the fixture `fresh_children`. A program has a spare process for that, which was forked before the program
began, so that it knows nothing of what the program does. `children_of` leaves it out.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

IMPORTED = ("torch.utils.tensorboard", "av", "gymnasium", "PIL.Image", "embodyrl.tracking.report.page")
"""What the server imports; the last one, Bokeh."""
ROOMS = ("algorithms", "engine", "pipelines", "rollout", "runner", "tracking", "cli")
"""Parts of embodyrl of which it imports every module."""
WARM_UP, PLAN = ["run", "--print-config", "experiment/gym_pendulum"], ["plan", "experiment/gym_pendulum"]
"""Commands that the server runs, so that what they import and remember is there in every program."""
VLA = ("embodyrl.models.libraries",)
"""What programs with a vision-language-action model need beside that; for `preload`."""
STARTING = "embodyrl.placement.process"
"""Module of embodyrl that starts interpreters."""
LONGEST_MESSAGE = 1 << 18
MOST_FDS = 16
HIGH_FDS = 500
"""Where file descriptors start that no program has."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, PR_SET_NAME = 36, 1, 15
MADV_COLLAPSE, HUGE_PAGE = 25, 1 << 21
SPARE = "embodyrl-spare"
"""What a program's spare process is called."""
Children = Literal["warm", "fresh"]


class Program(subprocess.Popen):
    """A Python program in a process of its own.

    Args:
        words: what stands after `python` on a command line.
        preload: modules that the server imports first if it has not yet.
        children: what this program starts itself is forked from its spare process, or is a fresh interpreter.
        forget: packages that it and its children import anew, though the server may have them: they read variables.
        ignored: signals that it ignores from the start, as a shell or `nohup` would have it.
        options: of `subprocess.Popen`; `cwd`, `env`, streams, `pass_fds`, `text`, and those about the process group.
    """

    _name, _blocked = "python3", ()

    def __init__(
        self,
        words: Sequence[str],
        *,
        preload: Sequence[str] = (),
        children: Children = "warm",
        forget: Sequence[str] = (),
        ignored: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._preload, self._children, self._forget = list(preload), children, list(forget)
        self._ignored = [int(number) for number in ignored]
        super().__init__([str(word) for word in words], **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        """Ask the server for a process, where `Popen` forks one itself."""
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes = options[:15]
        *_, new_session, process_group = options
        stdin, _, _, stdout, _, stderr = pipes
        request = {
            "words": args,
            "name": self._name,
            "preload": self._preload,
            "children": self._children,
            "forget": self._forget,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": {name: os.fspath(value) for name, value in (os.environ if env is None else env).items()},
            "new_session": new_session,
            "process_group": process_group,
            "own_group": os.getpgid(0),
            "ignored": self._ignored,
            "blocked": self._blocked,
            # What a process inherits.
            "cpus": sorted(os.sched_getaffinity(0)),
            "limits": {number: resource.getrlimit(number) for number in LIMITS},
            "fds": list(pass_fds),
            # What a test starts must not outlive it; what a program starts has to see to that itself.
            "dies_with_parent": isinstance(server(), Server),
        }
        fds = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        self.pid = server().start(request, [*fds, *pass_fds])
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


class Child(Program):
    """What embodyrl starts, `[sys.executable, "-u", "-P", "-c", code, label, ...]`, as a program; its process has the
    label's name, such as `rank 1`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        words = words_of(command)
        self._name = words[2] if len(words[2]) < 16 else self._name
        # As a process inherits it; a test's program does not, since tests may have left something ignored.
        ignored = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_IGN]
        self._blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        super().__init__(words, ignored=ignored, **options)


class Subprocess:
    """The module `subprocess` for `STARTING`: interpreters are forked, all else is as it was."""

    Popen = Child

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def words_of(command: Sequence[str]) -> list[str]:
    """Return the words of `[sys.executable, "-u", "-P", "-c", code, ...]` for `Program`."""
    executable, *words = command
    assert executable == sys.executable, command
    while words[0] in ("-u", "-P"):  # programs write line by line, and this code sets its module path itself
        words.pop(0)
    return words


@contextlib.contextmanager
def warm_children() -> Iterator[None]:
    """Fork what embodyrl starts in this process, until the block ends."""
    before = start_with(Subprocess())
    yield
    start_with(before)


@contextlib.contextmanager
def fresh_children() -> Iterator[None]:
    """Start interpreters again where embodyrl does, until the block ends."""
    before = start_with(subprocess)
    yield
    start_with(before)


def start_with(substitute: Any) -> Any:
    """Have embodyrl start processes with another module than `subprocess`; returns the one that it had."""
    module: Any = importlib.import_module(STARTING)
    before, module.subprocess = module.subprocess, substitute
    return before


def children_of(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """Return the processes that a program started: its children, but for spare processes and the server."""
    found = []
    for each in process.children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name() != SPARE:
                found.append(each)
    return found


class Spare:
    """A process that others are forked from, as seen by the one that is to be their parent.

    Args:
        line: to it.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line, self._turn, self._asked = line, threading.Lock(), 0

    def start(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Start a program; returns the id of its process, which is a child of this one."""
        # Its parent ends at once, and whoever is a subreaper then becomes its parent. Only for that moment: other
        # orphans are none of ours.
        prctl = ctypes.CDLL(None).prctl
        with self._turn:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self._asked += 1
                request["number"] = self._asked
                socket.send_fds(self._line, [json.dumps(request).encode()], list(fds))
                answer = {"number": 0}
                while 0 <= answer["number"] < self._asked:  # a signal may have interrupted who awaited an earlier one
                    answer = json.loads(self._line.recv(LONGEST_MESSAGE) or '{"number": -1}')
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if "pid" not in answer:
            raise RuntimeError(f"no program could be forked: {answer.get('error', 'the server died')}")
        return int(answer["pid"])


class Server(Spare):
    """The process that a test's programs are forked from."""

    def __init__(self) -> None:
        line, theirs = socket_pair()
        super().__init__(line)
        with theirs:
            code = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import programs; "
            code += f"asked = programs.begin_serving({theirs.fileno()})\n"
            code += "programs.end(programs.be(asked['words']))"
            # One thread for libraries that read this when they are loaded; programs have their own variables.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is none of its business
            )

    def close(self) -> None:
        """End it; programs that run stay."""
        self._line.close()
        self._process.wait(60)


_server: Spare | None = None
"""What this process has its programs forked from, once it is needed."""


def server() -> Spare:
    """Return the process that programs are forked from, started when it is first needed."""
    global _server
    if _server is None:
        _server = Server()
    return _server


def close() -> None:
    """End the server, if there is one."""
    global _server
    if isinstance(_server, Server):
        _server.close()
        _server = None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a line to a process that others are forked from."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_MESSAGE)
    return ends


# ------------------------------------------------------------------------------------------------------ in the server


def serve(line: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Returns in such a process only: what it was asked to be."""
    done = set(sys.modules)
    while True:
        data, fds, _, _ = socket.recv_fds(line, LONGEST_MESSAGE, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        request = json.loads(data)
        number = {"number": request["number"]}
        modules = [name for name in request["preload"] if name not in done]
        try:
            for name in modules:
                importlib.import_module(name)
        except ImportError as missing:
            line.send(json.dumps({**number, "error": repr(missing)}).encode())
            continue
        done.update(modules)
        if modules:
            use_huge_pages()
        gc.freeze()  # a program's collector would write to all pages, and unshare them
        # Threads of libraries below Python (a memory allocator's, a mathematics library's) know what a fork is.
        if (threads := threading.active_count()) > 1:
            error = f"importing {modules} started {threads - 1} thread(s)"
            line.send(json.dumps({**number, "error": error}).encode())
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
            return begin(request, fds, writer)
        os.waitpid(between, 0)
        for fd in (writer, *fds):
            os.close(fd)
        pid = os.read(reader, 20)
        os.close(reader)
        line.send(json.dumps({**number, **({"pid": int(pid)} if pid else {"error": "it died at once"})}).encode())


def begin(request: dict[str, Any], fds: list[int], writer: int) -> dict[str, Any]:
    """Make this process what a fresh interpreter would be, with a spare process if it shall have one, which does not
    return from here but in the processes that are forked from it."""
    # Whoever waits for its id must have it before a signal can end it, and a signal that comes early must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    join_group(request)
    # Out of the way: what is inherited has the numbers that it had.
    *fds, writer = [move(fd) for fd in (*fds, writer)]
    for module in [name for name in sys.modules if name.partition(".")[0] in request["forget"]]:
        del sys.modules[module]
    if request["children"] == "warm":
        ours, theirs = socket_pair()
        if os.fork() == 0:
            for fd in (ours.detach(), writer, *fds):
                os.close(fd)
            be_deaf()
            return serve(theirs)
        theirs.close()
        hold(ours)
    name_process(request["name"])  # not before: until it has a name of its own, the spare has that of the server
    if request["dies_with_parent"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    become(request, fds)
    gc.enable()
    os.write(writer, str(os.getpid()).encode())  # not before its session and group are what they will be
    os.close(writer)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return request


def move(fd: int) -> int:
    """Give a file descriptor a number that nothing else has."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FDS)
    os.close(fd)
    return moved


def hold(line: socket.socket) -> None:
    """Have what embodyrl starts in this program forked from its spare process."""
    global _server
    _server = Spare(socket.socket(fileno=move(line.detach())))
    start_with(Subprocess())


def hear_signals() -> None:
    """Undo that signals are ignored: a shell without job control has what it starts in the background ignore SIGINT."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in STOPPING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def be_deaf() -> None:
    """Be a spare process: it ends with the program, and signals are none of its business."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # those for what is forked from it wait there
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def name_process(name: str) -> None:
    """Set what lists of processes show."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def warm_up() -> None:
    """Import what programs will need, and fill the caches of the package."""
    rooms = [importlib.import_module(f"embodyrl.{room}") for room in ROOMS]
    modules = [each.name for room in rooms for each in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]
    for name in (*IMPORTED, *modules):
        importlib.import_module(name)
    from embodyrl.cli.main import app
    from embodyrl.envs.states import installed_version

    with contextlib.redirect_stdout(io.StringIO()):
        app(WARM_UP, standalone_mode=False)
    installed_version("none of this name")
    for name in needed_to_plan():
        importlib.import_module(name)
    forget_exits()
    gc.collect()


def use_huge_pages() -> None:
    """Move the memory of this process into huge pages, as far as the system has some: a fork copies the tables of
    pages, which takes a third of the time then."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if access.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            for page in range(start + -start % HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                # It refuses what is hardly used, and is unknown before Linux 6.1.
                libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def forget_exits() -> None:
    """Leave out of programs what imported libraries do at their end: most of the time of a short one. What a program
    itself registers is done."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def needed_to_plan() -> list[str]:
    """Return what `plan` imports. It runs in a process of its own: one that has computed gradients may have threads for
    it, as with a CUDA build of torch, and must not be forked."""
    from embodyrl.cli.main import app

    reader, writer = os.pipe()
    if os.fork() == 0:
        before = set(sys.modules)
        with contextlib.redirect_stdout(io.StringIO()):
            app(PLAN, standalone_mode=False)
        os.write(writer, json.dumps([name for name in sys.modules if name not in before]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        names = json.load(said)
    os.wait()
    return [name for name in names if importlib.util.find_spec(name.partition(".")[0])]


def join_group(request: dict[str, Any]) -> None:
    """Enter the session and the process group that the program shall be in."""
    if request["new_session"]:
        os.setsid()
    elif request["process_group"] != -1:
        os.setpgid(0, request["process_group"])
    else:
        os.setpgid(0, request["own_group"])


def become(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Make this process what a fresh interpreter with these words would be."""
    for number, fd in zip([0, 1, 2, *request["fds"]], fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number in STOPPING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    os.sched_setaffinity(0, request["cpus"])
    for number, limits in request["limits"].items():
        resource.setrlimit(int(number), limits)
    kind, *arguments = request["words"]
    first = {"-m": request["cwd"], "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    own = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *own, *(path for path in sys.path[1:] if path not in own)]
    sys.argv[:] = {"-m": arguments, "-c": ["-c", *arguments[1:]]}.get(kind, request["words"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def be(words: Sequence[str]) -> int:
    """Run the program; returns its exit code, or minus the number of the signal that an interpreter would end by."""
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, int | None):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        shown = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, shown)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End this process as an interpreter does, but leave its memory to the system: taking apart all that was imported
    costs a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def begin_serving(fd: int) -> dict[str, Any]:
    """Be the server. Returns in programs only: what each was asked to be."""
    hear_signals()
    name_process(SPARE)
    gc.disable()  # nothing that is imported is garbage
    warm_up()
    use_huge_pages()
    return serve(socket.socket(fileno=fd))
