"""Compile and load the part of the stand-in that is C++; imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")


def torch_folder() -> Path:
    """Return where torch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is a requirement of the package"
    return Path(spec.submodule_search_locations[0])


def missing() -> str | None:
    """Return why there can be no stand-in here, or None."""
    if shutil.which("g++") is None:
        return "needs g++ to compile the stand-in for CUDA"
    if not re.search(r"^cuda: .*= None$", (torch_folder() / "version.py").read_text(), re.MULTILINE):
        return "needs a CPU build of torch: this one has CUDA of its own"
    return None


def library() -> Path:
    """Return the compiled library, made once per version of torch and of its source."""
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode() + (torch / "version.py").read_bytes()).hexdigest()
    folder = Path(__file__).parents[3] / "build" / "standin"  # ignored by git
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / f"{key[:16]}.so"
    if not found.is_file():
        # Renamed when it is complete, since several test processes may compile it at once.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            pass
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE)]
        command += ["-o", part.name, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            Path(part.name).unlink()
            raise RuntimeError(f"the stand-in for CUDA does not compile: {done.stderr[-1500:]}")
        Path(part.name).replace(found)
    return found


def load() -> None:
    """Load the library into this process, for good."""
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
