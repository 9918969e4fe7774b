"""Set up the project's virtual environment; `make` calls this before everything else.

    python3 scripts/setup.py [--torch auto|cpu|cuda] [--venv DIR] [--wheel FILE] [EXTRA ...]

Needs nothing but Python's standard library: neither pip, nor `venv`'s ensurepip, nor root. A second call with the same
pyproject.toml, constraints.txt and extras returns at once. A call that was killed is repaired by the next one, and two
calls at the same time take turns. What pip printed is in `<venv>/setup.log`.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - met by the system's python3, before anything that it cannot import
    found = "this is {}.{} ({})".format(*sys.version_info[:2], sys.executable)
    sys.exit("embodyrl needs Python 3.11 or newer; " + found + ". Name another one: make PYTHON=python3.12 ...")

import argparse
import contextlib
import csv
import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
RECIPE = 1
"""Counted up when this script starts to install something differently, so that existing environments follow."""
NO_DEPS = {"libero": ["hf-libero", "robosuite", "bddl"]}
"""Packages of an extra whose own requirements are not followed: they build EGL probes with cmake, for training only."""
NEEDS_TORCHVISION = {"vla"}
"""Extras that pull torchvision in, which must match torch's build."""
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_ZIPAPP = "https://bootstrap.pypa.io/pip/pip.pyz"
UNFINISHED = ".setup-unfinished"
"""File in the environment while it is being changed; still there afterwards, the set-up was killed."""


class SetupError(Exception):
    """Raised when the set-up cannot go on; its text says what failed and what to do."""


# ----------------------------------------------------------------------------------------------------------- screen


class Screen:
    """Progress in plain words with elapsed seconds: one line per step, and a sign of life while a step takes long."""

    def __init__(self) -> None:
        """Start the clock."""
        self._start = time.monotonic()
        self._live = sys.stdout.isatty()
        self._last = self._start

    def elapsed(self) -> float:
        """Seconds since the set-up began."""
        return time.monotonic() - self._start

    def step(self, text: str) -> None:
        """Announce a step."""
        self._clear()
        print(f"{self.elapsed():6.0f} s  {text}", flush=True)
        self._last = time.monotonic()

    def detail(self, text: str) -> None:
        """Say what the step is doing: every second on a terminal, every 20 s elsewhere."""
        if time.monotonic() - self._last < (1 if self._live else 20):
            return
        self._last = time.monotonic()
        line = f"{self.elapsed():6.0f} s    {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\033[K" + line[:width], end="", flush=True)
        else:
            print(line, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\033[K", end="")


SCREEN = Screen()


# --------------------------------------------------------------------------------------------------------- commands


def clean_environment() -> dict[str, str]:
    """The environment for children, without what would let packages from elsewhere leak into ours."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_CONSTRAINT", "PIP_REQUIREMENT"}
    kept = {key: value for key, value in os.environ.items() if key not in unwanted}
    return {**kept, "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def activity(line: str) -> str | None:
    """What a line of pip's output says that pip is doing, in a few words."""
    collecting = re.match(r"Collecting (\S+)", line)
    if collecting:
        return f"looking up {collecting[1]}"
    downloading = re.match(r"\s*Downloading (\S+) \((.+)\)", line)
    if downloading:
        return f"downloading {downloading[1].rsplit('/', 1)[-1]} ({downloading[2]})"
    installing = re.match(r"Installing collected packages: (.*)", line)
    if installing:
        return f"unpacking {installing[1].count(',') + 1} packages"
    if re.match(r"\s*(?:Building wheel|Preparing metadata|Getting requirements)", line):
        return "building a package"
    return None


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    output: str

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.status == 0

    @property
    def is_not_offered(self) -> bool:
        """Whether pip failed because it found no such package (with constraints it calls that a conflict)."""
        return bool(re.search(r"No matching distribution|Could not find a version|ResolutionImpossible", self.output))


def run(command: Sequence[str | Path], log: IO[str], lock: int) -> Result:
    """Run a command with its output in the log and its activity on screen.

    The child holds the lock too: if this process is killed, the next set-up waits until the child has ended.
    """
    log.write(f"\n$ {' '.join(map(str, command))}\n")
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,) if lock >= 0 else (),
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    output: list[str] = []
    doing = "working"
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=1.0)
                if line is None:
                    break
                output.append(line)
                log.write(line)
                log.flush()
                doing = activity(line) or doing
            SCREEN.detail(doing)
        return Result(process.wait(), "".join(output))
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        raise


