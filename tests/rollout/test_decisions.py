"""Decisions written down: they come back in their order, up to the first that is damaged, and from where a run goes on."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megarl.rollout import decisions as module
from megarl.rollout.decisions import FILE, Decision, Decisions, forget_decisions, read_decisions
from megarl.rollout.journal import JournalError
from megarl.rollout.ledger import Key

A, B, C = (0, 1, 0), (1, 1, 0), (2, 2, 4)


def life(folder: Path | None, call: Callable[[Decisions], None]) -> Decisions:
    """One life of a run."""

    async def go() -> Decisions:
        decisions = Decisions(folder)
        call(decisions)
        await decisions.close()
        return decisions

    return asyncio.run(go())


def first(decisions: Decisions) -> None:
    decisions.add("admitted", 1, [A, B])
    decisions.add("late", 1, [])  # nothing to write down
    decisions.add("taken", 1, [A])
    decisions.add("admitted", 1, [C])
    decisions.add("taken", 2, [B, C])


def repeated(folder: Path | None, after: int | None = 0, step: int = 9) -> list[tuple[int, str, int, tuple[Key, ...]]]:
    found: list[Decision] = []

    def call(decisions: Decisions) -> None:
        decisions.resume(after)
        while (decision := decisions.again(step)) is not None:
            found.append(decision)

    life(folder, call)
    return [(each.number, each.kind, each.step, each.groups) for each in found]


ALL = [(1, "admitted", 1, (A, B)), (2, "taken", 1, (A,)), (3, "admitted", 1, (C,)), (4, "taken", 2, (B, C))]


def test_they_come_back_from_where_a_run_goes_on(tmp_path: Path) -> None:
    assert life(tmp_path, first).last == 4
    assert repeated(tmp_path) == ALL
    assert repeated(tmp_path, after=2) == ALL[2:]
    assert repeated(tmp_path, step=1) == ALL[:3]  # those of a later step wait for it
    assert repeated(tmp_path, after=4) == []


def test_a_run_that_says_nothing_repeats_from_the_beginning(tmp_path: Path) -> None:
    life(tmp_path, first)
    decisions = Decisions(tmp_path)
    assert decisions.repeating and decisions.last == 0


def test_what_is_decided_otherwise_takes_the_place_of_the_rest(tmp_path: Path) -> None:
    life(tmp_path, first)

    def otherwise(decisions: Decisions) -> None:
        assert decisions.again(9) is not None
        assert decisions.again(9) is not None
        decisions.leave("for a test", 1)
        assert decisions.again(9) is None
        decisions.add("taken", 2, [B])

    assert life(tmp_path, otherwise).last == 3
    assert repeated(tmp_path) == [*ALL[:2], (3, "taken", 2, (B,))]


def test_a_step_that_was_made_again_took_what_it_took_last(tmp_path: Path) -> None:
    def again(decisions: Decisions) -> None:
        decisions.add("taken", 1, [A])
        decisions.add("taken", 1, [B])

    life(tmp_path, again)
    assert repeated(tmp_path) == [(2, "taken", 1, (B,))]


@pytest.mark.parametrize(
    "damage", ["update decisions set step = 7 where number = 3", "delete from decisions where number = 3"]
)
def test_what_is_damaged_and_all_behind_it_is_decided_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    life(tmp_path, first)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute(damage)
    assert repeated(tmp_path) == ALL[:2]
    assert FILE in caplog.text and "after number 2 cannot be read" in caplog.text
    assert sqlite3.connect(tmp_path / FILE).execute("select count(*) from decisions").fetchone() == (2,)


def test_a_file_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_bytes(b"not SQLite at all" * 100)
    assert repeated(tmp_path) == []
    assert "is begun anew" in caplog.text
    life(tmp_path, first)
    assert repeated(tmp_path) == ALL


def test_what_somebody_else_holds_is_neither_passed_over_nor_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    life(tmp_path, first)
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("begin exclusive")
        with pytest.raises(JournalError, match=r"cannot be gone on with: database is locked.*end what else has"):
            read_decisions(tmp_path, 0)
        with pytest.raises(JournalError, match="database is locked"):
            forget_decisions(tmp_path, 2)
    assert repeated(tmp_path) == ALL


def test_a_life_without_a_journal_leaves_nothing_to_repeat(tmp_path: Path) -> None:
    life(tmp_path, first)
    assert life(None, first).last is None
    assert repeated(tmp_path, after=None) == []
    assert repeated(None) == []


def test_what_another_is_writing_is_waited_for(tmp_path: Path) -> None:
    async def go() -> None:
        decisions, disk = Decisions(tmp_path), threading.Event()
        slow = asyncio.get_running_loop().run_in_executor(decisions._thread, disk.wait)
        decisions.add("taken", 1, [A])
        writes = [asyncio.create_task(decisions.write()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in writes)
        disk.set()
        await writes[1]
        assert len(read_decisions(tmp_path, 0)) == 1
        await asyncio.gather(slow, *writes)
        await decisions.close()

    asyncio.run(go())


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        life(tmp_path / "journal", first)


def harmed(content: bytes, rng: np.random.Generator) -> bytes:
    """A file's content cut short, or with a bit flipped, somewhere."""
    at = int(rng.integers(len(content)))
    if rng.integers(2):
        return content[:at]
    return bytes([*content[:at], content[at] ^ 1 << int(rng.integers(8)), *content[at + 1 :]])


