"""The host's memory: what the C library keeps of what this process has freed, and what the machine has left."""

from __future__ import annotations

import ctypes

import psutil

LITTLE_BYTES = 2 * 2**30
LITTLE_OF_AVAILABLE = 1 / 4


class _Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2() returns (2.33 and later); fordblks: free bytes in all of its heaps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def trim() -> None:
    """Give back to the system what this process has freed. Nothing where the C library is not glibc: others keep little."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)


def freed_bytes() -> int | None:
    """Bytes that this process has freed in its heaps, given back or not; None where the C library does not tell."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        return None
    call.restype = _Mallinfo2
    return int(call().fordblks)


def is_little_freed() -> bool:
    """Whether what this process has freed may stay with it: at most 2 GiB, and a quarter of what the machine has left.

    What was given back is taken again page by page, each cleared by the kernel. The bound shrinks with what is left, so that
    many processes on a machine cannot keep it from one that needs it.
    """
    freed = freed_bytes()
    return freed is not None and freed <= min(LITTLE_BYTES, LITTLE_OF_AVAILABLE * psutil.virtual_memory().available)
