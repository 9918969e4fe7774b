"""A console of rich for text that somebody else wrote. Importing rich takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from embodyrl.errors import without_controls


class Console(RichConsole):
    """A console for text as it is: `[metaworld]` is no markup and `:cat:` no emoji; styles come as `rich.text.Text`.
    Control characters are escaped, since names and logs may be a stranger's, and a terminal obeys what they hold."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object into segments of safe text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))
