"""The journal's files: what is read is what was written, groups are whole, and damage is named and passed over."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megarl.rollout.journal as module
from megarl.core.types import Prompt, Sample, Status, VersionSpan
from megarl.data.blocks import laid, sample_block
from megarl.rollout.attempt import Attempt, failed_sample
from megarl.rollout.journal import (
    SELECT,
    Journal,
    JournalError,
    Written,
    forget,
    forget_groups,
    forget_others,
    steps_of,
)
from megarl.rollout.journal_rows import SINCE, _crc
from megarl.rollout.tasks import GroupTask
from megarl.serving.sampling import Sampling
from tests.rollout.samples import make_prompt
from tests.support.sqlite_files import commits

T = TypeVar("T")
PROMPT = make_prompt("p3")
TASK = GroupTask(group=7, row=3, step=2, first=4, count=2, greedy=True)


def sample(
    index: int, *, prompt: Prompt = PROMPT, tokens: int = 3, reward: float = 0.5, routed: bool = False
) -> Sample:
    rng = np.random.default_rng(index)
    mask = np.ones(tokens, np.uint8)
    mask[1:-1] = rng.integers(0, 2, max(0, tokens - 2))
    return laid(
        Sample(
            id=f"2/{prompt.id}/{index}",
            group_id=f"2/{prompt.id}",
            prompt=prompt,
            response_ids=rng.integers(0, 2**31 - 1, tokens, np.int32),
            response_text="möglich \ud800"[: 8 - index % 2],
            loss_mask=mask,
            rollout_logprobs=-rng.random(tokens).astype(np.float32),
            versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, tokens)),
            status=Status.COMPLETED,
            reward=reward,
            reward_parts={"exact": 0.25, "judge": None},
            grade_failure="judge: no answer" if index % 2 else None,
            metadata={"turns": index},
            numbers={"turns": 2.0, "by/solved": float(index)},
            routing=rng.integers(0, 9, (len(prompt.token_ids) + tokens - 1, 6)).astype(np.int16) if routed else None,
        )
    )


def group() -> Written:
    return Written([sample(0), failed_sample(Attempt(PROMPT, Sampling(8), 1, "train", 2, 5), "gone")], [sample(2)])


def journaling(folder: Path, call: Callable[[Journal], Awaitable[T]], patience_s: float = 0.0) -> T:
    """One process's life."""

    async def go() -> T:
        journal = Journal(folder, patience_s)
        try:
            return await call(journal)
        finally:
            await journal.close()

    return asyncio.run(go())


def write(folder: Path, task: GroupTask = TASK, written: Written | None = None) -> None:
    journaling(folder, lambda journal: journal.add(task, PROMPT, written or group()))


def find(folder: Path, task: GroupTask = TASK, prompt: Prompt = PROMPT) -> Written | None:
    return journaling(folder, lambda journal: journal.find(task, prompt))


