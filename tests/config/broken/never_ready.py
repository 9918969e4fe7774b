"""Registers an algorithm that finds fault with every config."""

from collections.abc import Iterator

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.pipelines.builtin import grpo
from embodyrl.registry import ALGORITHMS


def complain(config: Config) -> Iterator[ConfigIssue]:
    """One fault about the demonstrations."""
    yield ConfigIssue("data.path", f"the demonstrations in {config.data.path} are of poor taste", "record better ones")


ALGORITHMS.register(
    "never_ready",
    target=grpo,
    check="never_ready:complain",
    demonstrations=True,
    summary="an algorithm that finds fault with every config",
)
