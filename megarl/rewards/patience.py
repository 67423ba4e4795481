"""How long graders are waited for: what each is at and for how long, and when it is no use to wait for more of the same.

A grader that hangs costs a deadline each time. Where several grades in a row are lost, those that wait behind them are
given up untried; what is asked for later is tried again. Not for the deadlines themselves (graders.py, http.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Losses in a row of one row's responses, after which its others are given up; and the fewest rows that a grader has to
# lose in a row before all that waits is: a row whose responses hang says nothing of the others.
ENOUGH = 3


@dataclass(frozen=True)
class UnderWay:
    """A response that a grader is at. row: its prompt's. for_s: how long, in seconds."""

    row: str
    for_s: float


class InFlight:
    """The requests that a grader has sent, the oldest first."""

    def __init__(self) -> None:
        self._sent: dict[object, tuple[str, float]] = {}

    @contextmanager
    def at(self, row: str) -> Iterator[None]:
        """A request is under way."""
        ticket = object()
        self._sent[ticket] = row, time.monotonic()
        try:
            yield
        finally:
            del self._sent[ticket]

    def oldest(self) -> UnderWay | None:
        """The one that has been under way for longest."""
        row, since = next(iter(self._sent.values()), ("", None))
        return None if since is None else UnderWay(row, time.monotonic() - since)


class Patience:
    """What a grader lost in a row, and what is therefore not tried."""

    def __init__(self, limit: int) -> None:
        """limit: losses in a row, of ENOUGH rows or more, after which all that waits is given up."""
        self._limit = limit
        self._in_a_row = 0
        self._lost_rows: set[str] = set()  # of those in a row
        self._by_row: Counter[str] = Counter()  # since the row's last grade
        self._given_up: dict[str, tuple[float, int]] = {}  # row, or "" for all -> when, and after how many

    def graded(self, row: str) -> None:
        """A grade, or a failure of the response's own, came back."""
        self._in_a_row = 0
        self._lost_rows.clear()
        del self._by_row[row]  # a Counter has no objection where there is none

    def lost(self, row: str) -> None:
        """A grade timed out, or died with its process."""
        now = time.monotonic()
        self._in_a_row += 1
        self._lost_rows.add(row)
        self._by_row[row] += 1
        if self._by_row[row] >= ENOUGH:
            self._given_up[row] = now, self._by_row[row]
        if self._in_a_row >= self._limit and len(self._lost_rows) >= ENOUGH:
            self._given_up[""] = now, self._in_a_row

    def refusal(self, row: str, asked_at: float) -> str | None:
        """Why a response that has waited since then is not tried; None where it is. asked_at: of `time.monotonic`."""
        for key, which in (("", "in a row"), (row, "of the same row")):
            when, count = self._given_up.get(key, (float("-inf"), 0))
            if asked_at <= when:
                return f"timeout: not tried, because {count} grades {which} were lost before it"
        return None
