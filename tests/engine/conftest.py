from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embodyrl.engine.offload import refuse_memory_disk
from embodyrl.errors import UserError

sys.path.append(str(Path(__file__).parent))  # where `engines` is


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose files are not memory."""
    try:
        refuse_memory_disk(tmp_path)
    except UserError:
        pytest.skip("temporary files are kept in memory here")
    return tmp_path