def explain(output: str) -> str:
    """What to do about a failed pip call."""
    if "No space left on device" in output:
        return "The disk is full: free some space (about 3 GB; 10 GB with CUDA) and run the same command again."
    if re.search(
        r"name resolution|Name or service|Failed to establish|Max retries|Retrying \(|timed out|SSLError", output
    ):
        return "A package index could not be reached: check the network (and pip's proxy settings), then run it again."
    match = re.search(r"No matching distribution found for (\S+)", output)
    if match:
        version = "{}.{}".format(*sys.version_info[:2])
        return (
            f"No package index offers {match[1]} for Python {version} on this machine. Try another Python "
            "(make PYTHON=python3.11 ...), or check pip's index settings."
        )
    if "conflicting dependencies" in output or "ResolutionImpossible" in output:
        return (
            "Either no package index could be reached (check the network, and run it again), or the requirements "
            "contradict constraints.txt (if you changed either, change it back)."
        )
    return "Run the same command again; if it fails again, the log above says why."


def fail(what: str, output: str, log_path: Path) -> NoReturn:
    """Raise a SetupError that shows the end of the output."""
    tail = [f"    {line}" for line in output.splitlines() if line.strip()][-15:]
    raise SetupError("\n".join([f"{what} failed:", *tail, explain(output), f"Log: {log_path}"]))


# ------------------------------------------------------------------------------------------------------ environment


