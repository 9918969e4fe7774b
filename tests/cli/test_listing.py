"""`embodyrl list`, on terminals and in pipes."""

from __future__ import annotations

import os

import programs
import pytest

from embodyrl.cli import listing
from embodyrl.errors import UserError
from embodyrl.registry import Entry, Registry, Requirement

EXTRA = "pip install 'embodyrl[nothing]'  [bold]:cat:"


def declare_nothing() -> None:
    """The home of a registry that has nothing built in."""


@pytest.fixture(autouse=True)
def in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def lacking() -> Registry[Entry]:
    """A registry whose component lacks a package, with a command that rich would take for markup."""
    registry = Registry("widget", home=f"{__name__}:declare_nothing", group="embodyrl.widgets", entry=Entry)
    registry._filled = True
    needs = [Requirement(module="embodyrl_nothing", install=EXTRA)]
    registry.register("one", "embodyrl.nothing:One", summary="word " * 40, requires=needs)
    return registry


def test_extras_are_shown_as_they_are(lacking: Registry[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    listing._show_registry(lacking)
    assert f"no: {EXTRA}" in capsys.readouterr().out


def test_a_row_is_a_line_where_there_is_no_terminal(
    lacking: Registry[Entry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listing._show_registry(lacking)
    title, _names, row, *rest = capsys.readouterr().out.splitlines()
    assert title == "widgets" and row.startswith("one") and row.endswith("word word") and rest == [""]
    monkeypatch.setenv("COLUMNS", "80")
    listing._show_registry(lacking)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80


def test_tasks_are_counted_by_simulator_and_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    listing.show("tasks")
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[2:] if line}
    assert int(rows["gymnasium"]) > 10 and set(rows) >= {"metaworld", "libero", "maniskill", "mujoco"}
    listing.show("tasks", "gymnasium")
    assert "\nPendulum-v1 " in capsys.readouterr().out
    listing.show("tasks", "gym/cartpole")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line][2:] == ["CartPole-v1"]
    for words, message in (
        (("tasks", "gymnasum"), "there is no simulator 'gymnasum' - did you mean 'gymnasium'?"),
        (("models", "metaworld"), "`embodyrl list tasks metaworld`"),
        (("taks",), "cannot list 'taks' - did you mean 'tasks'?"),
    ):
        with pytest.raises(UserError) as caught:
            listing.show(*words)
        assert message in str(caught.value)


def test_a_name_that_is_like_none_gets_a_command_instead_of_all_names(tmp_path: os.PathLike[str]) -> None:
    for words, said in (
        (["run", "qqqq"], "`embodyrl list configs` shows the built-in experiments"),
        (["validate", "env=qqqq"], "`embodyrl list configs` shows all options"),
        (["init", "my.yaml", "--env", "qqqq"], "`embodyrl list configs` shows all options"),
        (["validate", "env.tasks=[qqqq]"], "`embodyrl list tasks metaworld` shows all 50"),
    ):
        done = programs.run(["-m", "embodyrl", *words], cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr) < 300, done.stderr
