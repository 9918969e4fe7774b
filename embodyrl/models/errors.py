"""The error of models; in a module of its own, because `models.policy` imports torch."""

from __future__ import annotations

from embodyrl.errors import UserError


class PolicyError(UserError):
    """Raised when a policy does not fit a simulator or a checkpoint does not fit a policy."""
