"""Bind this process to CPUs, and its memory to a NUMA node, by the kernel's own calls (no libnuma, no numactl)."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, for which the C library has no name."""
_MPOL_PREFERRED = 1
_MASK_WORDS = 16
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind(cpus: Sequence[int], memory_node: int | None) -> None:
    """Keep this process, and the threads it starts from now on, to these CPUs and this node's memory.

    What the kernel refuses is said on stderr and left: a process in the wrong place is slow, not wrong.

    Args:
        cpus: CPUs to run on; empty: as it is.
        memory_node: NUMA node to take memory from while it has some; None: as it is.
    """
    try:
        if cpus and set(cpus) != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cpus)
        if memory_node is not None:
            prefer_memory(memory_node)
    except OSError as error:
        print(f"warning: NUMA binding failed, going on without: {error}", file=sys.stderr)


def prefer_memory(node: int) -> None:
    """Take pages from this node from now on, and from another only while it is full.

    Preferred and not bound (`MPOL_BIND`): on a full node the latter ends in the out-of-memory killer, which is a high
    price for pages that would merely be slower to reach.

    Raises:
        OSError: the kernel refused, or this kind of machine is not known here.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"the number of set_mempolicy on {platform.machine()} is not known")
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(number, _MPOL_PREFERRED, ctypes.byref(mask), _MASK_WORDS * _WORD_BITS + 1) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"set_mempolicy for node {node}: {os.strerror(code)}")
