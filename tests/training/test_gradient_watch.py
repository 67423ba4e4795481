"""Which gradients are bad: by hand."""

from __future__ import annotations

import math

import pytest

from megarl.training.gradient_watch import FEWEST, MOST_SKIPPED, WINDOW, GradientWatch


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step(norm: float) -> None:
    assert "is not finite" in GradientWatch(None).trouble(norm)


def test_a_spike_is_measured_by_the_median_of_the_last() -> None:
    watch = GradientWatch(4.0)
    for _ in range(FEWEST - 1):
        watch.took(2.0)
    assert watch.trouble(1e9) == ""  # too few to measure by
    watch.took(100.0)  # one that was taken moves no median
    assert watch.trouble(8.0) == ""
    assert watch.trouble(8.5) == f"is a spike (norm 8.5, 4.25 times the median of the last {FEWEST})"
    assert GradientWatch(None).trouble(1e9) == ""
    for _ in range(WINDOW):
        watch.took(10.0)
    assert watch.trouble(39.0) == ""


def test_steps_without_a_gradient_make_none_a_spike() -> None:
    """As at the start of a run whose rewards are all zero."""
    watch = GradientWatch(4.0)
    for _ in range(WINDOW):
        assert watch.trouble(0.0) == ""
        watch.took(0.0)
    assert watch.trouble(0.5) == ""
    watch.load_state({"norms": [0.0] * FEWEST, "skipped": 0})
    assert watch.trouble(0.5) == ""


def test_it_goes_on_as_it_was() -> None:
    first, second = GradientWatch(2.0), GradientWatch(2.0)
    for norm in range(1, WINDOW + 9):
        first.took(float(norm))
    assert first.skip(math.nan)
    second.load_state(first.state())
    assert second.state() == first.state() == {"norms": [float(norm) for norm in range(9, WINDOW + 9)], "skipped": 1}
    assert [second.trouble(each) for each in (49.0, 50.0)] == [first.trouble(each) for each in (49.0, 50.0)]


def left_out(watch: GradientWatch, norm: float, steps: int) -> int:
    """Steps of this norm that are left out, before the first that is taken."""
    for step in range(steps):
        if not watch.trouble(norm):
            return step
        assert watch.skip(norm)
    return steps


def test_one_spike_stays_one_and_norms_that_have_risen_for_good_are_no_spikes_for_ever() -> None:
    watch = GradientWatch(3.0)
    for _ in range(WINDOW):
        watch.took(1.0)
    assert left_out(watch, 100.0, 5) == 5
    watch.took(1.0)
    assert watch.skipped == 0 and watch.trouble(3.5) != ""
    # 5 of 32 are 100 already: with 11 more, half of them are.
    assert left_out(watch, 100.0, WINDOW) == WINDOW // 2 - 5


def test_too_many_in_a_row_are_said() -> None:
    watch = GradientWatch(None)
    assert all(watch.skip(math.nan) for _ in range(MOST_SKIPPED - 1))
    assert not watch.skip(math.inf)
    watch.took(1.0)
    assert watch.skip(math.nan) and watch.state() == {"norms": [1.0], "skipped": 1}
