"""An iteration as a graph of named nodes."""

from embodyrl.pipelines.graph import Graph, GraphError, Node
from embodyrl.pipelines.iteration import Iteration
from embodyrl.pipelines.pipeline import NodeError, Pipeline

__all__ = ["Graph", "GraphError", "Iteration", "Node", "NodeError", "Pipeline"]
