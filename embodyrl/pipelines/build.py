"""From a config to its pipeline."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Pipeline
from embodyrl.registry import ALGORITHMS


def build_pipeline(config: Config) -> Pipeline:
    """The iteration that a config asks for; imports no stage.

    Raises:
        GraphError: its nodes do not fit together.
    """
    return Pipeline(ALGORITHMS.load(config.algorithm.name)(config))
