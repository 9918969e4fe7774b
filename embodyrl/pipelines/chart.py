"""An iteration as a Mermaid flow chart."""

from __future__ import annotations

import html
from collections.abc import Sequence

from embodyrl.pipelines.checks import RESOURCES, plain
from embodyrl.pipelines.pipeline import Stage


def to_mermaid(stages: Sequence[Stage]) -> str:
    """Draw the stages as a Mermaid flow chart, which Markdown viewers show; edges carry columns."""
    lines = ["flowchart TD"]
    lines += [f'  {each.name}["<b>{each.name}</b><br/>{"<br/>".join(_notes(each))}"]' for each in stages]
    for (source, target), columns in _edges(stages).items():
        link = f'-- "{", ".join(columns)}" -->' if columns else "-.->"
        lines.append(f"  {source} {link} {target}")
    return "\n".join(lines) + "\n"


def _edges(stages: Sequence[Stage]) -> dict[tuple[str, str], list[str]]:
    """Return the columns from stage to stage, each from the last that wrote or changed it; none between stages that
    only follow each other."""
    edges: dict[tuple[str, str], list[str]] = {}
    last: dict[str, str] = {}
    for before, stage in zip((None, *stages), stages, strict=False):
        # An edge starts where the column was changed last, not where it was first written.
        for column in stage.inputs:
            if column in last:
                edges.setdefault((last[column], stage.name), []).append(column)
        if before is not None:
            edges.setdefault((before.name, stage.name), [])
        last |= {column: stage.name for column in stage.outputs if column in last or column in plain(stage.writes)}
    return edges


def _notes(stage: Stage) -> list[str]:
    """Return the lines below a stage's name: its function, and the resources it uses."""
    changes = [name for name in RESOURCES if name in plain(stage.changes)]
    reads = [name for name in RESOURCES if name in plain(stage.reads) and name not in changes]
    notes = [stage.function if isinstance(stage.function, str) else stage.function.__name__]
    notes += [f"reads {', '.join(reads)}"] if reads else []
    notes += [f"changes {', '.join(changes)}"] if changes else []
    return [html.escape(note) for note in notes]
