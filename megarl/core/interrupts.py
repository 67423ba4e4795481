"""Ctrl-C, SIGTERM, a terminal that is closed: all is taken down in order, which takes seconds, and that is said at once.

Not the request to stop with a checkpoint, which is SIGUSR1: core/stop.py.
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

from megarl.core.end_signals import SIGNALS, end_here, heeded
from megarl.core.errors import InterruptError
from megarl.core.wakeups import Wakeups

# Whoever starts this process may send on what the terminal has sent already: that is one Ctrl-C, and not two.
SAME_S = 1.0
# By then whatever has dropped a signal's exception is through, as a rule: otherwise it is dropped, and raised, once more.
AGAIN_S = 0.05


def as_error(cause: KeyboardInterrupt) -> InterruptError:
    """What has interrupted this process, with the notes of the KeyboardInterrupt; while its Interrupts listen."""
    # Ray raises one of its own in the place of the handler's, so that it cannot carry the number.
    listening = (getattr(signal.getsignal(number), "__self__", None) for number in SIGNALS)
    heard = (each.number for each in listening if isinstance(each, Interrupts) and each.number is not None)
    error = InterruptError(next(heard, signal.SIGINT))
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error


class Interrupts:
    """The signals that end this process. Use as a context manager: it listens meanwhile.

    The first one is raised as a KeyboardInterrupt. Later ones are ignored, as the work is on its way out, but for a Ctrl-C
    of somebody who does not want to wait: it ends the process at once. quiet: nothing is taken apart, nor is that said.

    Python drops whatever leaves a `__del__` or a hook of a fork, and tells `sys.unraisablehook`: the signal is raised again then.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.number: int | None = None  # of the first
        self._quiet = quiet
        self._since = 0.0
        self._over = False
        self._before: dict[int, signal._HANDLER] = {}
        self._told_before = sys.unraisablehook
        self._wakeups = Wakeups()
        self._pid = 0  # a fork has these handlers too, for a moment, and is not the one that listens

    def __enter__(self) -> Interrupts:
        # Only the main thread may set handlers, and only it gets signals.
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._before[number] = signal.signal(number, self._heard)
            self._told_before, sys.unraisablehook = sys.unraisablehook, self._dropped
            self._wakeups.__enter__()
            self._pid = os.getpid()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        if self._pid:
            sys.unraisablehook = self._told_before
            self._wakeups.__exit__()
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            # Of a command that one has ended, all that is left is to say so: with another it would end with that one's code.
            said = self.number is not None and before is end_here
            signal.signal(number, signal.SIG_IGN if said else before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
            told = f"\nmegarl: {signal.Signals(number).name}: ending everything in order (Ctrl-C again: at once)\n"
            # Whoever read it may have ended of the same Ctrl-C, as tee does, and the terminal may be closed.
            with suppress(OSError):
                os.write(2, b"" if self._quiet else told.encode())  # not by print: it may be just what was interrupted
            if signal.SIGINT in self._before:
                with suppress(RuntimeError):  # there is no room for a thread: a second one is heard as the first was
                    _thread.start_new_thread(self._hear_another, ())
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        if number == signal.SIGINT and now - self._since > SAME_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def _hear_another(self) -> None:
        """From SAME_S after the first on, a Ctrl-C ends the process at once. The system's own handler, and its own ignoring until
        then: Python hears a signal when its main thread comes back from what it waits in, seconds later, and the same looks like
        another by then.
        """
        time.sleep(SAME_S)
        if not self._over:
            ctypes.CDLL(None).signal(int(signal.SIGINT), 0)  # SIG_DFL; Python's own way is for the main thread

    def _dropped(self, told: sys.UnraisableHookArgs) -> None:
        error = told.exc_value
        of_signal = isinstance(error, KeyboardInterrupt) if self.number is not None else is_termination(error)
        main = threading.current_thread() is threading.main_thread() and os.getpid() == self._pid
        if not (of_signal and main):
            self._told_before(told)
            return
        # Not here, where it would be dropped as well; and by the timer, as its signal wakes the main thread wherever it waits.
        before = signal.signal(signal.SIGALRM, self._again)
        self._before.setdefault(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def _again(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self._heard(signal.SIGTERM, frame)
        raise KeyboardInterrupt


def is_termination(error: BaseException | None) -> bool:
    """Whether it is what Ray makes of SIGTERM, by a handler that it sets as it starts: `sys.exit` with the signal's number."""
    return isinstance(error, SystemExit) and error.code == signal.SIGTERM


def run_interruptibly(work: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`; a signal is heard at once, cancels the work, and is raised where that has ended.

    An exception that a signal raises within the event loop may cost it a callback that it was about to call, and what waits for
    that would wait for ever. A second signal is for the handlers that were there before. For the main thread; a signal that is
    ignored stays so. What goes wrong while the work ends is a note of what is raised.
    """
    before = {number: signal.getsignal(number) for number in heeded()}
    raised: list[KeyboardInterrupt] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    async def listen() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.create_task(work)

        def hear(number: int, frame: FrameType | None) -> None:
            try:
                restore()
                signal.raise_signal(number)
            except KeyboardInterrupt as error:
                raised.append(error)
                with suppress(RuntimeError):  # the loop is closed: nothing is left to be cancelled
                    loop.call_soon_threadsafe(task.cancel)

        # Not by the loop's own way: it takes its handlers off before others are there, and the next signal would end all at once.
        for number in before:
            signal.signal(number, hear)
        await task

    try:
        asyncio.run(listen())
    except (asyncio.CancelledError, Exception) as error:
        if not raised:
            raise
        if not isinstance(error, asyncio.CancelledError):
            raised[0].add_note(f"While it ended, {type(error).__name__}: {error}")
    finally:
        restore()
    if raised:
        raise raised[0]