class Venv:
    """The virtual environment and the marks in it that say what it holds."""

    def __init__(self, path: Path) -> None:
        """Name the folder, which need not exist."""
        self.path = path
        self.python = path / "bin" / "python"
        self.unfinished = path / UNFINISHED
        self.log_path = path / "setup.log"

    @property
    def pip(self) -> list[str | Path]:
        """The start of a pip command for it."""
        return [self.python, "-m", "pip"]

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        found = sorted(self.path.glob("lib/python3.*/site-packages"))
        return found[-1] if found else self.path / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"

    def is_ours(self) -> bool:
        """Whether this script made or changed it."""
        return any(self.path.glob(".setup-*"))

    def was_moved(self) -> bool:
        """Whether its folder had another path when it was made; the scripts in it carry that path."""
        try:
            return str(self.path) not in (self.path / "bin" / "pip").read_text()
        except OSError:
            return False

    def starts(self) -> bool:
        """Whether its interpreter runs, and is new enough."""
        return self._answers("-c", "import sys; sys.exit(sys.version_info < (3, 11))")

    def has_pip(self) -> bool:
        """Whether pip runs in it."""
        return self._answers("-m", "pip", "--version")

    def _answers(self, *arguments: str) -> bool:
        command = [str(self.python), *arguments]
        try:
            return subprocess.run(command, capture_output=True, env=clean_environment(), check=False).returncode == 0
        except OSError:
            return False

    def torch_build(self) -> tuple[str, str] | None:
        """Version (without local label) and build (`cpu` or `cuda`) of its torch."""
        try:
            text = (self.site_packages / "torch" / "version.py").read_text()
        except OSError:
            return None
        version = re.search(r"^__version__ = '([^'+]+)", text, re.MULTILINE)
        cuda = re.search(r"^cuda\b.*= None", text, re.MULTILINE)
        return (version[1], "cpu" if cuda else "cuda") if version else None

    def stamp(self, key: str) -> Path:
        """The file that says that a set-up was completed."""
        return self.path / f".setup-{key}"

    def finished_extras(self) -> set[str]:
        """Extras that any earlier set-up has installed."""
        extras: set[str] = set()
        for stamp in self.path.glob(".setup-*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                extras |= set(json.loads(stamp.read_text())["extras"])
        return extras

    def is_up_to_date(self, key: str, extras: set[str], build: str) -> bool:
        """Whether nothing is left to do."""
        if self.unfinished.exists() or not (self.path / "bin" / "embodyrl").exists():
            return False
        try:
            state = json.loads(self.stamp(key).read_text())
        except (OSError, ValueError):
            return False
        return extras <= set(state["extras"]) and build in ("any", state["torch"])


def project_key(wheel: Path | None) -> str:
    """Hash of everything that decides what must be installed, except the extras.

    The folder counts too: scripts in an environment carry its path, so one that was moved must be done again.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [
        RECIPE,
        str(wheel or ROOT),
        project["build-system"],
        project["project"],
        (ROOT / "constraints.txt").read_text(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def known_extras() -> set[str]:
    """Names under [project.optional-dependencies]."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def pinned(package: str) -> str:
    """The version that constraints.txt asks for."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not found:
        raise SetupError(f"constraints.txt does not pin {package}: add a line {package}==<version>.")
    return found[1]


def has_nvidia_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU with a driver (`/dev/dxg`: under Windows' Linux subsystem)."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


@contextlib.contextmanager
def turn() -> Iterator[int]:
    """Hold the lock that makes set-ups of this checkout take turns; yields its file descriptor, -1 without locks."""
    descriptor = os.open(__file__, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            SCREEN.step("another set-up is at work in this folder: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a network file system without locks
            yield -1
            return
        yield descriptor
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------ steps


def create(venv: Venv) -> None:
    """Make the environment, without pip."""
    venv.path.mkdir(parents=True, exist_ok=True)
    venv.unfinished.touch()
    SCREEN.step(f"creating {venv.path.name} with Python {sys.version.split()[0]}")
    try:
        from venv import EnvBuilder
    except ImportError:  # a Python that was split into packages: what `venv` does is three things
        base = Path(getattr(sys, "_base_executable", sys.executable))
        (venv.path / "bin").mkdir(exist_ok=True)
        venv.site_packages.mkdir(parents=True, exist_ok=True)
        for name in ("python", "python3"):
            (venv.path / "bin" / name).unlink(missing_ok=True)
            (venv.path / "bin" / name).symlink_to(base)
        (venv.path / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    else:
        EnvBuilder(with_pip=False, symlinks=True).create(venv.path)


def prepare(venv: Venv) -> None:
    """See that the environment exists, starts, and holds no half-unpacked package."""
    if not venv.path.exists():
        create(venv)
        return
    if not venv.starts() or (venv.is_ours() and venv.was_moved()):
        if any(venv.path.iterdir()) and not venv.is_ours():
            raise SetupError(
                f"{venv.path} exists, but its Python does not start (or is older than 3.11), and this script did not "
                "make it. Move it away and run the same command again."
            )
        SCREEN.step(f"{venv.path.name} is half-made, broken or was moved: making it anew")
        shutil.rmtree(venv.path)
        create(venv)
    elif venv.unfinished.exists():
        broken = remove_broken_packages(venv.site_packages)
        SCREEN.step("the last set-up was cut short: continuing" + (f" (again: {', '.join(broken)})" if broken else ""))
    venv.unfinished.touch()


def remove_broken_packages(site_packages: Path) -> list[str]:
    """Make pip forget packages whose files are not all there, so that it installs them again.

    Returns:
        Their names.
    """
    for leftover in site_packages.glob("~*"):  # what pip had moved aside
        shutil.rmtree(leftover, ignore_errors=True)
    broken = []
    for info in sorted(site_packages.glob("*.dist-info")):
        if not is_whole(info):
            broken.append(info.name.split("-")[0])
            shutil.rmtree(info)
    return broken


def is_whole(info: Path) -> bool:
    """Whether every file that a package's RECORD names exists in its recorded size."""
    try:
        with (info / "RECORD").open(newline="") as file:
            rows = list(csv.reader(file))
        recorded = [(info.parent / name, int(size)) for name, _, size in rows if size]
        return (info / "INSTALLER").exists() and all(path.stat().st_size == size for path, size in recorded)
    except (OSError, ValueError):
        return False


def bootstrap_pip(venv: Venv, log: IO[str], lock: int) -> None:
    """Put pip into the environment from whatever the machine offers."""
    SCREEN.step("installing pip")
    wheels = sorted(Path("/usr/share/python-wheels").glob("pip-*.whl"), reverse=True)
    attempts: list[list[str | Path]] = [
        [venv.python, "-m", "ensurepip", "--default-pip"],
        [sys.executable, "-m", "pip", "--python", venv.python, "install", "pip"],
    ]
    offline = ["install", "--no-index", "--find-links", "/usr/share/python-wheels", "pip"]
    attempts += [[venv.python, wheel / "pip", *offline] for wheel in wheels]
    for command in attempts:
        if run(command, log, lock).ok and venv.has_pip():
            return
    with tempfile.TemporaryDirectory(prefix="embodyrl-setup-") as folder:
        for download in (download_debian_wheel, download_zipapp):
            try:
                program = download(Path(folder))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                log.write(f"{download.__name__}: {error}\n")
                continue
            if run([venv.python, program, "install", "pip"], log, lock).ok and venv.has_pip():
                return
    raise SetupError(
        "This Python comes without pip, and pip could not be downloaded. Check the network and run the same command "
        f"again, or install it once as root: apt install python3-venv. Log: {venv.log_path}"
    )


def download_zipapp(folder: Path) -> Path:
    """Fetch pip as one runnable file from its makers."""
    target = folder / "pip.pyz"
    with urllib.request.urlopen(PIP_ZIPAPP, timeout=30) as response:
        target.write_bytes(response.read())
    return target


def download_debian_wheel(folder: Path) -> Path:
    """Fetch pip's wheel from the machine's own Debian or Ubuntu packages; that needs no root."""
    subprocess.run(["apt-get", "download", "python3-pip-whl"], cwd=folder, check=True, capture_output=True, timeout=120)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("usr/share/python-wheels/pip-*.whl")
    return wheel / "pip"  # Python runs a package inside a zip file


def install_torch(venv: Venv, build: str, log: IO[str], lock: int) -> None:
    """Install torch before all else, because everybody else's requirement would bring the CUDA build."""
    version = pinned("torch")
    present = venv.torch_build()
    if present and present[0] == version and build in ("any", present[1]):
        return
    if present:
        run([*venv.pip, "uninstall", "-y", "torch", "torchvision"], log, lock)
    if build == "cuda":
        SCREEN.step(f"installing torch {version} (CUDA build, for the NVIDIA GPU; about 3 GB to download)")
        # `===` because a CPU build with a local label would also satisfy `==`, and would win.
        attempts = [[f"torch==={version}"], [f"torch=={version}"]]
    else:
        SCREEN.step(f"installing torch {version} (CPU build, about 200 MB to download)")
        attempts = [[f"torch=={version}+cpu"], [f"torch=={version}+cpu", *from_pytorch_index()], [f"torch=={version}"]]
    for number, attempt in enumerate(attempts, start=1):
        if build != "cuda" and number == len(attempts):
            SCREEN.step("the CPU build is not on offer: installing the CUDA build, about 3 GB; it runs on the CPU too")
        result = run([*venv.pip, "install", "-c", "constraints.txt", *attempt], log, lock)
        if result.ok:
            return
        may_go_on = result.is_not_offered or "--extra-index-url" in attempt
        if number == len(attempts) or not may_go_on:
            fail("installing torch", result.output, venv.log_path)


def from_pytorch_index() -> list[str]:
    """Options for pip to look at PyTorch's own index of CPU builds too, without waiting long where it is blocked."""
    return ["--extra-index-url", PYTORCH_CPU_INDEX, "--timeout", "20", "--retries", "1"]


def install_torchvision(venv: Venv, log: IO[str], lock: int) -> None:
    """Install torchvision's CPU build beside a CPU torch; without one, some requirement brings the plain build."""
    present = venv.torch_build()
    if (venv.site_packages / "torchvision").exists() or not present or present[1] != "cpu":
        return
    SCREEN.step("installing torchvision (CPU build)")
    requirement = f"torchvision=={pinned('torchvision')}+cpu"
    for options in ([], from_pytorch_index()):
        if run([*venv.pip, "install", "-c", "constraints.txt", requirement, *options], log, lock).ok:
            return
    SCREEN.step("torchvision's CPU build is not on offer: the plain one serves, without its compiled operators")


def install_project(venv: Venv, wheel: Path | None, extras: set[str], log: IO[str], lock: int) -> None:
    """Install the wheel, or the project in place, with its extras."""
    names = ",".join(sorted(extras))
    SCREEN.step("installing embodyrl" + (f" with {names.replace(',', ', ')}" if names else ""))
    what = [str(wheel)] if wheel else ["-e", "."]
    what[-1] += f"[{names}]" if names else ""
    result = run([*venv.pip, "install", "-c", "constraints.txt", *what], log, lock)
    if not result.ok:
        fail("installing embodyrl's packages", result.output, venv.log_path)
    for extra in sorted(extras & NO_DEPS.keys()):
        SCREEN.step(f"installing {', '.join(NO_DEPS[extra])} (without what only their training scripts need)")
        result = run([*venv.pip, "install", "-c", "constraints.txt", "--no-deps", *NO_DEPS[extra]], log, lock)
        if not result.ok:
            fail(f"installing {extra}", result.output, venv.log_path)


def prove(venv: Venv, log: IO[str], lock: int) -> None:
    """Import what was installed, so that a missing system library shows now and not in the middle of a run."""
    SCREEN.step("importing torch and embodyrl")
    result = run([venv.python, "-P", "-c", "import torch, embodyrl"], log, lock)
    if not result.ok:
        fail("importing torch and embodyrl", result.output, venv.log_path)


def set_up(venv: Venv, wheel: Path | None, extras: set[str], build: str) -> None:
    """Bring the environment to where it should be."""
    key = project_key(wheel)
    if venv.is_up_to_date(key, extras, build):
        return
    with turn() as lock:
        if venv.is_up_to_date(key, extras, build):  # the other one did it
            return
        prepare(venv)
        extras = extras | venv.finished_extras()
        with venv.log_path.open("a") as log:
            if not venv.has_pip():
                bootstrap_pip(venv, log, lock)
            install_torch(venv, build, log, lock)
            if extras & NEEDS_TORCHVISION:
                install_torchvision(venv, log, lock)
            install_project(venv, wheel, extras, log, lock)
            prove(venv, log, lock)
        found = venv.torch_build()
        state = {"extras": sorted(extras), "torch": found[1] if found else "none"}
        for old in venv.path.glob(".setup-*"):
            if old != venv.unfinished:
                old.unlink()
        venv.stamp(key).write_text(json.dumps(state) + "\n")
        venv.unfinished.unlink()
        SCREEN.step(f"{venv.path.name} is ready")


def wanted_build(choice: str) -> str:
    """The torch build to insist on: `cuda`, `cpu`, or `any` (a machine without a GPU runs both)."""
    if choice != "auto":
        return choice
    return "cuda" if has_nvidia_gpu() else "any"


def main() -> int:
    """Read the command line, set up, and turn failures into sentences."""
    parser = argparse.ArgumentParser(description="Set up the project's virtual environment.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml to install")
    parser.add_argument("--torch", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA where a GPU is")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    arguments = parser.parse_args()
    extras = set(arguments.extras)
    unknown = extras - known_extras()
    if unknown:
        parser.error(f"no such extra: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known_extras()))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        wheel = arguments.wheel.absolute() if arguments.wheel else None
        set_up(Venv(arguments.venv.absolute()), wheel, extras, wanted_build(arguments.torch))
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the same command continues it", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
