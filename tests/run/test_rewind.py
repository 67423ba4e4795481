"""Which checkpoint a run goes back to, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import GradientError, RewindError
from megarl.report.history import METRICS_FILE
from megarl.run.recovery import Recoveries, RewoundError, live
from megarl.run.rewind import rewinding
from megarl.training.run_checkpoints import Checkpoints


class Samples:
    """Allows it, or does not."""

    def __init__(self, *, allows: bool = True) -> None:
        self.asked: list[tuple[int, int]] = []
        self._allows = allows

    def rewind(self, to_step: int, to_number: int) -> bool:
        self.asked.append((to_step, to_number))
        return self._allows


def fail(samples: Any, checkpoints: Checkpoints, error: Exception) -> None:
    with rewinding(samples, checkpoints):
        raise error


def test_it_goes_back_to_the_newest_whole_checkpoint_and_else_to_the_beginning(tmp_path: Path) -> None:
    samples, checkpoints = Samples(), Checkpoints(tmp_path, keep_last=3)
    with pytest.raises(RewoundError, match="goes back to the base model, and on with other data"):
        fail(samples, checkpoints, RewindError("a spike"))
    for step in (2, 4, 6):
        (checkpoints.begin(step, ["actor"])["actor"] / "weights").write_text("some")
        checkpoints.commit(step, {"data": {"decisions": 10 * step}})
    (tmp_path / "step_000006" / "actor" / "weights").write_text("none")
    with pytest.raises(RewoundError, match="the checkpoint of step 4"):
        fail(samples, checkpoints, RewindError("a spike"))
    assert samples.asked == [(0, 0), (4, 40)]


def test_too_often_is_an_end_and_other_errors_are_what_they_were(tmp_path: Path) -> None:
    with pytest.raises(RewindError) as caught:
        fail(Samples(allows=False), Checkpoints(tmp_path, keep_last=1), RewindError("a spike"))
    assert "a spike\nThe run has gone back to the base model as often as train.max_rewinds" in caught.value.told()
    samples = Samples()
    checkpoints = Checkpoints(tmp_path / "without", keep_last=1)
    (checkpoints.begin(1, ["actor"])["actor"] / "weights").write_text("some")
    checkpoints.commit(1, {"data": {"decisions": None}})
    with pytest.raises(RewindError) as caught:
        fail(samples, checkpoints, RewindError("a spike"))
    assert "the checkpoint of step 1: it was committed without a journal" in caught.value.told()
    with pytest.raises(GradientError):
        fail(samples, Checkpoints(tmp_path, keep_last=1), GradientError("a spike"))
    assert samples.asked == []


def test_the_run_is_made_again_and_that_is_no_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recoveries = Recoveries(0, tmp_path / METRICS_FILE)
    lives: list[bool] = []

    def life(again: bool) -> None:
        recoveries.tell()
        lives.append(again)
        if not again:
            raise RewoundError("rewind: back")

    live(recoveries, life)
    assert lives == [False, True] and recoveries.total == 0 and caplog.messages == ["rewind: back"]
