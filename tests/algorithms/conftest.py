from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def goldens() -> dict:
    """Numbers that the implementations of verl, RLinf and RL4VLA gave on small inputs."""
    return json.loads((Path(__file__).parent / "goldens.json").read_text())
