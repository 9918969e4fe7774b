"""Config rules about the stages of an iteration; `builtin.py` adds them when it declares the algorithms."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.algorithms.options import check_signature
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import learning_rule
from embodyrl.config.schema import Config
from embodyrl.errors import UnknownNameError
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.pipeline import PipelineError
from embodyrl.registry import ALGORITHMS


@learning_rule
def stages_fit_together(config: Config) -> Iterator[ConfigIssue]:
    """Check that the stages can be built, and fit the filter and the advantage."""
    if config.algorithm.name in ALGORITHMS and ALGORITHMS.entry(config.algorithm.name).missing():
        return  # reported where the name is; its stages cannot be imported
    try:
        stages = build_pipeline(config).stages
    except UnknownNameError:
        return  # of the algorithm, which has been reported
    except PipelineError as error:
        yield from error.issues
        return
    yield from config.algorithm.check_stages(config, stages)


@learning_rule
def components_get_what_they_name(config: Config) -> Iterator[ConfigIssue]:
    """Check that losses, advantages, rewards and filters can be called with the columns available to them."""
    for key in config.algorithm.parts():
        yield from check_signature(key, config)
