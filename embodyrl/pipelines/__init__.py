"""An iteration as a list of named stages."""

from embodyrl.pipelines.pipeline import Iteration, Pipeline, PipelineError, Stage, StageError

__all__ = ["Iteration", "Pipeline", "PipelineError", "Stage", "StageError"]
