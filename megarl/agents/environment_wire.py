"""What an environments' process is asked, and what it answers. Plain records: both ends pickle them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 2**28  # of an answer: what an environment shows at once


@dataclass(frozen=True)
class Call:
    """Call a method of an environment. `start` makes it, `close` is its last. values: by name, of a method that is a tool."""

    number: int
    environment: int
    method: str
    arguments: tuple[Any, ...] = ()
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this call any more."""

    number: int


@dataclass(frozen=True)
class Answer:
    """What a call gave. value: pickled. error: what it raised, in words; empty where it did not."""

    number: int
    value: bytes = b""
    error: str = ""
    trace: str = ""
