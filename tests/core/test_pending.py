"""Operations that have begun: waited for once, together, and where their seconds count."""

from __future__ import annotations

from typing import Any

from megarl.core.pending import Finished, Joined, Once
from megarl.core.timing import PhaseTimer
from tests.support.recording import Slow


def test_several_wait_for_an_operation_and_the_first_does() -> None:
    calls: list[Any] = []
    timer = PhaseTimer()
    once: Once[int] = Once(Slow("it", calls, 3), timer, "critic")
    assert once.poll() is None and "critic" not in timer.totals
    assert [once.wait(), once.wait(), once.poll()] == [3, 3, 3]
    assert calls == [("wait", "it")] and "critic" in timer.totals


def test_an_operation_that_has_ended_by_itself_costs_no_wait() -> None:
    timer = PhaseTimer()
    once = Once(Finished(3), timer, "critic")
    assert once.poll() == 3 == once.wait()
    assert timer.totals == {}


def test_operations_that_are_joined_end_with_the_last() -> None:
    calls: list[Any] = []
    joined = Joined([Slow("a", calls, 1), Finished(2)], sum)
    assert joined.poll() is None and Joined([Finished(1), Finished(2)], sum).poll() == 3
    assert joined.wait() == 3 and calls == [("wait", "a")]
