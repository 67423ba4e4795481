"""Permissions of files that hold for the tests too, where they are root's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # linux/capability.h
VERSION_3 = 0x20080522


@contextmanager
def without_privileges() -> Iterator[None]:
    """Within, this thread reads and writes what the owner of a file may, as an ordinary user does."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()

    def ask(call: object, capabilities: object) -> None:
        if call(header, capabilities) != 0:  # type: ignore[operator]
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    ask(libc.capget, held)
    fewer = type(held)(*held)
    fewer[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)  # the first word: those that are in force
    ask(libc.capset, fewer)
    try:
        yield
    finally:
        ask(libc.capset, held)