def test_of_a_file_that_is_harmed_anywhere_only_what_was_decided_is_repeated(tmp_path: Path) -> None:
    """A beginning of it; and the run goes on, and writes down what it decides."""
    life(tmp_path, first)
    whole, rng = (tmp_path / FILE).read_bytes(), np.random.default_rng(1)
    repeats = set()
    for _ in range(60):
        (tmp_path / FILE).write_bytes(harmed(whole, rng))
        found = repeated(tmp_path)
        assert found == ALL[: len(found)]
        repeats.add(len(found))

        def on(decisions: Decisions, known: int = len(found)) -> None:
            decisions.resume(known)
            decisions.add("dull", 3, [A])

        life(tmp_path, on)
        assert repeated(tmp_path) == [*found, (len(found) + 1, "dull", 3, (A,))]
    assert {0, len(ALL)} <= repeats


def _stays(folder: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """Groups that stay in the journal where nothing is followed behind this decision."""
    stays: list[set[Key]] = []
    monkeypatch.setattr(module, "forget_others", lambda folder, step, keys: stays.append(keys))

    def leave(decisions: Decisions) -> None:
        decisions.resume(after)
        decisions.leave("for a test", 1)

    life(folder, leave)
    [kept] = stays
    return kept


def test_groups_that_a_decision_speaks_of_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that it only took: they were admitted by a decision that is not there any more."""
    life(tmp_path, lambda decisions: decisions.add("taken", 1, [A, B]))
    assert _stays(tmp_path, 1, monkeypatch) == {A, B}


def test_groups_stay_whose_decisions_are_newer_than_damaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Key] = [(row, 1, 0) for row in range(1000)]

    def many(decisions: Decisions) -> None:
        for key in keys:
            decisions.add("admitted", 1, [key])

    life(tmp_path, many)
    content, page = bytearray((tmp_path / FILE).read_bytes()), 4096
    second = len(content) // page // 2 * page
    content[second : second + page] = bytes(page)
    (tmp_path / FILE).write_bytes(content)
    assert {*keys[-200:]} <= _stays(tmp_path, 1000, monkeypatch) < {*keys}


def test_what_no_life_goes_on_from_is_removed_and_that_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        decisions = Decisions(tmp_path)
        first(decisions)
        await decisions.forget(2, [])
        await decisions.close()

    asyncio.run(go())
    assert repeated(tmp_path, after=2) == ALL[2:]
    assert read_decisions(tmp_path, 0) == read_decisions(tmp_path, 1) == []
    assert not caplog.text
    assert repeated(tmp_path, after=0) == []  # from the beginning, where the checkpoints are gone: all is decided anew
    life(tmp_path, first)
    assert repeated(tmp_path) == ALL


def test_a_disk_that_forgets_nothing_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).mkdir()
    asyncio.run(Decisions(tmp_path).forget(2, []))
    assert "decisions that nobody needs any more stay for now: unable to open" in caplog.text


def test_groups_that_waited_where_decisions_are_forgotten_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked for while a checkpoint's steps were made again, and nothing else speaks of them."""
    known: list[set[Key]] = []
    monkeypatch.setattr(module, "forget_others", lambda folder, step, groups: known.append(set(groups)))

    async def go() -> None:
        decisions = Decisions(tmp_path)
        decisions.resume(0)
        first(decisions)
        await decisions.write()
        await decisions.forget(3, [list(C)])
        decisions.leave("it ends", 2)
        await decisions.forget(4, [])
        decisions._left = False
        decisions.leave("it ends", 2)
        await decisions.close()

    asyncio.run(go())
    assert known == [{B, C}, {C}]


def test_what_waited_for_steps_that_are_over_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit names a few: they would be all that a long run has ever asked for."""
    known: list[set[Key]] = []
    monkeypatch.setattr(module, "forget_others", lambda folder, step, groups: known.append(set(groups)))

    async def go() -> None:
        decisions = Decisions(tmp_path)
        decisions.resume(0)
        first(decisions)
        await decisions.write()
        await decisions.forget(4, [list(B), list(C)])  # in step 2: nobody asks for what was meant for step 1
        decisions.leave("it ends", 2)
        await decisions.close()

    asyncio.run(go())
    assert known == [{C}]
