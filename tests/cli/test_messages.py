"""What is printed, whoever wrote it."""

from __future__ import annotations

import pytest

from embodyrl.errors import UserError, explain
from embodyrl.placement.launcher import RemoteError


def test_a_message_moves_no_cursor_and_changes_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b[2J\x1b]0;title\x07red\x9b31m\tand\nso on\x00\r"
    facts = {"role": "env", "rank": 0, "pid": 1, "type_name": "E", "remote_message": odd, "remote_traceback": odd}
    for error in (UserError(odd), RemoteError(odd, **facts, is_user_error=True)):
        error.add_note("\x1b[1m")
        explain(error)
        shown = capsys.readouterr().err
        assert shown.startswith("error: \\x1b[2J\\x1b]0;title\\x07red\\x9b31m\tand\nso on\\x00\\r")
        assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