def assert_same(one: Sample, other: Sample) -> None:
    for name in ("response_ids", "loss_mask", "rollout_logprobs"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()
    assert one.prompt.token_ids.tolist() == other.prompt.token_ids.tolist() and one.prompt.text == other.prompt.text
    assert (one.routing is None) == (other.routing is None)
    if one.routing is not None and other.routing is not None:
        assert one.routing.shape == other.routing.shape and one.routing.tobytes() == other.routing.tobytes()
    for name in (
        "id",
        "group_id",
        "versions",
        "status",
        "reward_parts",
        "grade_failure",
        "metadata",
        "numbers",
        "shown",
    ):
        assert getattr(one, name) == getattr(other, name)
    assert one.reward == other.reward or np.isnan([one.reward, other.reward]).all()
    assert one.response_text.encode(errors="replace") == other.response_text.encode(errors="replace")
    # It goes into a block as it lies.
    at, weights = np.zeros(1, np.int64), np.ones(1, np.float32)
    blocks = [sample_block([each], at, weights).memories[0].tobytes() for each in (one, other)]
    assert blocks[0] == blocks[1]


def test_half_a_character_in_a_conversation_costs_nothing_but_itself(tmp_path: Path) -> None:
    made = Written(
        [replace(sample(0), metadata={"messages": [{"role": "user", "content": "a\ud800"}]}), sample(1)], [sample(2)]
    )
    write(tmp_path, written=made)
    found = find(tmp_path)
    assert found is not None and found.samples[0].metadata == {"messages": [{"role": "user", "content": "a?"}]}


@pytest.mark.parametrize("where", ["grade_failure", "id", "prompt"])
def test_half_a_character_anywhere_else_keeps_nobody_waiting(tmp_path: Path, where: str) -> None:
    """An error of a user's grader may quote one."""
    said = replace(PROMPT, text="a\ud800") if where == "prompt" else "a\ud800/0"
    write(tmp_path, written=Written([replace(sample(0), **{where: said}), sample(1)], [sample(2)]))
    found = find(tmp_path)
    assert found is not None
    [first, _], read = found.samples, getattr(found.samples[0], where)
    assert (read.text if where == "prompt" else read).startswith("a?") and first.reward == 0.5


def test_what_nobody_foresaw_keeps_nobody_waiting(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"cannot be written: .*too large"):
        write(tmp_path, replace(TASK, row=2**70))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    made = group()
    write(tmp_path, written=made)
    found = find(tmp_path)
    assert found is not None and (len(found.samples), len(found.greedy)) == (2, 1)
    for mine, theirs in zip([*made.samples, *made.greedy], [*found.samples, *found.greedy], strict=True):
        assert_same(mine, theirs)
    assert find(tmp_path, replace(TASK, first=0)) is None
    assert find(tmp_path, replace(TASK, step=3)) is None
    assert steps_of(tmp_path) == [2]


@settings(max_examples=30)
@example(tokens=1, reward=-0.0, routed=False, own=False)
@given(
    tokens=st.integers(1, 40), reward=st.floats(width=64, allow_infinity=False), routed=st.booleans(), own=st.booleans()
)
def test_any_sample_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, reward: float, routed: bool, own: bool
) -> None:
    """own: an answer to another prompt than the row's, that was made of it."""
    folder = tmp_path_factory.mktemp("journal")
    prompt = replace(PROMPT, token_ids=np.array([9, 9, 9, 4], np.int32), text="another") if own else PROMPT
    made = sample(1, prompt=prompt, tokens=tokens, reward=reward, routed=routed)
    task = replace(TASK, count=1, greedy=False)
    write(folder, task, Written([made], []))
    found = find(folder, task)
    assert found is not None
    assert_same(made, found.samples[0])


def showing(index: int, *shown: tuple[int, bytes]) -> Sample:
    return replace(sample(index), shown=shown)


def test_images_that_environments_showed_come_back_and_are_written_once(tmp_path: Path) -> None:
    """They are nowhere else."""
    one, two = b"one" * 100, b"two" * 100
    write(tmp_path, written=Written([showing(0, (0, one), (2, two)), showing(1)], [showing(2, (1, two))]))
    write(tmp_path, replace(TASK, row=4), Written([showing(0, (0, one)), showing(1)], [showing(2)]))
    found, other = find(tmp_path), find(tmp_path, replace(TASK, row=4))
    assert found is not None and other is not None
    assert [each.shown for each in (*found.samples, *found.greedy)] == [((0, one), (2, two)), (), ((1, two),)]
    assert other.samples[0].shown == ((0, one),)
    # Samples of a group share the bytes, as those did that were written.
    assert found.samples[0].shown[1][1] is found.greedy[0].shown[0][1]
    assert sum(path.read_bytes().count(one) for path in tmp_path.glob("*.sqlite")) == 2, "one in each process' file"


@pytest.mark.parametrize("damage", ["update images set png = x'00'", "delete from images", "drop table images"])
def test_a_group_whose_images_are_damaged_is_made_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = Written([showing(0, (0, b"one")), showing(1)], [showing(2)])
    write(tmp_path, written=made)
    assert find(tmp_path) is not None
    [path] = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(damage)
    assert find(tmp_path) is None and "cannot be read, and is made anew" in caplog.text


