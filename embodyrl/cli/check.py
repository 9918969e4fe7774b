"""`embodyrl check`: tries what the simulator and the model of a config promise, and shows what came of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from embodyrl import api
from embodyrl.checking.promises import State
from embodyrl.screen import say, showing


def show(source: str | None, overrides: Sequence[str], *, timeout_s: float, trust: bool) -> int:
    """Check and print; returns the exit code, 1 if a promise is broken."""
    with showing():
        found = api.check(source, overrides, timeout_s=timeout_s, progress=True, trust=trust)
    counts = Counter(finding.state for finding in found)
    apart = f", {counts[State.does_not_apply]} not tried" if counts[State.does_not_apply] else ""
    say(f"{counts[State.kept]} promises are kept, {counts[State.broken]} broken{apart}")
    return 1 if counts[State.broken] else 0
