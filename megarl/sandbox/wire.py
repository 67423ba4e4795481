"""What a pool and its keeper say to each other over their socket: frames of pickled records, both ends megarl's own."""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from megarl.sandbox.job import InForce, Job, Limits, Result

HEADER = struct.Struct("<Q")


@dataclass(frozen=True)
class Begin:
    """The first word of a pool. size: how many sandboxes there are at once, waiting ones included."""

    limits: Limits
    size: int


@dataclass(frozen=True)
class Ready:
    """The first word of a keeper: a sandbox waits."""

    in_force: InForce


@dataclass(frozen=True)
class Refused:
    """The first word of a keeper that can make no sandboxes, and why; it ends."""

    reason: str


@dataclass(frozen=True)
class Run:
    """Run a job. number: the pool's."""

    number: int
    job: Job


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this job any more."""

    number: int


@dataclass(frozen=True)
class Done:
    """A job's result; or none, where no sandbox came up for it, and why."""

    number: int
    result: Result | None
    failure: str = ""


def frame(value: object) -> bytes:
    """A record as it is sent."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> Any:
    """The next record; None where the other end is gone."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
