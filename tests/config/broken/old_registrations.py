"""Registers an advantage the way it was done before entries had fields of their own."""

from __future__ import annotations

from embodyrl.registry import ADVANTAGES

ADVANTAGES.register("mine", target=print, summary="mine", facts={"critic": False, "whole": True})
