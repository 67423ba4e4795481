"""Which ranks are profiled in which steps, and what becomes of a profile that cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.ranks import RankGroup
from megarl.cluster.step_profiler import StepProfiler
from megarl.cluster.waits import Worker
from megarl.recipe.run import Profiler
from tests.cluster.test_roles import AtOnce


def worker(name: str, told: list[Any], problem: str = "") -> Worker:
    def begin(memory: bool) -> None:
        told.append((name, memory))

    def end(file: Path) -> str:
        told.append((name, str(file)))
        return problem

    handle = SimpleNamespace(begin_profile=SimpleNamespace(remote=begin), end_profile=SimpleNamespace(remote=end))
    return Worker(handle, ProcessSpec(name, Path("logs")), ProcessFacts(0, "?"))


def pool(*workers: Worker) -> RankGroup:
    return RankGroup(workers, AtOnce())  # type: ignore[arg-type]


def test_the_ranks_that_are_named_are_profiled_in_each_pool_that_has_them() -> None:
    told: list[Any] = []
    pools = [pool(*(worker(f"policy rank {rank}", told) for rank in range(3))), pool(worker("others rank 0", told))]
    around = StepProfiler(pools, Profiler(steps=(2,), ranks=(0, 2), memory=True), Path("/run"), 5.0)
    with around(1):
        told.append("step 1")
    with around(2):
        told.append("step 2")
    begun = [(name, True) for name in ("policy rank 0", "policy rank 2", "others rank 0")]
    files = [(name, f"/run/profile/step_000002_{name.replace(' ', '_')}.json.gz") for name, _ in begun]
    assert told == ["step 1", *begun, "step 2", *files]


def test_a_step_that_fails_asks_ranks_for_nothing_more() -> None:
    told: list[Any] = []
    around = StepProfiler([pool(worker("rank 0", told))], Profiler(steps=(1,)), Path("/run"), 5.0)
    with pytest.raises(RuntimeError, match="died"), around(1):
        raise RuntimeError("it died")
    assert told == [("rank 0", False)]


def test_a_profile_that_cannot_be_written_is_told_of_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    around = StepProfiler([pool(worker("rank 0", [], "disk full"))], Profiler(steps=(1,)), Path("/run"), 5.0)
    with caplog.at_level(logging.INFO, logger="megarl"), around(1):
        pass
    assert caplog.messages == ["the profile of step 1 could not be written into /run/profile: disk full"]
