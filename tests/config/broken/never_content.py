"""Registers a simulator that finds fault with every config."""

from collections.abc import Iterator

from embodyrl.config.infos import SimulatorInfo
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config, EnvConfig
from embodyrl.registry import SIMULATORS


class NeverContent(SimulatorInfo[EnvConfig]):
    """Finds fault with every config."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """One fault about the simulator's own section, and one about another."""
        yield ConfigIssue(
            "env.num_envs", f"env.num_envs = {config.env.num_envs} does not suit this simulator", "think of another"
        )
        yield ConfigIssue("eval.episodes", "this simulator is never evaluated", "there is no remedy")


SIMULATORS.register(
    "never_content",
    target="never_content:Simulator",
    info=NeverContent,
    summary="a simulator that finds fault with every config",
)
