"""The iteration of supervised fine-tuning as a list of stages. Imports no torch."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Stage


def sft(config: Config) -> list[Stage]:
    """Supervised fine-tuning on demonstrations."""
    return [Stage("update", "sft_step")]
