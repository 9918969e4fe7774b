"""What the screen shows, as text: rendered from rows of real runs and compared with files that people have looked at.

`python tests/tracking/test_screens.py` writes the files again, for a look at their differences.
"""

from __future__ import annotations

import io
import math
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from embodyrl import screen
from embodyrl.config import load_config
from embodyrl.runner.callbacks import idleness_of
from embodyrl.runs.metrics import read_rows
from embodyrl.tracking import SinkContext
from embodyrl.tracking.console import ConsoleSink

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (40, 80, 100, 140)
RUNS = ("ppo", "sac")
HEADER = """\
embodyrl 0.1.0   run pend   (my.yaml)
  machine    2 usable cores, 24 GiB, no GPU -> policy on the CPU, float32 (auto: no NVIDIA GPU)
  algorithm  ppo (gae, ppo)   12 iterations of 128 chunks x 8 envs, chunks of 1 action, 4 epochs in minibatches of 64
  output     /home/somebody/experiments/with/a/long/name/that/no/terminal/of/eighty/columns/holds/2026-01-31_12-00-00/
evaluation  20 episodes  success 0.00 [0.00, 0.16]  return -1089.22  length 200  (0.3 s)"""


def rows_of(run: str) -> list[dict[str, float]]:
    rows = read_rows(SCREENS / f"{run}.jsonl")[0]
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]


