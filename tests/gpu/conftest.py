from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # where `standin` is

from standin import build


@pytest.fixture
def standin() -> None:
    """Skip where there can be no stand-in."""
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
