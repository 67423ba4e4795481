"""What the coordinator decided, written down: which groups were asked for, dropped and taken, in their order.

With the samples in the journal (journal.py) it is what a run that goes on needs to take the same steps again: asynchronously it
depends on who finished first, which no seed repeats. One SQLite file, `journal/decisions.sqlite`:

    sqlite3.connect("runs/x/journal/decisions.sqlite").execute("select * from decisions").fetchall()
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import orjson

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.rollout.journal import JournalError
from megarl.rollout.ledger import Key

log = get_logger(__name__)

FILE = "decisions.sqlite"
TABLE = "create table if not exists decisions (number integer primary key, kind text, step integer, groups text, crc integer)"
INSERT = "insert or replace into decisions values (?, ?, ?, ?, ?)"

# admitted: asked for; dull: dropped because they taught nothing; late: dropped because they ran too long; taken: by a step.
# rewound: the run went back to a checkpoint, and what was asked for since is passed over.
Kind = Literal["admitted", "dull", "late", "taken", "rewound"]


@dataclass(frozen=True)
class Decision:
    """What became of some groups, in order.

    number: from 1 on. step: that was under way; of rewound the checkpoint's. groups: of rewound, as it is written, one triple:
    the number of the newest decision that stays, and twice 0; as `standing` gives it, the groups that are passed over.
    times: of rewound, how often since then.
    """

    number: int
    kind: Kind
    step: int
    groups: tuple[Key, ...]
    times: int = 1


class Decisions:
    """Writes decisions down in the order in which they are made, and has those that were made before the run was stopped.

    folder: the journal's; None: nothing is written, and nothing was. replays: it is another run's, which is only read, and
    nothing is decided but what was.
    """

    def __init__(self, folder: Path | None, *, replays: bool = False) -> None:
        self._folder, self._replays = folder, replays
        self._thread = ThreadPoolExecutor(1, "decisions")
        self._unwritten: list[Decision] = []
        self._writing: asyncio.Future[None] | None = None  # what was begun last: those before it are done first
        self._file: sqlite3.Connection | None = None
        self._earlier: deque[Decision] | None = None  # None: nobody has looked
        self._last = 0
        self.spent_s = 0.0  # writing, so far, with what is waited for the disk

    def resume(self, after: int | None) -> None:
        """The run goes on from where the decision of this number was the newest: those after it are to be made again.

        None: that was in a life without a journal, and what an earlier one left is of no use.
        """
        self._last, self._earlier = after or 0, deque()
        if self._folder is None:
            return
        earlier = [] if after is None else read_decisions(self._folder, after)
        if not self._replays:
            forget_decisions(self._folder, self._last + len(earlier))
        self._earlier.extend(standing(earlier))

    @property
    def last(self) -> int | None:
        """Number of the newest that was made in this life, or made again; None where none is written."""
        return None if self._folder is None else self._last

    @property
    def repeating(self) -> bool:
        """Whether there are decisions still to be made again. A run without a checkpoint makes all of them."""
        if self._earlier is None:
            self.resume(0)
        return self._replays or bool(self._earlier)

    def again(self, step: int) -> Decision | None:
        """The next decision that was made before, in this step or an earlier one; None where there is no further one."""
        if not self.repeating or not self._earlier or self._earlier[0].step > step:
            return None
        decision = self._earlier.popleft()
        self._last = decision.number
        return decision

    def lacks(self, why: str) -> None:
        """A group of a step that is made again cannot be read. Raises MegarlError in a replay, which cannot ask for it."""
        if self._replays:
            self.leave(why)

    def leave(self, why: str) -> None:
        """Make none of the rest again: what they followed from is not what it was. Raises MegarlError in a replay."""
        if self._replays:
            raise MegarlError(
                f"The journal in {self._folder} cannot be replayed any further: {why}. Replay steps before it (--to-step), or "
                "from a checkpoint after it (--from-step)."
            )
        if self.repeating and self._folder is not None:
            log.warning("The journal is not followed any further: %s.", why)
            self._earlier = deque()
            forget_decisions(self._folder, self._last)

    def add(self, kind: Kind, step: int, groups: Sequence[Key]) -> None:
        """One more; `write` brings it to the disk."""
        if self._folder is not None and groups and not self._replays:
            self._last += 1
            self._unwritten.append(Decision(self._last, kind, step, tuple(groups)))

    async def write(self) -> None:
        """All that were made until now are on the disk when this returns. Raises JournalError."""
        made, self._unwritten = self._unwritten, []
        if made:
            self._writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, made)
        if self._writing is not None:  # others may have begun to write what was made here
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write what is not yet."""
        await self.write()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _write(self, made: Sequence[Decision]) -> None:
        began = time.perf_counter()
        try:
            with self._opened() as file:
                file.executemany(INSERT, [_row(each) for each in made])
        except (sqlite3.Error, OSError) as error:
            raise JournalError(
                f"The journal in {self._folder} cannot be written: {error}. Nothing that it has is lost. Make room, or set "
                "train.journal to false, and go on with --resume."
            ) from error
        self.spent_s += time.perf_counter() - began

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._folder / FILE, check_same_thread=False)
            self._file.execute("pragma journal_mode = truncate")
            self._file.execute(TABLE)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def standing(made: Sequence[Decision]) -> list[Decision]:
    """What a run that goes on has to make again of decisions in their order: what it went back over, it only passes over."""
    kept: list[Decision] = []
    for each in made:
        if each.kind == "rewound":
            stays = each.groups[0][0]
            gone = [other for other in kept if other.number > stays]
            over = [key for other in gone if other.kind in ("admitted", "rewound") for key in other.groups]
            times = 1 + sum(other.times for other in gone if other.kind == "rewound")
            kept = [other for other in kept if other.number <= stays]
            each = Decision(each.number, "rewound", each.step, tuple(over), times)  # noqa: PLW2901
        kept.append(each)
    # A step that was made again took what it took last.
    taken = {each.step: each.number for each in kept if each.kind == "taken"}
    return [each for each in kept if each.kind != "taken" or taken[each.step] == each.number]