def shown(run: str, width: int) -> str:
    """Return the text of a terminal of so many columns after a run's rows."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)
    sink = ConsoleSink(SinkContext(run_dir=SCREENS, iterations=12, start_iteration=0), terminal)
    for row in rows_of(run):
        sink.log(int(row["iteration"]), row)
    sink.close()
    paper = Console(file=io.StringIO(), width=width, color_system=None)
    paper.print(screen.fold(HEADER, width), soft_wrap=True)
    paper.print(sink.view())
    return "".join(line.rstrip() + "\n" for line in paper.file.getvalue().splitlines())  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", RUNS)
def test_a_terminal_shows_what_its_width_has_room_for(run: str, width: int) -> None:
    text = shown(run, width)
    assert text == (SCREENS / f"{run}_{width}.txt").read_text()
    table = text[text.index(" iter ") :].splitlines()
    assert max(map(len, table)) <= width and "…" not in text
    assert all(word in table[0] for word in ("iter", "return", "success"))
    assert table[-1].split()[0] == "12"


def test_columns_are_left_out_in_the_order_of_what_people_miss_least() -> None:
    titles = {width: shown("ppo", width).partition(" iter ")[2].partition("\n")[0] for width in WIDTHS}
    assert "simulate/render" in titles[140] and "simulate/render" not in titles[100]
    assert "expl.var" in titles[100] and "expl.var" not in titles[80]
    assert titles[80].split() == ["env", "steps", "return", "success", "kl", "clip", "steps/s", "eta"]


def test_a_table_begins_with_what_return_and_success_are_means_of() -> None:
    paper = io.StringIO()
    sink = ConsoleSink(SinkContext(run_dir=SCREENS, iterations=12, start_iteration=0), Console(file=paper, width=140))
    for row in rows_of("ppo"):
        sink.log(int(row["iteration"]), row)
    sink.log(1, {"iteration": 1, "time/iteration": 1.0, "train/loss": 0.5})
    assert paper.getvalue().startswith("return, success: means over the newest 100 training episodes, or")
    assert paper.getvalue().count("newest") == 1


def test_a_run_may_get_columns_on_its_way() -> None:
    """It begins offline; then a rollout ends no episode, and later one of a mix ends some."""
    offline = {"time/iteration": 1.0, "replay/fill": 0.0, "train/updates": 15.0, "train/q": 0.25}
    first = offline | {"env/steps": 64.0, "env/total_steps": 64.0, "replay/fill": 0.5, "time/env_steps_per_s": 900.0}
    ended = first | {"env/return_recent": -7.5, "env/success_recent": 0.5, "env/success_recent/moon": 0.25}
    for width in (60, 100, 160):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        paper = Console(file=io.StringIO(), width=width, color_system=None)
        context = SinkContext(run_dir=SCREENS, iterations=3, start_iteration=0)
        sinks = [ConsoleSink(context, terminal), ConsoleSink(context, paper)]
        for number, row in enumerate((offline, first, ended), start=1):
            for sink in sinks:
                sink._last_line = -math.inf  # as if the iteration had taken seconds
                sink.log(number, row)
                sink.close()
            drawn = Console(file=io.StringIO(), width=width, color_system=None)
            drawn.print(sinks[0].view())
        lines = drawn.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert "moon" in lines[0] and lines[1].split()[:3] == ["1", "-", "-"] and "0.25" in lines[3]
        plain = paper.file.getvalue().splitlines()  # type: ignore[attr-defined]
        headers = [line.split() for line in plain if line.startswith(" iter")]
        assert len(headers) == 3 and "success" not in headers[0] and "moon" not in headers[1] and "moon" in headers[2]
        assert len({len(line) for line in plain[-2:]}) == 1


def test_no_number_is_cut_however_long_it_is() -> None:
    row = rows_of("ppo")[-1] | {"env/return_recent": -123456789.12, "train/approx_kl": 12345.6789}
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    sink = ConsoleSink(SinkContext(run_dir=SCREENS, iterations=12, start_iteration=0), terminal)
    sink.log(12, row)
    sink.close()
    paper = Console(file=io.StringIO(), width=80, color_system=None)
    paper.print(sink.view())
    text = paper.file.getvalue()  # type: ignore[attr-defined]
    assert "-123456789.12" in text and "12345.6789" in text and max(map(len, text.splitlines())) <= 80


def test_a_path_longer_than_the_terminal_stays_whole() -> None:
    path = "/" + "folder/" * 20
    assert path in screen.fold(f"  output     {path}  (metrics.jsonl, ...)", 80).split()
    assert screen.fold(f"report: {path}", None) == f"report: {path}"


def test_a_slow_task_has_a_bar_and_a_fast_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(width: int) -> str:
        paper = Console(file=io.StringIO(), width=width, color_system=None)
        paper.print(screen.bar(width))
        return paper.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    begun = now = time.monotonic()
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with screen.task("iteration 3"), screen.task("evaluating", 200, "episodes") as progress:
        progress.advance(50)
        assert drawn(80).strip() == ""
        now = begun + 30.0
        assert drawn(80).split("  ")[0] == "evaluating" and "━" in drawn(80)
        assert "50 of 200 episodes  1:30 left" in drawn(80)
        assert drawn(44).strip() == "evaluating  50 of 200 episodes  1:30 left"
        assert max(map(len, drawn(80).splitlines())) <= 80
    assert drawn(80).strip() == ""


def test_a_pipe_gets_lines_about_a_slow_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "SLOW_S", 0.05)
    monkeypatch.setattr(screen, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(screen, "PLAIN_EVERY_S", 0.1)
    begun, text = time.monotonic(), ""
    with screen.showing(), screen.task("collecting", 10, "chunks") as progress:
        progress.advance(4)
        while text.count("\n") < 3:
            time.sleep(0.01)
            text += capsys.readouterr().out
    lines = (text + capsys.readouterr().out).splitlines()
    assert all(re.fullmatch(r"collecting  4 of 10 chunks  \d+:\d\d left", line) for line in lines)
    assert len(lines) <= (time.monotonic() - begun) / screen.PLAIN_EVERY_S + 1, "not more often than that"
    assert not any(thread.name == "progress" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"train/epochs": 0.0, "env/success_once": 0.0}, "end alike (success 0.00)"),
        (
            {"train/epochs": 0.0, "env/success_once": 1.0, "filter/groups_kept": 0.0, "filter/groups_collected": 24.0},
            "end alike (success 1.00) (0 of 24 groups were kept)",
        ),
        ({"train/epochs": 0.0, "env/episodes": 0.0}, "no episode has ended"),
        ({"train/epochs": 0.0, "train/approx_kl": 0.5, "train/skipped_steps": 0.0}, "KL divergence was 0.5 before"),
        ({"train/epochs": 4.0, "train/skipped_steps": 16.0}, "none of its optimiser steps was finite"),
    ],
)
def test_an_iteration_that_learned_nothing_says_why(metrics: Mapping[str, float], why: str) -> None:
    config = load_config("experiment/gym_pendulum", ["algorithm.target_kl=0.1"]).config
    idleness = idleness_of(metrics, config)
    assert idleness is not None and why in idleness.why and idleness.remedy
    assert idleness_of({**metrics, "train/grad_norm": 1.0}, config) is None


def test_a_replay_that_fills_up_is_no_fault() -> None:
    config = load_config("experiment/gym_pendulum_sac", []).config
    found = [idleness_of(row, config) for row in rows_of("sac")]
    assert found[0] is not None and "128 of 1,000 decisions" in found[0].why and not found[0].remedy
    assert found[1:] == [None, None]


def test_the_first_line_is_there_at_once() -> None:
    """On a terminal, which `script` provides: before the config is read."""
    command = shlex.join([sys.executable, "-m", "embodyrl", "run", "nothing.yaml"])
    done = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, timeout=240)
    first, _, rest = done.stdout.decode().partition("\r\033[K")
    assert first.startswith("embodyrl ") and first.endswith("reading nothing.yaml ...") and "nothing.yaml" in rest
    assert done.returncode == 2


if __name__ == "__main__":
    for name in RUNS:
        for columns in WIDTHS:
            (SCREENS / f"{name}_{columns}.txt").write_text(shown(name, columns))
