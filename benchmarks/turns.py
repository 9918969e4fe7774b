"""Run contenders in turns, so that other load on the machine affects all alike; shared by benchmarks of CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each contender in each round, after a warm-up; every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in contenders if number % 2 else reversed(contenders):
            start = time.process_time()
            contenders[name]()
            if number:
                seconds[name].append(time.process_time() - start)
    return seconds
