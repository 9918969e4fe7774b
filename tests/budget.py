"""What tests cost: CPU seconds of each, with the programs that it starts, beside what CONTRIBUTING.md allows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAKE_TEST_S, SLOW_S = 600.0, 700.0
"""CPU time that the tests of `make test` may take together, and those marked `slow` [s]."""
LONG_S = 5.0
"""A test that takes more is named [s]."""
SHOWN = 25
DURATIONS = Path(__file__).with_name("durations.json")
"""Time of each file at the last `--record-durations` [s], by which files are spread over processes: on the wall, since
one that waits for what it started keeps a process as busy as one that computes."""


def cpu_time() -> float:
    """CPU time of this process and of its children that have ended [s]."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def longest_files_first(items: list[pytest.Item], root: Path) -> None:
    """Sort tests by the time that their files took: a long one that begins last is awaited by all processes."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    items.sort(key=lambda item: -known.get(item.path.relative_to(root).as_posix(), 0.0))


class Costs:
    """Measures each test where it runs, and shows all of them where they are reported.

    Args:
        config: of pytest.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds, self._is_slow = Counter[str](), set[str]()
        self._of_file = Counter[str]()
        self._before, self._elsewhere = cpu_time(), 0.0

    def pytest_collection_finish(self) -> None:
        """Leave out of the first test what was imported and collected."""
        self._before = cpu_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        """Note in the report of a set-up, a call or a tear-down what it took."""
        report = yield
        now = cpu_time()
        report.cpu_s, self._before = now - self._before, now
        report.is_slow = item.get_closest_marker("slow") is not None
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up."""
        self._seconds[report.nodeid] += report.cpu_s
        self._of_file[report.nodeid.partition("::")[0]] += report.duration
        if report.is_slow:
            self._is_slow.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Tell the process that reports what this one took in all."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = cpu_time()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear it."""
        self._elsewhere += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the longest tests and the sums, and write durations where that was asked for."""
        write = terminalreporter.write_line
        if self._config.getoption("--budget"):
            terminalreporter.section("CPU time of tests, with the programs that they start")
            for name, seconds in self._seconds.most_common(SHOWN):
                over = f"  above {LONG_S:g} s: why?" if seconds > LONG_S and name not in self._is_slow else ""
                write(f"{seconds:7.1f} s  {name}{over}")
            files = Counter[str]()
            for name, seconds in self._seconds.items():
                files[name.partition("::")[0]] += seconds
            write("in all, by file:")
            for name, seconds in files.most_common(SHOWN):
                write(f"{seconds:7.1f} s  {name}")
            slow = sum(self._seconds[name] for name in self._is_slow)
            fast = sum(self._seconds.values()) - slow
            for kind, spent, budget in (("of make test", fast, MAKE_TEST_S), ("marked slow", slow, SLOW_S)):
                over = "" if spent <= budget else f": {spent - budget:.0f} s above it"
                write(f"tests {kind}: {spent:.0f} s of a budget of {budget:.0f} s{over}")
            write(f"all processes: {self._elsewhere or cpu_time():.0f} s, with what is imported and collected")
        if self._config.getoption("--record-durations"):
            kept = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
            # What did not run now keeps what it took, while it exists.
            there = {name: seconds for name, seconds in kept.items() if (self._config.rootpath / name).is_file()}
            found = sorted({**there, **self._of_file}.items())
            known = {name: round(seconds, 1) for name, seconds in found if seconds >= 0.5}
            DURATIONS.write_text(json.dumps(known, indent=1) + "\n")
            write(f"durations of {len(known)} files are in {DURATIONS}")
