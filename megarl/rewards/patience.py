"""How long graders are waited for: what each is at and for how long, when it is no use to wait for more of the same, and
until when a server that is gone or busy is asked again.

A grader that hangs costs a deadline each time. Where several grades in a row are lost, those that wait behind them are
given up untried; what is asked for later is tried again. Not for the deadlines themselves (graders.py, http.py).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Losses in a row of one row's responses, after which its others are given up; and the fewest rows that a grader has to
# lose in a row before all that waits is: a row whose responses hang says nothing of the others.
ENOUGH = 3
SILENT_S = 3.0  # after which people are told of an outage: a connection that a server has closed for its age is none


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

    def oldest(self, well_since: float = float("-inf")) -> UnderWay | None:
        """The one that has been under way for longest, without the time before its server was well."""
        row, since = next(iter(self._sent.values()), ("", None))
        return None if since is None else UnderWay(row, time.monotonic() - max(since, well_since))


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


class Outage:
    """Since when a server has been gone or busy, and until when it is asked again. Times are `time.monotonic`'s."""

    def __init__(self, retry_for_s: float, key: str, tell: Callable[[str], None]) -> None:
        """key: of retry_for_s. tell: takes a line for people, of an outage that lasts and of its end."""
        self._retry_for_s, self._key, self._tell = retry_for_s, key, tell
        self._since: float | None = None
        self.over_at = float("-inf")  # when the last one ended that people were told of; infinity while there is one

    @property
    def lasts(self) -> bool:
        """Whether no answer has come since it was first found gone or busy."""
        return self._since is not None

    def left_s(self, since: float) -> float:
        """For how long it is asked again by a request that first found it gone or busy then."""
        self._since = since if self._since is None else min(since, self._since)
        return self._since + self._retry_for_s - time.monotonic()

    def tell(self, since: float, pause_s: float, why: str) -> None:
        """Tell people, once an outage will have lasted for a while when it is next asked."""
        left_s = self.left_s(since)
        if self.over_at < math.inf and self._retry_for_s - left_s + pause_s >= SILENT_S:
            self.over_at = math.inf
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
            self._tell(f"{why}. It is asked again until {until} ({self._key}: {self._retry_for_s:g} s)")

    def ended(self, since: float) -> str:
        """What a failure says of how long it was asked again; nothing where it is not, or was not found gone or busy."""
        if self._since is None or since == math.inf or self._retry_for_s <= 0:
            return ""
        lasted_s = time.monotonic() - min(since, self._since)
        return f"; it has been gone or busy for {lasted_s:.0f} s, and is asked again for {self._retry_for_s:g} s ({self._key})"

    def over(self, url: str) -> None:
        """It has answered."""
        if self._since is not None and self.over_at == math.inf:
            self._tell(f"{url} answers again, after {time.monotonic() - self._since:.0f} s")
            self.over_at = time.monotonic()
        self._since = None
