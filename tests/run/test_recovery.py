"""Which deaths a run recovers from, and how often: by hand. That weights stay the same: tests/end_to_end/test_journal.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.errors import (
    CoordinatorDiedError,
    DeadlineError,
    GivenUpError,
    MegarlError,
    UserError,
    WorkerDiedError,
)
from megarl.core.exit_codes import FAULT
from megarl.report.history import METRICS_FILE
from megarl.run.recovery import Recoveries, live


class Lives:
    """A run whose lives end by these errors, after as many steps; None: that is its end."""

    def __init__(
        self, folder: Path, *ends: tuple[int, BaseException | None], most: int = 2, starts: bool = True
    ) -> None:
        self.recoveries = Recoveries(most, folder / METRICS_FILE)
        self.stop: Any = SimpleNamespace(asked=False)
        self.seen: list[tuple[bool, int]] = []  # whether it goes on; recoveries so far
        self._ends, self._starts = iter(ends), starts

    def run(self) -> list[tuple[bool, int]]:
        live(self.recoveries, self._life)
        return self.seen

    def _life(self, again: bool) -> None:
        assert self.recoveries.again == again
        self.seen.append((again, self.recoveries.total))
        steps, error = next(self._ends)
        if self._starts:
            self.recoveries.begun(self.stop)
        self.recoveries.history.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(steps + 1)))
        if error is not None:
            raise error


DIED = "rank 0 died"


def test_a_run_goes_on_as_long_as_it_comes_further(tmp_path: Path) -> None:
    ends = [*((step, WorkerDiedError(DIED)) for step in (1, 2, 3, 4)), (5, None)]
    assert Lives(tmp_path, *ends).run() == [(False, 0), (True, 1), (True, 2), (True, 3), (True, 4)]


def test_so_many_deaths_without_a_further_step_end_it(tmp_path: Path) -> None:
    # The second life trims what is after the checkpoint, and comes no further than the first.
    lives = Lives(tmp_path, *((steps, WorkerDiedError(DIED)) for steps in (4, 2, 4)))
    with pytest.raises(WorkerDiedError) as caught:
        lives.run()
    assert len(lives.seen) == 3 and caught.value.told() == (
        f"{DIED}\nIt was recovered 2 times in vain: no step was done in between."
    )


@pytest.mark.parametrize(
    "error", [GivenUpError("too often"), DeadlineError("late"), MegarlError("a bug"), UserError("wrong")], ids=type
)
def test_what_is_no_single_death_ends_it(tmp_path: Path, error: MegarlError) -> None:
    with pytest.raises(type(error)):
        Lives(tmp_path, (1, error)).run()


def test_deaths_that_end_it_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError):
        Lives(tmp_path, (1, WorkerDiedError(DIED)), most=0).run()
    with pytest.raises(WorkerDiedError):  # a server that does not start, say: of what it was given
        Lives(tmp_path, (1, WorkerDiedError(DIED)), starts=False).run()
    gone = WorkerDiedError("with its node")
    gone.recoverable = False
    with pytest.raises(WorkerDiedError):
        Lives(tmp_path, (1, gone)).run()
    stopped = Lives(tmp_path, (1, WorkerDiedError(DIED)))
    stopped.stop.asked = True
    with pytest.raises(WorkerDiedError):
        stopped.run()


def test_without_its_coordinator_it_goes_on(tmp_path: Path) -> None:
    assert Lives(tmp_path, (0, CoordinatorDiedError("gone")), (1, None)).run() == [(False, 0), (True, 1)]


def test_what_a_recovered_run_refuses_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Lives(tmp_path, (1, WorkerDiedError(DIED)), (1, UserError("reward.fn has changed"))).run()
    assert caught.value.exit_code == FAULT


def test_why_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recoveries = Recoveries(1, tmp_path / METRICS_FILE)
    recoveries.tell()
    recoveries.begun(Lives(tmp_path).stop)
    assert recoveries.another(WorkerDiedError(DIED))
    for _ in range(2):
        recoveries.tell()
    [line] = caplog.messages
    assert line == f"recovery 1: the run goes on from its last checkpoint and journal. {DIED}"
