"""The user's own writer: what it gets, and that nothing it does stops or holds up a run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.writer import KEY
from megarl.report import own_writer
from megarl.report.own_writer import OwnWriter
from megarl.report.writers import open_writers
from tests.report.test_writers import recipe

HERE = "tests.report.test_own_writer"


class Kept:
    """Keeps what it is given; the last one made is `last`."""

    last: Kept

    def __init__(self, folder: Path, recipe: dict[str, Any], resumed_step: int | None, more: str = "more") -> None:
        Kept.last = self
        self.made = folder, recipe["train"]["steps"], resumed_step, more
        self.rows: list[Any] = []
        self.threads = {threading.current_thread().name}

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.rows.append((step, metrics))

    def close(self, failed: bool) -> None:
        self.rows.append(failed)


class Plain(Kept):
    """Asks for nothing, and does as `doing` says."""

    doing = ""
    going_on = threading.Event()

    def __init__(self) -> None:
        Plain.last = self
        self.rows = []
        self._do("making")

    def _do(self, what: str) -> None:
        if Plain.doing == f"{what} fails":
            raise RuntimeError("no such server")
        if Plain.doing == f"{what} exits":
            sys.exit(3)
        if Plain.doing == f"{what} hangs":
            Plain.going_on.wait(30)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._do("writing")
        self.rows.append((step, metrics))

    def close(self, failed: bool) -> None:
        self._do("closing")
        self.rows.append(failed)


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(own_writer, "START_S", 0.2)
    monkeypatch.setattr(own_writer, "FINISH_S", 0.2)
    Plain.going_on.clear()

    def does(what: str) -> None:
        monkeypatch.setattr(Plain, "doing", what)

    yield does
    Plain.going_on.set()


@pytest.mark.parametrize("failed", [False, True])
def test_it_gets_every_step_in_order_and_in_one_thread(failed: bool, tmp_path: Path) -> None:
    asked = recipe(tensorboard=False, writer=f"{HERE}:Kept")
    writers = open_writers(tmp_path, asked, resumed_step=2)
    for step in (3, 4):
        writers.write(step, {"reward/mean": step / 8})
    writers.close(failed)
    assert Kept.last.made == (tmp_path, 3, 2, "more")
    assert Kept.last.rows == [(3, {"reward/mean": 0.375}), (4, {"reward/mean": 0.5}), failed]
    assert Kept.last.threads == {KEY}


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("making fails", "could not start: RuntimeError: no such server"),
        ("making exits", "could not start: SystemExit: 3"),
        ("making hangs", "was not ready within 0.2 s"),
    ],
)
def test_one_that_cannot_be_made_is_refused_but_not_where_nobody_reads_it(
    does: str, told: str, doing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    doing(does)
    asked = recipe(tensorboard=False, writer=f"{HERE}:Plain")
    with pytest.raises(UserError, match=rf"{told}. Mend it, or leave report.writer out"):
        open_writers(tmp_path, asked)
    assert list(tmp_path.iterdir()) == []
    writers = open_writers(tmp_path, asked, resumed_step=0, recovered=True)
    writers.write(1, {"reward/mean": 1.0})
    writers.close()
    assert f"{told}: the run goes on without it" in caplog.text and Plain.last.rows == []


@pytest.mark.parametrize("does", ["writing fails", "writing exits"])
def test_one_that_fails_gets_no_more_and_is_told_of_once(
    does: str, doing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = OwnWriter(f"{HERE}:Plain", tmp_path, {}, None)
    writer.write(1, {"reward/mean": 1.0})
    _until(lambda: len(Plain.last.rows) == 1)
    doing(does)
    for step in (2, 3):
        writer.write(step, {"reward/mean": 1.0})
    writer.close()
    assert [row[0] for row in Plain.last.rows] == [1], "nor is it closed"
    assert caplog.text.count("the run goes on without it") == 1 and "failed at step 2" in caplog.text
    assert ("no such server" in caplog.text) == (does == "writing fails")


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("writing hangs", "has not written everything within 0.2 s"),
        ("closing hangs", "has not written everything within 0.2 s"),
        ("closing fails", "failed as it was closed"),
    ],
)
def test_one_that_hangs_holds_up_no_step_and_the_end_no_longer_than_it_says(
    does: str, told: str, doing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    doing(does)
    writer, began = OwnWriter(f"{HERE}:Plain", tmp_path, {}, None), time.monotonic()
    for step in range(100):
        writer.write(step, {"reward/mean": 1.0})
    assert time.monotonic() - began < 5
    writer.close()
    assert told in caplog.text and time.monotonic() - began < 10


def _until(true: Any) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
