from __future__ import annotations

from collections.abc import Iterator

import pytest
from raylets import Raylets


@pytest.fixture(scope="session")
def raylets() -> Iterator[Raylets]:
    """Two machines."""
    cluster = Raylets()
    try:
        yield cluster
    finally:
        cluster.close()
