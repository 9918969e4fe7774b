"""The iteration of DSRL as a list of stages. Imports no torch."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.methods.replay.iteration import COLLECT
from embodyrl.pipelines.pipeline import Stage


def dsrl(config: Config) -> list[Stage]:
    """Soft actor-critic over the noise of a frozen flow policy (Wagenmakers et al. 2025)."""
    return [COLLECT, Stage("remember", "remember_noise"), Stage("improve", "improve")]
