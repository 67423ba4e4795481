"""When a process stands still, on a clock that the test turns."""

from __future__ import annotations

from megarl.core.process_state import STATES, Stopped
from megarl.serving.vigil import FROZEN_S, Vigil

SCHEDULER = Stopped(7, "scheduler", STATES["T"])
DEBUGGED = Stopped(8, "scheduler", STATES["t"])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_process_that_stays_stopped_is_frozen_and_one_that_went_on_is_not() -> None:
    clock = Clock()
    vigil = Vigil(60.0, clock)
    assert vigil.saw([SCHEDULER]) == ""
    clock.now += FROZEN_S - 0.1
    assert vigil.saw([SCHEDULER]) == ""
    assert vigil.saw([]) == ""  # it went on: what comes counts anew
    clock.now += 1
    assert vigil.saw([SCHEDULER, DEBUGGED]) == ""
    clock.now += FROZEN_S
    assert vigil.saw([DEBUGGED, SCHEDULER]) == "scheduler (pid 7, stopped by a signal) stood still for 5 s."


def test_a_debugger_may_take_its_time() -> None:
    clock = Clock()
    vigil = Vigil(60.0, clock)
    vigil.saw([DEBUGGED])
    clock.now += 1000
    assert vigil.saw([DEBUGGED]) == ""


def test_silence_is_too_long_only_where_an_answer_is_due_all_the_time() -> None:
    clock = Clock()
    vigil = Vigil(60.0, clock)
    for answers, seconds in ((False, 59), (True, 1), (False, 59), (None, 1), (False, 59.9)):
        assert vigil.heard(answers) == ""
        clock.now += seconds
    assert vigil.heard(False) == ""
    clock.now += 0.2
    assert vigil.heard(False) == "It gave no answer for 60 s; deadlines.answer_s is 60."
