"""Whether processes have ended, asked of the kernel; what a process has open; how one is started that Ctrl-C ends."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

from megarl.core.end_signals import SIGNALS


def ended(pids: Iterable[int], within_s: float = 20.0) -> bool:
    """Whether all of these end in time. One that nobody has reaped yet counts as ended."""
    end = time.monotonic() + within_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
        finally:
            os.close(handle)
    return True


def heed_interrupts() -> None:
    """Between fork and exec: whoever runs the tests in the background may have them ignore signals, which children inherit."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def open_files() -> dict[str, str]:
    """What this process has open: by descriptor, where it leads. The listing itself is left out."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found
