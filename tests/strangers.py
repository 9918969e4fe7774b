"""Plug-ins that a test module imports in its own process, and that are gone afterwards for the next one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embodyrl.registry import all_registries


@contextmanager
def copied(sources: Path, names: tuple[str, ...], folder: Path) -> Iterator[None]:
    """Copy the files of plug-ins to a folder; at the end of the block what they registered and their modules are gone.

    Args:
        sources: folder of the files.
        names: of their modules.
        folder: where a config that names them will lie.
    """
    for name in names:
        shutil.copy(sources / f"{name}.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        for registry in all_registries():
            known = {entry.name: entry for entry in registry.entries()}  # which first declares its own
            patch.setattr(registry, "_entries", known)
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)
