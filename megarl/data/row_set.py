"""The usable rows of one file, and who deals them out. Not for reading or tokenising them (sft.py, pairs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.core.errors import UserError
from megarl.data.cursor import Cursor

T = TypeVar("T")


@dataclass(frozen=True)
class RowSet(Generic[T]):
    """The rows of one file that are within the length limit, in the file's order."""

    rows: tuple[T, ...]
    num_dropped: int  # over the length limit

    def __len__(self) -> int:
        return len(self.rows)


def kept_rows(path: Path, rows: Sequence[T], num_dropped: int, max_tokens: int) -> RowSet[T]:
    """The rows that are left. Raises UserError where none is."""
    if not rows:
        raise UserError(f"{path}: all {num_dropped} rows are over data.max_tokens={max_tokens}. Raise the limit.")
    return RowSet(tuple(rows), num_dropped)


class RowSource(Generic[T]):
    """Deals out rows, epoch after epoch; its place can be saved."""

    def __init__(self, rows: RowSet[T], seed: int, *, shuffle: bool = True) -> None:
        self._rows = rows.rows
        self._cursor = Cursor(len(rows), seed, shuffle=shuffle, what="training rows")

    @property
    def epoch(self) -> int:
        """Whole passes dealt out so far."""
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
