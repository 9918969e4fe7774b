"""Torch is imported while simulators start; garbage is collected again afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from embodyrl.runner.build import torch_imported


class Ring:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was_and_frees_what_the_block_left(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with torch_imported():
            assert not gc.isenabled()
            left = weakref.ref(Ring())
        assert gc.isenabled() is collects
        assert gc.get_freeze_count() == 0
        gc.collect()
        assert left() is None
        with pytest.raises(KeyError, match="fails"), torch_imported():
            raise KeyError("it fails")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
