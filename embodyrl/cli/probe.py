"""Trying something out in a process of its own, so that a driver that crashes or hangs takes nothing else down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from embodyrl.placement.process import signal_name


class ProbeFailed(Exception):
    """Raised when a probe did not succeed; the text says how it ended."""


class Probe:
    """Python code that runs in another process from now on.

    Args:
        code: prints its result as one line of JSON, last of all.
        env_vars: environment variables to set; None as a value removes one.
    """

    def __init__(self, code: str, env_vars: Mapping[str, str | None] | None = None) -> None:
        wanted = {**os.environ, **(env_vars or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in wanted.items() if value is not None},
            start_new_session=True,
        )

    def result(self, deadline: float) -> Any:
        """Return what the code printed.

        Args:
            deadline: when to give up and kill it, as `time.monotonic()` counts.

        Raises:
            ProbeFailed: it crashed, raised, said nothing, or is still at it.
        """
        try:
            output, errors = map(_lines, self._process.communicate(timeout=max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired as error:
            raise ProbeFailed("hangs: no answer in time") from error
        finally:
            self.close()
        code = self._process.returncode
        if code < 0:
            raise ProbeFailed(f"crashes ({signal_name(-code)})")
        if code > 0 or not output:
            raise ProbeFailed(errors[-1] if errors else f"exits with code {code}")
        return json.loads(output[-1])

    def close(self) -> None:
        """Kill the process, if it still runs, and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _lines(text: bytes) -> list[str]:
    """The lines that are not empty."""
    return [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
