"""Which samples are kept, on lists written by hand."""

from __future__ import annotations

from megarl.core.types import Status
from megarl.rollout import filters
from tests.rollout.samples import make_sample


def test_failed_and_ungraded_samples_are_left_out() -> None:
    good, truncated = make_sample("a", 1.0), make_sample("a", status=Status.TRUNCATED)
    failed, ungraded = make_sample("a", status=Status.FAILED), make_sample("b", grade_failure="timeout")
    assert filters.usable([good, failed, ungraded, truncated]) == [good, truncated]
