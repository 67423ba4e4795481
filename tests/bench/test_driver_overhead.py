"""The stub ranks that the driver's own seconds are measured with: they are called as real ones are."""

from __future__ import annotations

import inspect

import pytest

from bench.driver_overhead import StubRank
from megarl.cluster.ranks import RankActor


@pytest.mark.parametrize("name", ["logprobs", "update"])
def test_a_stub_takes_what_a_rank_is_given(name: str) -> None:
    real, stub = (list(inspect.signature(getattr(each, name)).parameters) for each in (RankActor, StubRank))
    *before, parts = [each for each in real if not each.startswith("_ray")]  # Ray adds one to a class that it was given
    assert parts == "parts" and stub[: len(before)] == before
