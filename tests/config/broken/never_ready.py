"""Registers an algorithm that finds fault with every config."""

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.methods.on_policy.iteration import grpo
from embodyrl.registry import ALGORITHMS


@dataclass(frozen=True, kw_only=True)
class Complaining(OnPolicyConfig):
    """Settings of GRPO."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """One fault about the demonstrations."""
        what = f"the demonstrations in {config.data.path} are of poor taste"
        yield ConfigIssue("data.path", what, "record better ones")


ALGORITHMS.register(
    "never_ready",
    target=grpo,
    options=Complaining,
    demonstrations=True,
    summary="an algorithm that finds fault with every config",
)
