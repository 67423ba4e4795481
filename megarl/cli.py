"""Where the megarl command begins. All that it loads comes after the signals are listened to: command_line.py."""

from __future__ import annotations

from megarl.core.end_signals import end_at_once


def entry() -> None:
    """A process that is this command alone."""
    end_at_once()
    from megarl.command_line import run

    run()
