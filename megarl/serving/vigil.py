"""Whether a running process stands still: stopped by a signal, or silent for too long. Not for one that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megarl.core.process_state import STATES, Stopped

LOOK_S = 2.0  # between two looks at whether a process stands still
ASK_S = 30.0  # most seconds between two questions whether it answers
FROZEN_S = 5.0  # a process that is stopped for so long is not about to go on
BY_SIGNAL = STATES["T"]


class Vigil:
    """What is seen of one process and its children, look by look. answer_s: longest silence. clock: seconds, upwards.

    A debugger stops processes for moments, and on purpose: where one does it for long, the silence tells.
    """

    def __init__(self, answer_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer_s = answer_s
        self.ask_every_s = min(ASK_S, answer_s / 4)
        self._clock = clock
        self._stopped: dict[int, float] = {}  # since when
        self._silent: float | None = None

    def saw(self, stopped: Sequence[Stopped]) -> str:
        """Which of its processes is frozen, or nothing. stopped: those that stand still now."""
        now = self._clock()
        frozen = [each for each in stopped if each.how == BY_SIGNAL]
        self._stopped = {each.pid: self._stopped.get(each.pid, now) for each in frozen}
        for each in frozen:
            if now - self._stopped[each.pid] >= FROZEN_S:
                return f"{each} stood still for {now - self._stopped[each.pid]:.0f} s."
        return ""

    def heard(self, answers: bool | None) -> str:
        """That it is silent for too long, or nothing. answers: whether it does; None where nobody may expect it to."""
        now = self._clock()
        if answers is not False:
            self._silent = None
        elif self._silent is None:
            self._silent = now
        elif now - self._silent >= self._answer_s:
            return f"It gave no answer for {now - self._silent:.0f} s; deadlines.answer_s is {self._answer_s:g}."
        return ""
