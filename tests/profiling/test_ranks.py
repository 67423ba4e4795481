"""How a profile of several ranks ends where one of them fails, and where it is killed itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.core.errors import DeadlineError, WorkerDiedError
from megarl.profiling import ranks
from tests.profiling import work


def test_what_the_first_rank_measured_is_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "measure", work.own_number)
    measured = ranks.measure_ranks(work.job(60.0), tmp_path / "log")
    assert (measured.world_size, measured.raw.flops) == (2, 0.0)


@pytest.mark.parametrize(
    ("what", "deadline_s", "kind", "says"),
    [
        (work.first_waits_for_second_which_fails, 60.0, ValueError, "no memory left"),
        (work.stuck, 0.5, DeadlineError, "A profile of 2 ranks was not done after 0.5 s"),
        (
            work.second_dies,
            60.0,
            WorkerDiedError,
            "A rank of a profile of 2 ranks died: exit code 3\n.*\nno room for me",
        ),
    ],
)
def test_what_ends_a_profile_is_said_at_once(
    what: object,
    deadline_s: float,
    kind: type[Exception],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks, "measure", what)
    began = time.monotonic()
    with pytest.raises(kind, match=says):
        ranks.measure_ranks(work.job(deadline_s), tmp_path / "log")
    assert time.monotonic() - began < 50 and capfd.readouterr() == ("", "")


def test_no_rank_outlives_a_profile_that_is_killed() -> None:
    code = (
        "from pathlib import Path; from megarl.profiling import ranks; from tests.profiling import work\n"
        "ranks.measure = work.named_and_stuck\n"
        "if __name__ == '__main__': ranks.measure_ranks(work.job(600.0, 1), Path('/dev/stdout'))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as profile:
        assert profile.stdout is not None
        rank = psutil.Process(int(profile.stdout.readline()))
        profile.kill()
        rank.wait(timeout=30)
