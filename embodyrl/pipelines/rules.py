"""Config rules about the stages of an iteration; `builtin.py` adds them when it declares the algorithms."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.algorithms.options import COMPONENTS, check_signature
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import fact, rule
from embodyrl.config.schema import Config
from embodyrl.errors import UnknownNameError
from embodyrl.pipelines.pipeline import PipelineError, Stage, build_pipeline
from embodyrl.registry import ADVANTAGES, ALGORITHMS, FILTERS, STAGES

CRITIC_COLUMNS = ("values", "next_values")
"""Columns that `collect` writes only with a critic."""


@rule
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
    algorithm = config.algorithm.name
    if fact(ALGORITHMS, algorithm, "off_policy"):
        return  # it has neither filters nor advantages
    yield from _check_filter(config, [stage.function for stage in stages])
    if config.pipeline.function is not None or fact(ALGORITHMS, algorithm, "critic") is None:
        yield from _check_critic(config, [stage for stage in stages if stage.function == "collect"])


def _check_filter(config: Config, functions: list[object]) -> Iterator[ConfigIssue]:
    """Check that a filter is used by a stage, and that stages that filter have one."""
    name = config.algorithm.filter.name
    filters = fact(FILTERS, name, "group")
    paths = ("algorithm.filter.name", "algorithm.name", "pipeline")
    builtin = [entry.name for entry in STAGES.entries() if entry.source == "built-in"]
    if filters is not False and "filter_groups" not in functions and all(each in builtin for each in functions):
        yield ConfigIssue(
            paths,
            f"filter {name!r} has no use: the iteration has no stage that filters",
            "set algorithm.name to dapo, insert the stage filter_groups, or set algorithm.filter to none",
        )
    if filters is False and "filter_groups" in functions:
        useful = [entry.name for entry in FILTERS.entries() if entry.group]
        yield ConfigIssue(
            paths,
            f"the iteration filters groups, but algorithm.filter.name is {name!r}",
            f"set algorithm.filter to {' or '.join(useful)}, or choose an algorithm that does not filter",
        )


def _check_critic(config: Config, collecting: list[Stage]) -> Iterator[ConfigIssue]:
    """Check that the user's own collecting stages declare the critic's columns if and only if there is a critic."""
    advantage = config.algorithm.advantage.name
    critic = fact(ADVANTAGES, advantage, "critic")
    for stage in collecting if critic is not None else []:
        declared = [name for name in CRITIC_COLUMNS if name in stage.writes]
        columns = ", ".join(map(repr, CRITIC_COLUMNS))
        if critic and len(declared) < len(CRITIC_COLUMNS):
            message = f"advantage {advantage!r} has a critic, but stage {stage.name!r} does not write its columns"
            hint = f"add writes=({columns}) to the stage, or choose an advantage without a critic"
        elif not critic and declared:
            message = f"stage {stage.name!r} writes the columns of a critic, but advantage {advantage!r} has none"
            hint = f"remove {columns} from the stage's writes, or choose an advantage with a critic"
        else:
            continue
        yield ConfigIssue(("pipeline.function", "algorithm.advantage.name", "algorithm.name"), message, hint)


@rule
def components_get_what_they_name(config: Config) -> Iterator[ConfigIssue]:
    """Check that losses, advantages, rewards and filters can be called with the columns available to them."""
    for key in COMPONENTS:
        yield from check_signature(key, config)
