"""Seeds from names, never from time, process ids or arrival order: the same run whatever process serves it."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, role: str, *indices: int) -> int:
    """A seed in 0 .. 2**63 - 1 that depends on (seed, role, indices) alone.

    Args:
        seed: the run's seed.
        role: what the numbers are for: `policy`, `actions`, `train`, `eval`.
        indices: rank, slot, episode, whatever tells one use from another.
    """
    text = f"{seed}/{role}/{'/'.join(str(index) for index in indices)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
