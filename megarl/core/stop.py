"""The request to stop early: SIGUSR1 to the driver. Schedulers send it before a time limit.

The step under way is finished and committed first, so that the run goes on from it later. Not for ending at once: that
is what SIGTERM and Ctrl-C do.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNAL = signal.SIGUSR1


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started within get a request to stop only once they listen: before, it would end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Whether this process has been asked to stop. Use as a context manager: it listens meanwhile."""

    def __init__(self) -> None:
        self.asked = False
        self._before: signal._HANDLER = None

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers, and only it gets signals.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(STOP_SIGNAL, self._ask)
            # Whoever started this process may hold the request back until somebody listens (`held_back`).
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(STOP_SIGNAL, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
