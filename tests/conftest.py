"""Shared by all tests."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# One thread for what is small, also where several processes test at a time; read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parent))  # where `programs` is

import budget
import programs

gc.disable()  # until all tests are collected: what they import stays, and looking through it again and again takes long

# Tests that say no number of random cases themselves; `--hypothesis-profile=all` is for `make test-all`.
hypothesis.settings.register_profile("few", max_examples=15, deadline=None)
hypothesis.settings.register_profile("all", max_examples=60, deadline=None)
hypothesis.settings.load_profile("few")

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_PROCESSES = 8
"""Tests that `-n auto` runs at a time, however many cores there are: many of them start processes of their own."""
MEMORY_PER_PROCESS = 4 << 30
"""What the largest tests need [bytes]."""


@pytest.fixture(autouse=True, scope="session")
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs with plug-ins are signed with a key of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def warm_children() -> Iterator[None]:
    """What embodyrl starts in a test's process is forked."""
    with programs.warm_children():
        yield


@pytest.fixture
def fresh_children(warm_children: None) -> Iterator[None]:
    """What embodyrl starts in a test's process is an interpreter, as it is for a user."""
    with programs.fresh_children():
        yield


@pytest.fixture
def repository() -> Path:
    """Top of the checkout."""
    return REPOSITORY


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: of a second pass where what was missing is there (`pytest @FILE`), of orders, of costs."""
    parser.addoption("--list-skipped", metavar="FILE", type=Path, help="write the ids of skipped tests to FILE")
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in an order drawn with SEED")
    parser.addoption("--budget", action="store_true", help="show what tests cost, beside what they may cost")
    parser.addoption("--record-durations", action="store_true", help=f"write what files cost to {budget.DURATIONS}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; or shuffle the tests: none may depend on what ran before."""

    def place(text: str) -> bytes:
        return hashlib.sha256(f"{config.getoption('--shuffle')} {text}".encode()).digest()

    if config.getoption("--shuffle") is not None:
        items.sort(key=lambda item: (place(str(item.path)), place(item.nodeid)))
    else:
        budget.longest_files_first(items, config.rootpath)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let signals end the programs of the next test: a command that ends in this process ignores them from then on."""
    for number in STOPPING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Let tests send signals, and keep the list of skipped tests in the process that hears of all of them."""
    # `&` in a script and `nohup` have signals ignored, also by the processes that tests start and send them to. What is
    # handled here, if only by doing nothing, has its default there.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    config.pluginmanager.register(budget.Costs(config))
    file = config.getoption("--list-skipped")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkippedTests(file))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among what is imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End the process that programs are forked from."""
    programs.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes behind `-n auto`: one for each core that this process may use, and one more,
    since many tests wait for what they started."""
    memory = psutil.virtual_memory().total // MEMORY_PER_PROCESS
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory, MOST_PROCESSES))


class SkippedTests:
    """Writes the ids of skipped tests and test files, one per line, however the session ends.

    Args:
        file: where to.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._ids = file, dict[str, None]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a skipped test; one that fails as expected ran."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._ids[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember a file that skips itself."""
        if report.skipped:
            self._ids[report.nodeid] = None

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Write the list."""
        yield
        self._file.write_text("".join(f"{each}\n" for each in self._ids))
