"""What the documentation site adds to the pages: `scripts/docs_site.py`, and the settings of mkdocs.yml."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def docs_site(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module("docs_site")


def search_of(docs_site: Any, path: str) -> Any:
    """What the search knows of a page."""
    page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri=path, generated_by=None))
    docs_site.on_page_markdown("", page, None, None)
    return page.meta.get("search", {})


def test_the_search_finds_settings_and_pages_before_files_and_results(docs_site: Any) -> None:
    assert search_of(docs_site, "files/examples/custom_reward.py.md") == {"exclude": True}
    boosts = [
        search_of(docs_site, path).get("boost", 1)
        for path in ("reference/settings.md", "recipes.md", "algorithms.md", "results/sac.md")
    ]
    assert boosts == sorted(boosts, reverse=True) and len(set(boosts)) == 4


def test_what_the_search_ranks_is_there(docs_site: Any) -> None:
    generated = set(sys.modules["docs_reference"].PAGES) | {"files/"}
    assert all(path in generated or (REPOSITORY / "docs" / path).exists() for path in docs_site.SEARCH)


def test_the_first_page_shows_the_video_and_the_menu_is_folded() -> None:
    assert "](images/tiny_vla.webp)" in (REPOSITORY / "docs" / "index.md").read_text()
    site = (REPOSITORY / "mkdocs.yml").read_text()
    assert "navigation.sections" not in site and "navigation.expand" not in site
