"""The phase timer, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.core.metrics import check_names
from megarl.core.timing import MOST_SPANS, PhaseTimer, Span


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_seconds_of_a_step(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.step(1):
        with timer.phase("rollout"), timer.waiting():
            clock.pass_s(3)
        with timer.phase("update"):
            clock.pass_s(0.5)
            with timer.waiting():
                clock.pass_s(4.0)
        with timer.phase("rollout"), timer.waiting():
            clock.pass_s(2)
        clock.pass_s(0.5)
    metrics = timer.metrics(num_tokens=900)
    check_names(metrics)
    twice = timer.metrics(num_tokens=900, epochs=2)
    assert (twice["perf/train_tokens_per_s"], twice["perf/tokens_per_s"]) == (400, 90)
    assert metrics == pytest.approx(
        {
            "perf/step_s": 10,
            "perf/rollout_s": 5,
            "perf/update_s": 4.5,
            "perf/driver_s": 1,
            "perf/driver_fraction": 0.1,
            "perf/ranks_idle": 0.55,
            "perf/tokens_per_s": 90,
            "perf/train_tokens_per_s": 200,
        }
    )


def test_a_step_forgets_the_one_before_but_totals_go_on(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("start"):
        clock.pass_s(7)
    for step in (1, 2):
        with timer.step(step), timer.phase("update"):
            clock.pass_s(step)
    assert timer.metrics(0)["perf/update_s"] == 2
    assert "perf/start_s" not in timer.metrics(0)
    assert timer.totals == {"start": 7, "update": 3}


def test_a_wait_inside_of_a_wait_counts_once(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.step(1), timer.waiting():
        clock.pass_s(1)
        with timer.waiting():
            clock.pass_s(1)
    assert timer.metrics(0)["perf/driver_s"] == 0


def test_waits_before_the_step_are_not_the_steps(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.waiting():
        clock.pass_s(5)
    with timer.step(1):
        clock.pass_s(2)
    assert timer.metrics(0)["perf/driver_s"] == 2


def test_what_is_around_a_step_takes_none_of_its_time(clock: Clock) -> None:
    timer, seen = PhaseTimer(clock=clock), []

    @contextmanager
    def around(step: int) -> Iterator[None]:
        seen.append(step)
        with timer.waiting():
            clock.pass_s(7)
        yield
        with timer.waiting():
            clock.pass_s(7)

    timer.around = around
    with timer.step(4), timer.phase("update"):
        clock.pass_s(2)
    metrics = timer.metrics(num_tokens=10)
    assert (metrics["perf/step_s"], metrics["perf/update_s"], metrics["perf/driver_s"], seen) == (2, 2, 2, [4])


def test_an_error_closes_everything(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with pytest.raises(RuntimeError), timer.step(1), timer.phase("sync"), timer.waiting():
        clock.pass_s(2)
        raise RuntimeError
    with timer.step(2), timer.phase("update"):
        clock.pass_s(1)
    assert timer.metrics(0)["perf/step_s"] == timer.metrics(0)["perf/driver_s"] == 1
    assert timer.totals == {"sync": 2, "update": 1}


def test_spans_are_data_for_a_trace(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.step(1):
        clock.pass_s(1)
        with timer.phase("update"):
            clock.pass_s(2)
    timer.add_span("forward", "actor", 1.25, 2.0)
    assert list(timer.spans) == [
        Span("update", "driver", 1, 3),
        Span("step", "driver", 0, 3),
        Span("forward", "actor", 1.25, 2.0),
    ]


def test_a_long_run_keeps_its_last_spans_alone(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    for number in range(MOST_SPANS + 5):
        timer.add_span("update", "actor", number, number + 1)
    assert len(timer.spans) == MOST_SPANS and timer.spans[-1].start == MOST_SPANS + 4


def test_phases_are_announced(clock: Clock) -> None:
    heard: list[tuple[int | None, str | None]] = []
    timer = PhaseTimer(on_phase=lambda step, phase: heard.append((step, phase)), clock=clock)
    with timer.phase("start"):
        pass
    with timer.step(4), timer.phase("update"):
        pass
    assert heard == [(None, "start"), (None, None), (4, "update"), (4, None)]


def test_a_phase_within_another_interrupts_it(clock: Clock) -> None:
    heard: list[tuple[int | None, str | None]] = []
    timer = PhaseTimer(on_phase=lambda step, phase: heard.append((step, phase)), clock=clock)
    with timer.step(1), timer.phase("save"):
        clock.pass_s(1)
        with timer.phase("critic"):
            clock.pass_s(3)
            with timer.phase("eval"):
                clock.pass_s(5)
            assert timer.last == (1, "critic")
        clock.pass_s(2)
        with pytest.raises(RuntimeError), timer.phase("critic"):
            clock.pass_s(4)
            raise RuntimeError
        assert timer.last == (1, "critic"), "where the error was"
    seconds = {"save": 3, "critic": 7, "eval": 5}
    assert timer.totals == seconds
    assert {name: timer.metrics(0)[f"perf/{name}_s"] for name in seconds} == seconds
    assert timer.metrics(0)["perf/step_s"] == 15
    phases = ["save", "critic", "eval", "critic", "save", "critic", "save", None]
    assert heard == [(1, phase) for phase in phases]


def test_misuse_is_caught(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with pytest.raises(AssertionError, match="is not one of"), timer.phase("lunch"):
        pass
    with pytest.raises(AssertionError, match="inside of step 1"), timer.step(1), timer.step(2):
        pass
