"""`embodyrl verify`: shows which layer of a run is the first to differ here, by how much, and what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from embodyrl import api
from embodyrl.errors import shell_command
from embodyrl.screen import say
from embodyrl.terminal import Console

if TYPE_CHECKING:  # imports torch
    from embodyrl.evaluation.verification import Verification

STYLES = {"equal": "green", "within rounding": "green", "differs": "bold red", "-": "dim"}


def show(path: str, episodes: int | None, *, as_json: bool, trust: bool) -> int:
    """Verify and print; returns the exit code, 1 if something differs."""
    found = api.verify(path, episodes=episodes, trust=trust)
    if as_json:
        print(json.dumps(found.to_plain(), indent=2, allow_nan=False))
        return found.exit_code
    console = Console()
    console.print(f"{found.lock}  (iteration {found.iteration})", soft_wrap=True)
    console.print(_table(found))
    for line in closing_lines(found):
        console.print(line, soft_wrap=True)
    return found.exit_code


def write(path: str, *, trust: bool) -> int:
    """Write a lock of what this machine gives; returns the exit code."""
    say(f"playing the evaluation of {path} ...")
    lock = api.write_lock(path, trust=trust)
    say(f"written to {lock}\nnext: {shell_command('verify', path)}   (elsewhere, or after an upgrade)")
    return 0


def _table(found: Verification) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for layer in found.layers:
        changed = layer.name == "packages" and layer.state == "differs"  # a cause, not a difference of results
        style = "yellow" if changed else STYLES[layer.state]
        text = "\n".join(map(str, found.changes)) if changed else layer.text
        state = "changed" if changed else layer.state
        table.add_row(layer.name, Text(state, style), text)
    return table


def closing_lines(found: Verification) -> list[str]:
    """Return the verdict, what it means for success, and the remedies."""
    lines = [verdict(found)]
    if (pairs := found.pairs) is not None:
        low, high = pairs.interval
        then, now = pairs.both + pairs.only_first, pairs.both + pairs.only_second
        lines.append(
            f"success: {then} of {pairs.count} episodes then, {now} now: {pairs.difference:+.2f} [{low:+.2f}, "
            f"{high:+.2f}] (95 %, the same start states; {pairs.only_first} lost, {pairs.only_second} won)"
        )
    elif found.first is not None:
        lines.append(
            "success: not compared (the policy was not evaluated when it was saved, its simulator does not say what "
            "success is, or --episodes 0)"
        )
    return lines + [f"remedy: {remedy}" for remedy in found.remedies]


def verdict(found: Verification) -> str:
    """Return one sentence."""
    if (first := found.first) is None:
        if found.exit_code:
            return "every layer is what it was, but episodes end otherwise: small differences that grow"
        rounding = [layer.name for layer in found.layers if layer.state == "within rounding"]
        but = f", {' and '.join(rounding)} within rounding" if rounding else ", bit for bit"
        despite = "; what changed since makes no difference to it" if found.changes else ""
        return f"the same: this machine gives what the run recorded{but}{despite}"
    causes = ", ".join(map(str, found.causes))
    why = f"; changed since: {causes}" if causes else "; no package, machine or renderer that was recorded explains it"
    return f"{first.name} is the first layer that differs{why}"
