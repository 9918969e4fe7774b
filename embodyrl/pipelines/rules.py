"""Config rules about the iteration graph; `builtin.py` adds them when the algorithms are declared."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.rules import Finding, fact, rule
from embodyrl.config.schema import Config
from embodyrl.errors import UnknownNameError
from embodyrl.pipelines.arguments import COMPONENTS, objections
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.graph import GraphError, GraphFault, Stage
from embodyrl.registry import ADVANTAGES, ALGORITHMS, FILTERS, STAGES, load_target

CRITIC_COLUMNS = ("values", "next_values")
"""What `collect` writes besides, where there is a critic."""


@rule
def nodes_fit_together(config: Config) -> Iterator[Finding]:
    """The iteration graph can be built."""
    try:
        build_pipeline(config)
    except UnknownNameError:
        return  # of the algorithm, which has been reported
    except GraphError as error:
        for fault in error.faults:
            yield Finding(tuple(_settings(fault, config)), fault.message, fault.remedy)


@rule
def filters_have_a_node(config: Config) -> Iterator[Finding]:
    """A filter is used by the graph, and a graph that filters has one."""
    name = config.algorithm.filter.name
    filters = fact(FILTERS, name, "group")
    try:
        stages = [node.stage for node in build_pipeline(config).nodes]
    except (GraphError, UnknownNameError):
        return  # which is for others to report
    paths = ("algorithm.filter.name", "algorithm.name", "pipeline")
    if filters is not False and "filter_groups" not in stages and all(map(_is_builtin, stages)):
        yield Finding(
            paths,
            f"filter {name!r} has no use: the iteration graph has no node that filters",
            "set algorithm.name to dapo, insert a node with stage filter_groups, or set algorithm.filter to none",
        )
    if filters is False and "filter_groups" in stages:
        useful = [entry.name for entry in FILTERS.entries() if entry.group]
        yield Finding(
            paths,
            f"the iteration graph filters groups, but algorithm.filter.name is {name!r}",
            f"set algorithm.filter to {' or '.join(useful)}, or choose a graph that does not filter",
        )


@rule
def rollouts_hold_what_a_critic_says(config: Config) -> Iterator[Finding]:
    """Where a graph of the user's own collects, it declares the critic's columns if there is a critic."""
    if config.pipeline.function is None and fact(ALGORITHMS, config.algorithm.name, "critic") is not None:
        return  # whether a graph fits its advantage is known without looking at its nodes
    advantage = config.algorithm.advantage.name
    critic = fact(ADVANTAGES, advantage, "critic")
    try:
        collecting = [node.declared() for node in build_pipeline(config).nodes if node.stage == "collect"]
    except (GraphError, UnknownNameError):
        return  # which is for others to report
    for node in collecting if critic is not None else []:
        declared = [name for name in CRITIC_COLUMNS if name in node.writes]
        columns = ", ".join(map(repr, CRITIC_COLUMNS))
        if critic and len(declared) < len(CRITIC_COLUMNS):
            message = f"advantage {advantage!r} has a critic, but node {node.name!r} does not write its columns"
            remedy = f"add writes=({columns}) to the node, or choose an advantage without a critic"
        elif not critic and declared:
            message = f"node {node.name!r} writes the columns of a critic, but advantage {advantage!r} has none"
            remedy = f"remove {columns} from the node's writes, or choose an advantage with a critic"
        else:
            continue
        yield Finding(("pipeline.function", "algorithm.advantage.name", "algorithm.name"), message, remedy)


@rule
def demonstrations_are_learned_from(config: Config) -> Iterator[Finding]:
    """Who learns from demonstrations has some, and others name none."""
    name, path = config.algorithm.name, config.data.path
    if name not in ALGORITHMS:
        return  # which has been reported
    learns = bool(fact(ALGORITHMS, name, "demonstrations"))
    if learns and path is None:
        yield Finding(
            ("data.path", "algorithm.name"),
            f"algorithm {name!r} learns from demonstrations, but data.path is null",
            "name the folder of a LeRobotDataset v3; `embodyrl collect CONFIG --out DIR --episodes N` records one",
        )
    if path is not None and not learns and ALGORITHMS.entry(name).source == "built-in" and not config.pipeline.insert:
        yield Finding(
            ("data.path", "algorithm.name"),
            f"data.path has no use: algorithm {name!r} learns from rollouts",
            "set data.path to null, or algorithm to sft",
        )


@rule
def algorithm_can_run_so(config: Config) -> Iterator[Finding]:
    """What the algorithm itself can say about the config."""
    check = fact(ALGORITHMS, config.algorithm.name, "check")
    if check is None:
        return
    for path, message, remedy in load_target(check)(config):
        yield Finding((path,), message, remedy)


@rule
def components_get_what_they_name(config: Config) -> Iterator[Finding]:
    """The functions of losses, advantages, rewards and filters can be called with what there is for them."""
    for key in COMPONENTS:
        for message, remedy in objections(key, config):
            yield Finding((f"algorithm.{key}.name",), message, remedy)


def _is_builtin(stage: str | Stage) -> bool:
    return isinstance(stage, str) and STAGES.entry(stage).source == "built-in"


def _settings(fault: GraphFault, config: Config) -> Iterator[str]:
    """What may have to be changed: the setting itself, what brought the nodes in, the section, the algorithm."""
    changes = config.pipeline
    if fault.setting:
        yield fault.setting
    for node in fault.nodes:
        yield from (f"pipeline.insert.{index}" for index, each in enumerate(changes.insert) if each.name == node)
        yield from (f"pipeline.replace.{name}" for name in changes.replace if name == node)
    if changes.drop:
        yield "pipeline.drop"
    if changes.function is not None:
        yield "pipeline.function"
    yield from ("pipeline", "algorithm.name")
