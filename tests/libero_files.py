"""LIBERO's meshes and textures on this machine, for tests that play it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from embodyrl.envs.libero import assets, pro
from embodyrl.envs.options import LiberoConfig
from embodyrl.errors import UserError


@cache
def place() -> Path | None:
    """The folder that LIBERO plays with if nothing is set; None if there is none."""
    try:
        return assets.find(LiberoConfig(name="libero", tasks=[]))
    except UserError:
        return None


needs_assets = pytest.mark.skipif(place() is None, reason="LIBERO's assets are not there: make libero")
needs_pro = pytest.mark.skipif(not (place() and pro.is_here()), reason="LIBERO-PRO is not there: make libero")
