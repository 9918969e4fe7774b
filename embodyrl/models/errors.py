"""What a policy cannot do; apart from `models.policy`, which imports torch."""

from __future__ import annotations

from embodyrl.errors import UserError


class PolicyError(UserError):
    """Raised when a policy does not fit a simulator or a checkpoint does not fit a policy."""
