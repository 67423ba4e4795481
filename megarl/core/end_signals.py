"""The signals that end this process, and what they do in the first moments of a command. It imports next to nothing: what is
imported before they are listened to is a moment in which Python tells of an interruption by a stack trace.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

# SIGHUP is of a terminal that was closed, as by a lost connection.
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that end this process: whoever starts it in the background may have it ignore Ctrl-C, and nohup SIGHUP."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


def interrupted_by(number: int) -> str:
    """What is said of a command that a signal has ended."""
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
    if number == signal.SIGHUP:
        name += (
            ", as of a terminal that was closed. A command that is started by nohup, or in tmux, outlives its terminal"
        )
    return f"interrupted by {name}."


def ending_of(code: int) -> str:
    """How a process ended, by its exit code as subprocess has it: `exit code 3`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in {*signal.Signals} else -code}"  # most real-time ones have no name


def end_at_once() -> None:
    """From now on they end this process where it is, with a sentence: for as long as nothing has to be ended in order.

    Not by an exception: while modules load it may come out as another one, or be dropped.
    """
    for number in heeded():
        signal.signal(number, end_here)


def end_here(number: int, frame: object) -> None:
    """A handler: ends this process with a sentence."""
    with suppress(OSError):  # nobody reads any more: the exit code says it
        os.write(2, f"megarl: {interrupted_by(number)}\n".encode())
    os._exit(128 + number)