def read_decisions(folder: Path, after: int) -> list[Decision]:
    """Decisions after the one of this number, in order, up to the first that is damaged: that is told."""
    path = folder / FILE
    if not path.exists():
        return []
    found: list[Decision] = []
    try:
        with closing(sqlite3.connect(path)) as file:
            for row in file.execute("select * from decisions where number > ? order by number", (after,)):
                found.append(_decision(row, after + len(found) + 1))
    except (sqlite3.Error, ValueError) as error:
        log.warning(
            "%s: decisions after number %d cannot be read (%s): they are made anew", path, after + len(found), error
        )
    return found


def forget_decisions(folder: Path, after: int) -> None:
    """Remove decisions after the one of this number: others are made in their place."""
    path = folder / FILE
    if path.exists():
        try:
            with closing(sqlite3.connect(path)) as file, file:
                file.execute("delete from decisions where number > ?", (after,))
        except sqlite3.DatabaseError as error:
            log.warning("%s cannot be read (%s), and is begun anew", path, error)
            path.unlink()


def _row(decision: Decision) -> tuple[int, str, int, str, int]:
    groups = orjson.dumps(decision.groups).decode()
    return (
        decision.number,
        decision.kind,
        decision.step,
        groups,
        _crc(decision.number, decision.kind, decision.step, groups),
    )


def _decision(row: tuple[int, Kind, int, str, int], number: int) -> Decision:
    found, kind, step, groups, crc = row
    if _crc(found, kind, step, groups) != crc or kind not in get_args(Kind):
        raise ValueError(f"the checksum of number {found} is another")
    if found != number:
        raise ValueError(f"number {number} is missing")
    return Decision(
        number, kind, step, tuple((int(row), int(step), int(first)) for row, step, first in orjson.loads(groups))
    )


def _crc(number: int, kind: str, step: int, groups: str) -> int:
    return zlib.crc32(f"{number}/{kind}/{step}/{groups}".encode())
