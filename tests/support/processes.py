"""Whether processes have ended, asked of the kernel."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable


def ended(pids: Iterable[int], within_s: float = 5.0) -> bool:
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
