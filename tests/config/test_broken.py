"""Every file in broken/ gives exactly the message that is kept in broken/messages.txt.

`PYTHONPATH=tests python -m tests.config.test_broken` writes the messages anew, for instance after a component was
added to a registry whose names they list; read the difference before you keep it.
"""

from __future__ import annotations

import difflib
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.config.rules import RULES
from embodyrl.pipelines import rules as _its_rules  # noqa: F401  (whose import adds them; not while they are recorded)
from tests.config.conftest import BROKEN, leave_strangers_out

MESSAGES = BROKEN / "messages.txt"


@dataclass(frozen=True)
class Refused:
    """What all broken files gave: messages by name of the file, and the names of rules that were broken."""

    messages: dict[str, str]
    rules: set[str]

    def __str__(self) -> str:
        return "".join(f"==== {name}\n{message}" for name, message in self.messages.items())


def refuse_all() -> Refused:
    """Load every broken file in its own folder; the folder's path is left out of messages."""
    messages, broken, originals, folder = {}, set(), list(RULES), Path.cwd()

    def recorded(rule):
        @functools.wraps(rule)
        def record(config):
            for finding in rule(config):
                broken.add(rule.__name__)
                yield finding

        return record

    try:
        os.chdir(BROKEN)
        RULES[:] = [recorded(rule) for rule in originals]
        for name in sorted(path.name for path in BROKEN.glob("*.yaml")):
            messages[name] = "it was accepted\n"
            with pytest.MonkeyPatch.context() as patch:
                leave_strangers_out(patch, BROKEN)
                try:
                    load_config(name)
                except ConfigError as error:
                    text = str(error).replace(f"{BROKEN}{os.sep}", "").replace(str(BROKEN), "<folder>")
                    messages[name] = f"{text}\n"
    finally:
        RULES[:] = originals
        os.chdir(folder)
    return Refused(messages, broken)


@pytest.fixture(scope="module")
def refused() -> Refused:
    """What all broken files gave."""
    return refuse_all()


def test_messages_are_the_expected_ones(refused):
    expected = MESSAGES.read_text()
    changes = difflib.unified_diff(expected.splitlines(), str(refused).splitlines(), "expected", "given", lineterm="")
    assert len(refused.messages) >= 150 and expected == str(refused), "\n".join(changes)


def test_every_rule_is_broken_by_a_file(refused):
    assert not {rule.__name__ for rule in RULES} - refused.rules


def test_six_faults_come_at_once_in_the_order_of_the_file(monkeypatch):
    monkeypatch.chdir(BROKEN)
    with pytest.raises(ConfigError) as caught:
        load_config("six_faults.yaml")
    lines = [fault.location.line for fault in caught.value.faults]
    assert lines == sorted(lines) == [3, 5, 6, 9, 11, 12]
    assert str(caught.value).splitlines()[-1] == "6 faults; nothing was started."


def test_the_program_prints_them_to_stderr_and_exits_with_2(refused):
    done = programs.run(["-m", "embodyrl", "run", "six_faults.yaml"], cwd=BROKEN)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", refused.messages["six_faults.yaml"])


if __name__ == "__main__":
    MESSAGES.write_text(str(refuse_all()))
