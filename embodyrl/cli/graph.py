"""`embodyrl graph`: prints the iteration of a config as a Mermaid flow chart."""

from __future__ import annotations

from embodyrl.config import LoadedConfig
from embodyrl.pipelines.pipeline import build_pipeline


def show(loaded: LoadedConfig) -> None:
    """Print the chart."""
    print(build_pipeline(loaded.config).to_mermaid(), end="")
