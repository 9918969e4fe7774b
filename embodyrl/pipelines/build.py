"""From a config to its pipeline: the graph that it names, and the changes of its section `pipeline`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

from embodyrl.config.schema import Config
from embodyrl.pipelines.dataflow import did_you_mean
from embodyrl.pipelines.graph import Graph, GraphError, GraphFault, Node
from embodyrl.pipelines.pipeline import Pipeline
from embodyrl.registry import ALGORITHMS


def build_pipeline(config: Config) -> Pipeline:
    """The iteration that a config asks for; imports no stage.

    Raises:
        GraphError: the nodes do not fit together, or the config changes nodes that are not there.
    """
    graph = _graph_of_function(config) if config.pipeline.function else ALGORITHMS.load(config.algorithm.name)(config)
    faults = list(_strangers(config, graph))
    if faults:
        raise GraphError(faults)
    return Pipeline(_changed(graph, config))


def _graph_of_function(config: Config) -> Graph:
    """The graph that the user's own function builds; its module was imported when the config was loaded."""
    name = str(config.pipeline.function)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise _wrong_function(f"pipeline.function = {name!r} names no function", "write module:function")
    if module not in sys.modules:
        raise _wrong_function(f"the module of {name} was not imported", "load the config with load_config")
    known = vars(sys.modules[module])
    if attribute not in known:
        functions = [each for each, value in known.items() if callable(value) and not each.startswith("_")]
        raise _wrong_function(f"module {module!r} has no {attribute!r}", did_you_mean(attribute, functions))
    try:
        graph = known[attribute](config)
    except GraphError:
        raise
    except Exception as error:  # whatever a stranger's function raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name} failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        raise _wrong_function(what, "mend the function") from error
    if not isinstance(graph, Graph):
        raise _wrong_function(f"{name} returned a {type(graph).__name__}", "return an embodyrl.pipelines.Graph")
    return graph


def _wrong_function(message: str, remedy: str) -> GraphError:
    return GraphError([GraphFault(message, remedy, setting="pipeline.function")])


def _strangers(config: Config, graph: Graph) -> Iterator[GraphFault]:
    """Names in the section `pipeline` that no node has."""
    changes, known = config.pipeline, graph.names()
    named = [(f"pipeline.drop.{index}", name) for index, name in enumerate(changes.drop)]
    named += [(f"pipeline.replace.{name}", name) for name in changes.replace]
    for setting, name in named:
        if name not in known:
            yield GraphFault(f"the graph has no node {name!r}", did_you_mean(name, known), setting=setting)
    known = [*(name for name in known if name not in changes.drop), *(node.name for node in changes.insert)]
    for index, node in enumerate(changes.insert):
        for place, name in enumerate(node.before):
            if name not in known:
                setting = f"pipeline.insert.{index}.before.{place}"
                message = f"node {node.name!r} comes before {name!r}, which is not in the graph"
                yield GraphFault(message, did_you_mean(name, known), setting=setting)


def _changed(graph: Graph, config: Config) -> Graph:
    """The graph with nodes dropped, replaced and inserted, in this order."""
    changes = config.pipeline
    for name in changes.drop:
        graph = graph.drop(name)
    for name, stage in changes.replace.items():
        graph = graph.replace(name, stage)
    for node in changes.insert:
        graph = graph.insert(Node(node.name, node.stage, after=tuple(node.after)))
    for node in changes.insert:
        graph = graph.put_before(node.before, node.name)
    return graph
