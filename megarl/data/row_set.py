"""The usable rows of one file, and who deals them out. What a row is, and its tokens, are sft.py's and pairs.py's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.core.errors import UserError
from megarl.data.cursor import Cursor
from megarl.data.digests import Digester, Digests
from megarl.data.mix import MixedCursor, RowsBySet
from megarl.data.rows import Row, read_rows

P = TypeVar("P")
T = TypeVar("T")

# Enough rows at once to keep the tokenizer's threads busy.
ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class RowSet(Generic[T]):
    """The rows of one file that are within the length limit, in the file's order."""

    rows: tuple[T, ...]
    num_dropped: int  # over the length limit
    digests: Digests = field(default_factory=dict)  # of what they say
    set_names: tuple[object, ...] = ()  # what each says of its set, for data.mix

    def __len__(self) -> int:
        return len(self.rows)


def count_rows(path: Path, parse: Callable[[Row], object]) -> int:
    """How many rows a file has. Raises UserError for the first that `parse` refuses."""
    return sum(1 for _ in map(parse, read_rows(path)))


def load_rows(
    path: Path,
    parse: Callable[[Row], P],
    tokenise: Callable[[list[P]], list[T]],
    num_tokens: Callable[[T], int],
    max_tokens: int,
    texts: Callable[[P], Mapping[str, Any]],
    set_of: Callable[[P], object],
    parts: Callable[[P], Sequence[P]] = lambda parsed: (parsed,),
) -> RowSet[T]:
    """Read and tokenise a whole file; rows of more than max_tokens are counted and dropped.

    parts: the rows that one of the file's stands for. texts: what a row says, by name, for digests; not as the chat template has
    it, which may write the day's date. set_of: what a row says of its set.
    Raises UserError: a row that `parse` refuses, or nothing left.
    """
    kept: list[T] = []
    set_names: list[object] = []
    digester = Digester()
    num_rows = 0
    rows = read_rows(path)
    while batch := [part for row in islice(rows, ROWS_PER_BATCH) for part in parts(parse(row))]:
        num_rows += len(batch)
        for parsed, row in zip(batch, tokenise(batch), strict=True):
            if num_tokens(row) <= max_tokens:
                kept.append(row)
                set_names.append(set_of(parsed))
                digester.add(texts(parsed))
    if not kept:
        raise UserError(f"{path}: all {num_rows} rows are over data.max_tokens={max_tokens}. Raise the limit.")
    return RowSet(tuple(kept), num_rows - len(kept), digester.digests(), tuple(set_names))


class RowSource(Generic[T]):
    """Hands out rows, epoch after epoch; its place can be saved."""

    def __init__(
        self,
        rows: RowSet[T],
        seed: int,
        *,
        shuffle: bool = True,
        sets: RowsBySet | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        """sets, mix: of which set each row is, and the share of each, where there are shares (mix.py)."""
        self._rows = rows.rows
        what, digests = "training rows", rows.digests
        if sets:
            self._cursor: Cursor = MixedCursor(sets, mix or {}, seed, shuffle=shuffle, what=what, digests=digests)
        else:
            self._cursor = Cursor(len(rows), seed, shuffle=shuffle, what=what, digests=digests)

    @property
    def epoch(self) -> float:
        """Passes handed out so far, the one under way as a fraction."""
        return self._cursor.epoch

    def take(self, count: int) -> list[T]:
        """The next `count` rows, crossing epochs where needed."""
        return [self._rows[index] for index in self._cursor.take(count)]

    def state(self) -> dict[str, Any]:
        """The place, for a checkpoint."""
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place. Raises UserError where the data or the seed have changed."""
        self._cursor.load_state(state)
