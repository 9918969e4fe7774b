"""What is printed, whoever wrote it."""

from __future__ import annotations

import io
import re

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from embodyrl.errors import UserError, explain, has_controls
from embodyrl.placement.launcher import RemoteError
from embodyrl.terminal import Console


def test_tables_give_the_terminal_no_orders() -> None:
    """Tasks, components and findings in them have names that somebody else chose."""
    for colored in (False, True):
        paper = Console(file=io.StringIO(), width=60, force_terminal=colored, _environ={})
        table = Table("task\x1b]0;owned\x07")
        table.add_row(Text("push \x1b[2J", "red"))
        paper.print(table, "[red]plain \x9b31m[/]", Panel("within\x1b[H"))
        shown = paper.file.getvalue()  # type: ignore[attr-defined]
        left = re.sub(r"\x1b\[[\d;]*m", "", shown) if colored else shown
        assert not [character for character in set(left) if has_controls(character)]
        assert ("\x1b[31m" in shown) == colored and r"push \x1b[2J" in left and r"plain \x9b31m" in left


def test_a_message_moves_no_cursor_and_changes_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b[2J\x1b]0;title\x07red\x9b31m\tand\nso on\x00\r"
    facts = {"role": "env", "rank": 0, "pid": 1, "type_name": "E", "remote_message": odd, "remote_traceback": odd}
    for error in (UserError(odd), RemoteError(odd, **facts, is_user_error=True)):
        error.add_note("\x1b[1m")
        explain(error)
        shown = capsys.readouterr().err
        assert shown.startswith("error: \\x1b[2J\\x1b]0;title\\x07red\\x9b31m\tand\nso on\\x00\\r")
        assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