def test_anybody_can_read_it(tmp_path: Path) -> None:
    write(tmp_path)
    [path] = tmp_path.glob("*.sqlite")
    rows = sqlite3.connect(path).execute("select id, reward, text, record, prompt_tokens from samples").fetchall()
    assert [row[0] for row in rows] == ["2/p3/0", "2/p3/5", "2/p3/2"]
    tokens = np.frombuffer(rows[0][3], np.int32, count=len(rows[0][3]) // 9)
    assert tokens[rows[0][4] :].tolist() == group().samples[0].response_ids.tolist()


def test_what_an_older_megarl_wrote_is_read(tmp_path: Path) -> None:
    """Its table has fewer columns, and its checksums go over these."""
    write(tmp_path)
    [path] = tmp_path.glob("step_*.sqlite")
    with closing(sqlite3.connect(path)) as file, file:
        for name in SINCE:
            file.execute(f"alter table samples drop column {name}")
        file.row_factory = sqlite3.Row
        for number, *values, _ in file.execute("select rowid, * from samples").fetchall():
            file.execute("update samples set crc = ? where rowid = ?", (_crc(tuple(values)), number))
    found = find(tmp_path)
    assert found is not None
    for one, other in zip(found.samples, group().samples, strict=True):
        assert_same(one, other)


def test_a_group_is_found_without_a_look_at_the_others_of_its_step(tmp_path: Path) -> None:
    """A step of thousands of groups is read group by group."""
    write(tmp_path)
    with sqlite3.connect(next(tmp_path.glob("step_*.sqlite"))) as file:
        plan = " ".join(row[-1] for row in file.execute(f"explain query plan {SELECT}", (TASK.row, TASK.first)))
    assert "SEARCH samples USING INDEX" in plan, plan


def test_groups_that_finish_at_once_are_all_there(tmp_path: Path) -> None:
    tasks = [replace(TASK, row=row, step=1 + row % 7) for row in range(40)]

    async def call(journal: Journal) -> None:
        await asyncio.gather(*(journal.add(task, PROMPT, group()) for task in tasks))

    journaling(tmp_path, call)
    assert all(find(tmp_path, task) is not None for task in tasks)
    assert steps_of(tmp_path) == list(range(1, 8))


def test_groups_that_share_wait_for_the_disk_once(tmp_path: Path) -> None:
    """Each is written down when its `add` returns; the last one waits for no other."""
    tasks = [replace(TASK, row=row) for row in range(8)]

    async def call(journal: Journal) -> None:
        adding = []
        for task in tasks:
            adding.append(asyncio.create_task(journal.add(task, PROMPT, group(), shares=task is not tasks[-1])))
            assert not any(each.done() for each in adding)
            await asyncio.sleep(0.01)  # they finish one after the other
        await asyncio.gather(*adding)
        [path] = tmp_path.glob("*.sqlite")
        assert commits(path) == 1
        await journal.add(replace(TASK, row=9), PROMPT, group())
        assert commits(path) == 2

    journaling(tmp_path, call, patience_s=600)
    assert all(find(tmp_path, task) is not None for task in tasks)


def test_a_group_waits_for_others_no_longer_than_it_may(tmp_path: Path) -> None:
    journaling(tmp_path, lambda journal: journal.add(TASK, PROMPT, group(), shares=True), patience_s=0.01)
    assert find(tmp_path) is not None


def test_who_closes_waits_for_no_other_group(tmp_path: Path) -> None:
    async def call(journal: Journal) -> None:
        adding = asyncio.create_task(journal.add(TASK, PROMPT, group(), shares=True))
        await asyncio.sleep(0)
        await journal.close()
        assert adding.done()

    asyncio.run(call(Journal(tmp_path, patience_s=600)))
    assert find(tmp_path) is not None


def test_of_a_group_that_was_made_twice_the_last_counts(tmp_path: Path) -> None:
    for reward in (1.0, 2.0, 3.0):  # by three processes, and the last two by one
        write(tmp_path, written=Written([sample(0, reward=reward), sample(1)], [sample(2)]))

    async def twice(journal: Journal) -> None:
        for reward in (4.0, 5.0):
            await journal.add(TASK, PROMPT, Written([sample(0, reward=reward), sample(1)], [sample(2)]))

    journaling(tmp_path, twice)
    found = find(tmp_path)
    assert found is not None and found.samples[0].reward == 5.0


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("update samples set reward = 9 where position = 0", "the checksum of sample 2/p3/0 is another"),
        ("update samples set record = zeroblob(length(record)) where position = 1", "the checksum of sample 2/p3/5"),
        ("delete from samples where position = 1", "2 samples of 3"),
        ("drop table samples", "no such table"),
    ],
)
def test_what_is_damaged_is_named_and_made_anew(
    tmp_path: Path, damage: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    [path] = tmp_path.glob("*.sqlite")
    with sqlite3.connect(path) as file:
        file.execute(damage)
    assert find(tmp_path) is None
    assert told in caplog.text and path.name in caplog.text and "is made anew" in caplog.text


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_file_that_was_cut_short(tmp_path: Path, keep: float, caplog: pytest.LogCaptureFixture) -> None:
    """Others beside it are read."""
    write(tmp_path)
    [path] = tmp_path.glob("*.sqlite")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    assert find(tmp_path) is None
    assert path.name in caplog.text
    write(tmp_path)
    assert find(tmp_path) is not None


def test_flipped_bytes_are_never_taken_for_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    write(tmp_path)
    [path] = tmp_path.glob("*.sqlite")
    content = path.read_bytes()
    made, rng = group(), np.random.default_rng(0)
    for at in rng.integers(0, len(content), 400):
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        found = find(tmp_path)
        for mine, theirs in zip(made.samples, found.samples if found else [], strict=False):
            assert_same(mine, theirs)


def test_rows_that_have_changed_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path)
    assert find(tmp_path, prompt=make_prompt("p4")) is None
    assert "answers another prompt than the row has now" in caplog.text


