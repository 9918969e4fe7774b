"""A reward whose check ends the program."""

import sys
from collections.abc import Iterator
from typing import Any

from embodyrl.registry import REWARDS


def check(config: Any) -> Iterator[Any]:
    """End the program."""
    sys.exit("not today")
    yield


REWARDS.register(
    "leaving", target="leaves_when_checked:check", check="leaves_when_checked:check", summary="", whole=False
)
