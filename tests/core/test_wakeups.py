"""What wakes the main thread: its own end. That it wakes: test_interrupts.py."""

from __future__ import annotations

import os
import select
import signal

from megarl.core.wakeups import Wakeups


def test_its_end_is_no_error_where_its_thread_was_first() -> None:
    before = signal.getsignal(signal.SIGURG)
    with Wakeups() as wakeups:
        wakeups._over = True  # as its end says it, before it writes
        os.write(wakeups._write, bytes([signal.SIGHUP]))
        closed = select.poll()
        closed.register(wakeups._write, select.POLLERR)
        assert closed.poll(10_000), "the thread has ended, and nobody reads any more"
    assert signal.getsignal(signal.SIGURG) == before and signal.set_wakeup_fd(-1) == -1
