from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def goldens(repository: Path) -> dict:
    """Numbers that the reference implementations of other projects computed."""
    path = repository.parent / "shared" / "reference" / "algorithm_goldens.json"
    if not path.is_file():
        pytest.skip("the reference numbers of other implementations are not here (shared/reference)")
    return json.loads(path.read_text())
