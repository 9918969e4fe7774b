"""Hooks of mkdocs: adds the generated reference, and the files beside docs/ to which pages link, to the site."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import docs_reference  # noqa: E402

LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
SHOWN = {".py": "python", ".yaml": "yaml", ".json": "json", ".md": "", "": "text"}
"""Files beside docs/ that are shown as pages: their endings and languages."""
SEARCH: dict[str, dict[str, Any]] = {
    "files/": {"exclude": True},
    "recipes.md": {"boost": 3},
    "reference/settings.md": {"boost": 4},
    "reference/api.md": {"boost": 0.3},
    "results/": {"boost": 0.3},
    "performance.md": {"boost": 0.3},
}
"""Rank of pages in the search, by the beginning of their path: settings come first; files are left out."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, write in docs_reference.PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for page in [file for file in files.documentation_pages() if not file.generated_by]:
        for _, target, _ in LINK.findall(page.content_string):
            outside = _outside(page.src_uri, target)
            if outside is not None and files.get_file_from_path(_page_of(outside)) is None:
                files.append(File.generated(config, _page_of(outside), content=_shown(outside, page.src_uri)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files beside docs/ to their pages, and say how the search ranks the page."""
    for start, rank in SEARCH.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = rank

    def lead(found: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, found[2])
        if outside is None:
            return found[0]
        target = posixpath.relpath(_page_of(outside), posixpath.dirname(page.file.src_uri) or ".")
        return f"{found[1]}{target})"  # without the place in it, since these pages show a file as it is

    return markdown if page.file.generated_by else LINK.sub(lead, markdown)


def _outside(page: str, target: str) -> Path | None:
    """Return the path, below the repository, of a file beside docs/ to which a page links; None for other links."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else Path(path)


def _page_of(path: Path) -> str:
    return f"files/{path}" if path.suffix == ".md" else f"files/{path}.md"


def _shown(path: Path, linked_from: str) -> str:
    """Return a page that shows a file of the repository, or the names in a folder."""
    file = ROOT / path
    if file.is_dir():
        names = "\n".join(sorted(each.name for each in file.iterdir() if not each.name.startswith((".", "__"))))
        return f"# {path}/\n\nA folder of the repository:\n\n```text\n{names}\n```\n"
    if not file.is_file() or path.suffix not in SHOWN:
        raise PluginError(f"docs/{linked_from} links to {path}, which is no file that the site can show")
    fence = "`" * 4
    text: Any = file.read_text()
    return f"# {path}\n\nA file of the repository.\n\n{fence}{SHOWN[path.suffix] or 'markdown'}\n{text}{fence}\n"
