"""Writes the README's badges, docs/images/badges/*.svg, from pyproject.toml and the version: they say nothing else, and
nothing is loaded from elsewhere to show them.

    python scripts/badges.py

`tests/test_readme.py` compares them with what this writes now.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

from embodyrl.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images" / "badges"
WIDTH, HEIGHT, MARGIN = 6.6, 20, 6
"""Of a character [px], of a badge, beside its texts."""


def badges() -> dict[str, str]:
    """Return the content of each badge by its file's name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=") + "+"
    facts = {"version": __version__, "python": python, "license": project["license"]}
    return {f"{name}.svg": badge(name, value) for name, value in facts.items()}


def badge(name: str, value: str) -> str:
    """Return an SVG with a name on grey and a value on blue."""
    left, right = (round(len(text) * WIDTH + 2 * MARGIN) for text in (name, value))
    texts = "".join(
        f'<text x="{x}" y="14" text-anchor="middle">{escape(text)}</text>'
        for x, text in ((left / 2, name), (left + right / 2, value))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(name)}: {escape(value)}">'
        f'<rect width="{left}" height="{HEIGHT}" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="{HEIGHT}" fill="#3f51b5"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in badges().items():
        (FOLDER / file).write_text(content)
