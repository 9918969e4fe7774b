"""`embodyrl graph`: the iteration that a config asks for, as a drawing."""

from __future__ import annotations

from pathlib import Path

from embodyrl.config import LoadedConfig
from embodyrl.errors import UserError
from embodyrl.files import write_whole
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.drawing import to_mermaid, to_svg


def show(loaded: LoadedConfig, svg: Path | None, mermaid: bool) -> None:
    """Write the SVG where it is asked for, and print Mermaid unless only the SVG is.

    Raises:
        UserError: the file cannot be written.
    """
    dataflow = build_pipeline(loaded.config).dataflow
    if svg is not None:
        try:
            write_whole(svg, to_svg(dataflow))
        except OSError as error:
            raise UserError(f"cannot write {svg}: {error.strerror}; give a path in a folder that exists") from error
    if mermaid or svg is None:
        print(to_mermaid(dataflow), end="")
    else:
        print(f"written to {svg}")