def test_a_disk_that_takes_nothing_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be")
    with pytest.raises(JournalError, match=r"cannot be written: .*Make room, or set train.journal to false"):
        write(tmp_path / "journal")


def test_a_file_that_somebody_reads_without_an_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook does that has fetched one row, or a replay that was stopped: the run goes on with another file."""
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    tasks = [replace(TASK, row=row) for row in range(3)]

    async def life(journal: Journal) -> None:
        await journal.add(tasks[0], PROMPT, group())
        with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as reader:
            rows = reader.execute("select * from samples")
            rows.fetchone()
            for task in tasks[1:]:
                await journal.add(task, PROMPT, group())
            rows.close()

    journaling(tmp_path, life)
    assert len(list(tmp_path.glob("*.sqlite"))) == 2
    assert all(find(tmp_path, task) is not None for task in tasks)


def test_samples_that_could_be_found_are_not_left_where_they_are_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as reader:
        rows = reader.execute("select * from samples")
        rows.fetchone()
        with pytest.raises(
            JournalError, match=r"cannot be removed: database is locked. End what else has the file open"
        ):
            forget_others(tmp_path, TASK.step, ())
        rows.close()
    forget_others(tmp_path, TASK.step, ())
    assert find(tmp_path) is None


def test_only_what_is_known_of_a_step_and_those_after_it_stays(tmp_path: Path) -> None:
    tasks = [replace(TASK, row=row, step=step) for step in (1, 2, 3) for row in (3, 8)]
    for task in tasks:
        write(tmp_path, task)
    (tmp_path / "step_000003-damaged.sqlite").write_bytes(b"not SQLite at all" * 100)
    forget_others(tmp_path, 2, {(3, 2, TASK.first), (8, 3, TASK.first), (8, 2, TASK.first + 1), (3, 4, TASK.first)})
    left = [(task.step, task.row) for task in tasks if find(tmp_path, task) is not None]
    assert left == [(1, 3), (1, 8), (2, 3), (3, 8)]


def test_steps_are_forgotten(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, replace(TASK, step=step))
    forget(tmp_path, before=3)
    assert steps_of(tmp_path) == [3, 4, 5]
    forget(tmp_path, after=4)
    assert steps_of(tmp_path) == [3, 4]
    assert {path.name[: len("step_000000")] for path in tmp_path.iterdir()} == {"step_000003", "step_000004"}


def test_what_only_has_the_name_of_such_a_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 3):
        write(tmp_path, replace(TASK, step=step))
    strangers = {"step_old-x.sqlite", "step_000002-aa.sqlite", "step_000009-bb.sqlite"}
    (tmp_path / "step_old-x.sqlite").touch()
    for name in strangers - {"step_old-x.sqlite"}:
        (tmp_path / name).mkdir()
    assert steps_of(tmp_path) == [2, 3] and find(tmp_path) is not None
    known = (TASK.row, 2, TASK.first)
    forget_groups(tmp_path, [known])
    forget_others(tmp_path, 1, {known})
    forget(tmp_path, before=3)
    forget(tmp_path, after=2)
    assert {path.name for path in tmp_path.iterdir()} == strangers and not caplog.text
