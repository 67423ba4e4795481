"""Finished groups, written down before they count: a run that was killed trains on these, and does not sample others.

One SQLite file for each step that groups are meant for and each process that makes them, in `journal/` of the run's folder:

    sqlite3.connect("runs/x/journal/step_000012-5e0c91d2.sqlite").execute("select * from samples").fetchall()

A group is there as a whole or not at all. Every sample has a checksum; what is damaged is named, and is as good as absent. Not
for what was decided about groups (decisions.py), nor for what a row of the table says of a sample (journal_rows.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.core.types import Prompt, Sample
from megarl.rollout.journal_rows import COLUMNS, Damage, digest, digests_of, read_sample, row_of
from megarl.rollout.tasks import GroupTask

log = get_logger(__name__)

JOURNAL = "journal"  # in the run's folder
BUSY_S = 10.0  # that whoever reads or writes a file waits for others who do
# Primary codes of SQLite's errors that say nothing of what is in a file.
OF_THE_SYSTEM = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
OPEN_FILES = 4  # that one process writes at a time: steps under way
FILES, OF_STEP = "step_*-*.sqlite", re.compile(r"step_(\d+)-")  # names of files, and the step in them
GREEDY = -1  # the position of a greedy answer; others count from 0

TABLE = f"create table if not exists samples ({', '.join(COLUMNS)})"
# A step is read group by group: without it each would look at all samples of the step.
INDEX = "create index if not exists by_group on samples (row, first)"
# What environments showed, which is nowhere else: each file once, however many samples have it.
IMAGES = "create table if not exists images (digest text primary key, png blob)"
INSERT_IMAGE = "insert or ignore into images values (?, ?)"
SELECT_IMAGE = "select png from images where digest = ?"
INSERT = f"insert into samples values ({', '.join('?' * len(COLUMNS))})"
# Blobs of other rows are not read.
SELECT = "select * from samples where row = ? and first = ? order by written, position"

Value = str | int | float | bytes | None


class JournalError(MegarlError):
    """A finished sample cannot be written down."""


@dataclass(frozen=True)
class Written:
    """A group as it was written down. at: seconds since 1970."""

    samples: list[Sample]
    greedy: list[Sample]
    at: float = 0.0


@dataclass
class _Waiting:
    """Rows of a group that are to be written, with the images that environments showed, and who waits for that."""

    step: int
    rows: list[tuple[Value, ...]]
    images: dict[str, bytes]  # by digest
    shares: bool
    written: asyncio.Future[None]


class Journal:
    """One process's way to the journal: its own files to write, everybody's to read.

    folder: made with the first group. patience_s: that a group which may share a wait for the disk waits for others.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        self._folder, self._patience_s = folder, patience_s
        self._hurried = asyncio.Event()  # something waits that waits for no other
        self._token = secrets.token_hex(4)  # nobody writes into the files of a process that may still be alive
        self._thread = ThreadPoolExecutor(1, "journal")
        self._open: dict[int, sqlite3.Connection] = {}
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self.spent_s = 0.0  # writing, so far, with what is waited for the disk

    async def add(self, task: GroupTask, prompt: Prompt, group: Written, *, shares: bool = False) -> None:
        """Write a finished group down; it is on the disk when this returns. Raises JournalError.

        prompt: of its row. shares: others will finish, with which it may wait for the disk; the last of them says off.
        """
        written, numbered = time.time(), [*enumerate(group.samples), *((GREEDY, each) for each in group.greedy)]
        rows = [row_of(task, prompt, position, sample, len(numbered), written) for position, sample in numbered]
        images = {id(image): image for _, sample in numbered for _, image in sample.shown}  # samples share the bytes
        files = {digest(image): image for image in images.values()}
        waiting = _Waiting(task.step, rows, files, shares, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not shares:
            self._hurried.set()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await waiting.written

    async def find(self, task: GroupTask, prompt: Prompt) -> Written | None:
        """A group as it was written down, by whichever process; None where it was not, or cannot be read: that is told.

        prompt: of the task's row. One that was written twice is what was written last.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._find, task, prompt)

    async def close(self) -> None:
        """Finish writing."""
        self._patience_s = 0.0
        self._hurried.set()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_files, 0)
        self._thread.shutdown()

    async def _write_all(self) -> None:
        """Write what waits, and what comes meanwhile: groups that finish close together share a wait for the disk."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            if self._patience_s and all(each.shares for each in self._waiting):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurried.wait(), self._patience_s)
            self._hurried.clear()
            batch, self._waiting = self._waiting, []
            try:
                await loop.run_in_executor(self._thread, self._write, batch)
            except Exception as error:  # of whatever kind: whoever waits would wait for ever
                failure = JournalError(
                    f"The journal in {self._folder} cannot be written: {error}. Nothing that it has is lost. Make room, or set "
                    "train.journal to false, and go on with --resume."
                )
                failure.__cause__ = error
                for each in batch:
                    if not each.written.done():
                        each.written.set_exception(failure)
            else:
                for each in batch:
                    if not each.written.done():  # whoever waited may have been cancelled
                        each.written.set_result(None)
        self._writing = None

    def _write(self, batch: Sequence[_Waiting]) -> None:
        began = time.perf_counter()
        for step in dict.fromkeys(each.step for each in batch):
            rows = [row for each in batch if each.step == step for row in each.rows]
            images = {name: image for each in batch if each.step == step for name, image in each.images.items()}
            try:
                self._insert(step, rows, images)
            except sqlite3.OperationalError as error:
                if code_of(error) != sqlite3.SQLITE_BUSY:
                    raise
                # Somebody reads the file, and does not come to an end: a run does not wait for that.
                log.warning(
                    "the journal's file of step %d is read by somebody else for long: another one is begun", step
                )
                self._close_files(0)
                self._token = secrets.token_hex(4)
                self._insert(step, rows, images)
        self.spent_s += time.perf_counter() - began

    def _insert(self, step: int, rows: Sequence[tuple[Value, ...]], images: Mapping[str, bytes]) -> None:
        with self._file(step) as file:  # one transaction; a new file's table and index are made in it
            file.execute("begin")
            file.execute(TABLE)
            file.execute(INDEX)
            file.executemany(INSERT, rows)
            if images:
                file.execute(IMAGES)
                file.executemany(INSERT_IMAGE, images.items())

    def _file(self, step: int) -> sqlite3.Connection:
        if step not in self._open:
            self._close_files(OPEN_FILES - 1)
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"step_{step:06d}-{self._token}.sqlite"
            self._open[step] = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            # A write-ahead log would want shared memory, which no network disk has.
            self._open[step].execute("pragma journal_mode = truncate")
            self._open[step].execute("pragma synchronous = full")
        return self._open[step]

    def _close_files(self, keep: int) -> None:
        while len(self._open) > keep:
            self._open.pop(min(self._open)).close()

    def _find(self, task: GroupTask, prompt: Prompt) -> Written | None:
        found: list[Written] = []
        for _, path in _files(self._folder, _of_step(task.step)):
            try:
                group = _read(path, task, prompt)
            except (
                sqlite3.Error,
                OSError,
                ValueError,
                TypeError,
                Damage,
            ) as error:  # text that is none is a ValueError
                log.warning("%s: a group of step %d cannot be read, and is made anew: %s", path, task.step, error)
                continue
            found += [group] if group is not None else []
        return max(found, key=lambda group: group.at, default=None)


def _read(path: Path, task: GroupTask, prompt: Prompt) -> Written | None:
    """The group as this file has it; None where it does not. Raises sqlite3.Error, Damage."""
    with path.open("rb") as raw:
        header = raw.read(32)
    # SQLite takes pages that are missing for empty ones.
    if path.stat().st_size < int.from_bytes(header[16:18]) * int.from_bytes(header[28:32]) or len(header) < 32:
        raise Damage("the file was cut short")
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as file:
        file.row_factory = sqlite3.Row
        rows = [dict(row) for row in file.execute(SELECT, (task.row, task.first))]
        rows = [row for row in rows if row["written"] == rows[-1]["written"]]
        names = {name for row in rows for _, name in digests_of(row)}
        images = {name: png for name in names for (png,) in file.execute(SELECT_IMAGE, (name,))}
    if not rows:
        return None
    greedy = [row for row in rows if row["position"] == GREEDY]
    # A replay may have no use for greedy answers that the run had.
    if len(rows) != rows[0]["size"] or len(rows) - len(greedy) != task.count or len(greedy) < task.greedy:
        raise Damage(f"{len(rows)} samples of {rows[0]['size']}, where {task.count + task.greedy} are asked for")
    samples = [read_sample(row, prompt, images) for row in rows if row["position"] != GREEDY]
    return Written(samples, [read_sample(row, prompt, images) for row in greedy[: task.greedy]], rows[0]["written"])


def steps_of(folder: Path) -> list[int]:
    """Steps that the journal has groups of, in order."""
    return sorted({step for step, _ in _files(folder)})


def forget(folder: Path, *, before: int | None = None, after: int | None = None) -> None:
    """Remove groups that were meant for steps before `before`, and for those after `after`."""
    for step, path in _files(folder, f"{FILES}*"):  # what SQLite keeps beside a file goes with it
        if (before is not None and step < before) or (after is not None and step > after):
            path.unlink(missing_ok=True)


def code_of(error: Exception) -> int:
    """SQLite's primary code of an error; 0 of others."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def forget_others(folder: Path, step: int, known: Collection[tuple[int, int, int]]) -> None:
    """Remove groups that were meant for this step or later ones, and are none of these. known: row, step, first sample.

    Raises JournalError where they stay, and could be found: what cannot be read is as good as removed.
    """
    for meant, path in _files(folder):
        if meant < step:
            continue
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_S)) as file, file:
                file.execute("create temp table known (row integer, first integer, primary key (row, first))")
                file.executemany(
                    "insert into known values (?, ?)", {(row, first) for row, at, first in known if at == meant}
                )
                file.execute("delete from samples where (row, first) not in known")
        except sqlite3.Error as error:
            if code_of(error) in OF_THE_SYSTEM:
                raise JournalError(
                    f"{path} has samples that are not to be learned from, and they cannot be removed: {error}. End what else has "
                    "the file open, or mend its permissions, and go on with --resume."
                ) from error
            log.warning("%s cannot be read (%s): its groups are made anew", path, error)


def forget_groups(folder: Path, groups: Collection[tuple[int, int, int]]) -> None:
    """Remove these groups, whoever wrote them down. groups: row, step, first sample."""
    for step in {step for _, step, _ in groups}:
        gone = [(row, first) for row, at, first in groups if at == step]
        for _, path in _files(folder, _of_step(step)):
            try:
                with closing(sqlite3.connect(path, timeout=BUSY_S)) as file, file:
                    file.executemany("delete from samples where row = ? and first = ?", gone)
            except (sqlite3.Error, ValueError) as error:  # bytes that are no text, in what SQLite says of them
                log.warning("%s keeps samples without a grade or a response: %s", path, error)


def _of_step(step: int) -> str:
    return f"step_{step:06d}-*.sqlite"


def _files(folder: Path, pattern: str = FILES) -> list[tuple[int, Path]]:
    """Step and path of each file of groups, sorted; what only has such a name, a folder or somebody's copy, is passed over."""
    found = [(OF_STEP.match(path.name), path) for path in folder.glob(pattern)]
    return sorted((int(match[1]), path) for match, path in found if match and not path.is_dir())
