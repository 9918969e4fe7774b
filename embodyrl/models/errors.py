"""What a policy cannot do; apart from `models.policy`, which imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from embodyrl.errors import UserError
from embodyrl.registry import near_match


class PolicyError(UserError):
    """Raised when a policy does not fit a simulator or a checkpoint does not fit a policy."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint for a message about a name that is not known; empty if nothing is near."""
    near = near_match(name, list(known))
    return f" - did you mean {near!r}?" if near else ""
