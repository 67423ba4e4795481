"""What the coordinator decided, written down: which groups were asked for, dropped and taken, in their order.

With the samples in the journal (journal.py) it is what a run that goes on needs to take the same steps again: asynchronously it
depends on who finished first, which no seed repeats. One SQLite file, `journal/decisions.sqlite`:

    sqlite3.connect("runs/x/journal/decisions.sqlite").execute("select * from decisions").fetchall()
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import orjson

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.rollout.journal import (
    BUSY_S,
    OF_THE_SYSTEM,
    JournalError,
    code_of,
    forget,
    forget_groups,
    forget_others,
)
from megarl.rollout.ledger import Key, keys_from

log = get_logger(__name__)

FILE = "decisions.sqlite"
TABLE = "create table if not exists decisions (number integer primary key, kind text, step integer, groups text, crc integer)"
FORGOTTEN = "user_version"  # a number in the file's header that SQLite leaves to whoever writes it
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
        self._given: Decision | None = None  # what `again` gave last
        self._last = 0
        self._left = False  # whether this life decides by itself
        self._step = 0  # that is under way, as far as is known here: it only goes up
        self._waiting: set[Key] = set()
        self.spent_s = 0.0  # writing, so far, with what is waited for the disk

    def resume(self, after: int | None, waiting: Iterable[Sequence[int]] = ()) -> None:
        """The run goes on from where the decision of this number was the newest: those after it are to be made again.

        waiting: groups that were asked for then, and not taken. None: that was in a life without a journal, and what an earlier
        one left is of no use.
        """
        self._last, self._earlier = after or 0, deque()
        self._waiting = set(keys_from(waiting))
        if self._folder is None:
            return
        if after is None and not self._replays:
            forget(self._folder, after=0)
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
        self._step = step
        if not self.repeating or not self._earlier or self._earlier[0].step > step:
            return None
        decision = self._given = self._earlier.popleft()
        self._last = decision.number
        return decision

    def make_again(self, step: int) -> None:
        """A collector died with samples that this step took: `again` gives once more what it took, unless that is not known.

        Raises MegarlError in a replay, as `leave` does.
        """
        given, self._given = self._given, None
        if given is not None and (given.kind, given.step, given.number) == ("taken", step, self._last):
            self.take_back(given)  # nothing was decided since
        else:
            self.leave(f"a collector died, and step {step} is made again", step)

    def take_back(self, decision: Decision) -> None:
        """What `again` has just given does not stand: what it followed from is not what it was."""
        assert self._earlier is not None, decision
        self._earlier.appendleft(decision)
        self._last = decision.number - 1

    def anew(self, groups: Collection[Key]) -> None:
        """Nothing can be learned from what was sampled for these groups: a run that goes on samples them again."""
        if self._folder is not None and not self._replays:
            forget_groups(self._folder, groups)

    def lacks(self, why: str) -> None:
        """A group of a step that is made again cannot be read. Raises MegarlError in a replay, which cannot ask for it."""
        if self._replays:
            self.leave(why, 0)

    def leave(self, why: str, step: int) -> None:
        """Make none of the rest again: what they followed from is not what it was. Raises MegarlError in a replay.

        step: that is under way. Groups that only the rest had asked for, for this step or later ones, were sampled by weights
        that there will not be again: whoever asks for the same ones is not to find them.
        """
        if self._replays:
            raise MegarlError(
                f"The journal in {self._folder} cannot be replayed any further: {why}. Replay steps before it (--to-step), or "
                "from a checkpoint after it (--from-step)."
            )
        if self._folder is None or self._left:
            return
        if self.repeating:
            log.warning("The journal is not followed any further: %s.", why)
            self._earlier = deque()
            forget_decisions(self._folder, self._last)
        self._left = True
        forget_others(self._folder, step, self._waiting | _spoken_of(self._folder))

    def add(self, kind: Kind, step: int, groups: Sequence[Key]) -> None:
        """One more; `write` brings it to the disk."""
        self._step = step
        if self._folder is not None and groups and not self._replays:
            self._last += 1
            self._unwritten.append(Decision(self._last, kind, step, tuple(groups)))

    async def forget(self, number: int, waiting: Iterable[Sequence[int]]) -> None:
        """No life goes on from before the decision of this number any more: it and those before it are removed.

        waiting: as of `resume`, of whoever goes on from there. What cannot be removed now is told, and goes another time.
        """
        if self._folder is not None and not self._replays:
            # `leave` asks for those that are meant for the step under way, or later ones.
            self._waiting = {key for key in self._waiting | set(keys_from(waiting)) if key[1] >= self._step}
            await asyncio.get_running_loop().run_in_executor(self._thread, self._forget, number)

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
                f"The journal in {self._folder} cannot be written: {error}. Nothing that it has is lost. Make room, end what "
                f"else has {FILE} open, or set train.journal to false, and go on with --resume."
            ) from error
        self.spent_s += time.perf_counter() - began

    def _forget(self, number: int) -> None:
        try:
            with self._opened() as file:
                file.execute("delete from decisions where number <= ?", (number,))
                file.execute(f"pragma {FORGOTTEN} = {number}")
        except (sqlite3.Error, OSError) as error:
            log.warning("%s: decisions that nobody needs any more stay for now: %s", self._folder, error)

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._folder / FILE, timeout=BUSY_S, check_same_thread=False)
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
    """Decisions after the one of this number, in order, up to the first that is damaged: that is told.

    Raises JournalError where the system does not let them be read.
    """
    path = folder / FILE
    if not path.exists():
        return []
    found: list[Decision] = []
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as file:
            if _forgotten(file) > after:
                return []
            for row in file.execute("select * from decisions where number > ? order by number", (after,)):
                found.append(_decision(row, after + len(found) + 1))
    except (sqlite3.Error, ValueError) as error:
        _refuse(folder, error)
        log.warning(
            "%s: decisions after number %d cannot be read (%s): they are made anew", path, after + len(found), error
        )
    return found


def _forgotten(file: sqlite3.Connection) -> int:
    """Number of the newest decision that was removed because nobody needs it; 0 where none was."""
    return int(file.execute(f"pragma {FORGOTTEN}").fetchone()[0])


def _spoken_of(folder: Path) -> set[Key]:
    """Groups that all decisions speak of that can be read."""
    found: set[Key] = set()
    if not (folder / FILE).exists():
        return found
    with contextlib.suppress(sqlite3.Error, ValueError), closing(sqlite3.connect(folder / FILE)) as file:
        # The newest first: what is damaged ends it.
        rows = file.execute("select * from decisions where kind <> 'rewound' order by number desc")
        for number, kind, step, groups, crc in rows:
            if _crc(number, kind, step, groups) == crc:
                found.update((row, meant, first) for row, meant, first in orjson.loads(groups))
    return found


def forget_decisions(folder: Path, after: int) -> None:
    """Remove decisions after the one of this number: others are made in their place. Raises JournalError as reading does."""
    path = folder / FILE
    if path.exists():
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_S)) as file, file:
                file.execute("delete from decisions where number > ?", (after,))
                if _forgotten(file) > after:
                    file.execute(f"pragma {FORGOTTEN} = {after}")  # numbers begin anew
        except (
            sqlite3.Error,
            ValueError,
        ) as error:  # bytes that are no text, in what SQLite says of them, are a ValueError
            _refuse(folder, error)
            log.warning("%s cannot be read (%s), and is begun anew", path, error)
            path.unlink()


def _refuse(folder: Path, error: sqlite3.Error | ValueError) -> None:
    """Raise JournalError where nothing is damaged: the disk is full, somebody else holds the file, it may not be written."""
    if code_of(error) in OF_THE_SYSTEM:
        raise JournalError(
            f"The journal in {folder} cannot be gone on with: {error}. Nothing that it has is lost. Make room, end what else has "
            f"{FILE} open, or mend its permissions, and go on with --resume; --discard-journal goes on without it."
        ) from error


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
    return Decision(number, kind, step, tuple(keys_from(orjson.loads(groups))))


def _crc(number: int, kind: str, step: int, groups: str) -> int:
    return zlib.crc32(f"{number}/{kind}/{step}/{groups}".encode())
