"""The error of models; in a module of its own, because `models.policy` imports torch."""

from __future__ import annotations

from embodyrl.config.issues import ConfigIssue
from embodyrl.errors import RemediedError


class PolicyError(RemediedError):
    """Raised when a policy does not fit a simulator or a checkpoint does not fit a policy."""

    def issue(self, setting: str) -> ConfigIssue:
        """Return the error as the fault of a setting."""
        text = self.message if self.message.startswith(f"{setting} ") else f"{setting}: {self.message}"
        return ConfigIssue(setting, text, self.remedy)
