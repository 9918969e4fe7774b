"""Config rules about the iteration graph; `builtin.py` adds them when the algorithms are declared."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.rules import Finding, rule
from embodyrl.config.schema import Config
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.graph import GraphError, GraphFault
from embodyrl.registry import ALGORITHMS


@rule
def nodes_fit_together(config: Config) -> Iterator[Finding]:
    """The iteration graph can be built."""
    if config.pipeline.function is None and config.algorithm.name not in ALGORITHMS:
        return
    try:
        build_pipeline(config)
    except GraphError as error:
        for fault in error.faults:
            yield Finding(tuple(_settings(fault, config)), fault.message, fault.remedy)


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
