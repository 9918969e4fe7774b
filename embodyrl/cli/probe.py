"""Runs a check in a separate process, so that a driver that crashes or hangs stops only that process."""

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
    """Raised when a probe failed; the text describes how."""


class Probe:
    """Python code that runs in another process, started at once.

    Args:
        code: prints its result as JSON on the last line.
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
        """Wait for the result and return it.

        Args:
            deadline: time at which the process is killed, on the clock of `time.monotonic()` [s].

        Raises:
            ProbeFailed: it crashed, raised, printed nothing, or was too slow.
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
        """Kill the process, if it still runs, and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _lines(text: bytes) -> list[str]:
    """Return the lines that are not empty."""
    return [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
