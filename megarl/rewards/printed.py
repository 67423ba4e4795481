"""What reward functions print: into the log of the process that starts them, up to a bound.

A function that prints a line a response would fill a disk in a long run.
"""

from __future__ import annotations

import asyncio
import os

from megarl.core import janitor

STDERR = 2
MOST_PRINTED = 2**20  # bytes of one grader in one run


class Printed(asyncio.Protocol):
    """The reading end of a pipe that all processes of a grader print into. `open` makes both ends."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._left = MOST_PRINTED
        self._transport: asyncio.ReadTransport | None = None
        self.write_end = -1

    @classmethod
    async def open(cls, key: str) -> Printed:
        """Read what is printed into `write_end`. key: where the function stands in the recipe."""
        read_end, write_end = os.pipe()
        printed = cls(key)
        printed.write_end = write_end
        loop = asyncio.get_running_loop()
        printed._transport, _ = await loop.connect_read_pipe(lambda: printed, os.fdopen(read_end, "rb", 0))
        return printed

    def data_received(self, data: bytes) -> None:
        """asyncio: something was printed. It is read in any case: who prints into a full pipe waits."""
        if self._left <= 0:
            return
        shown = data[: self._left]
        self._left -= len(shown)
        if not self._left:
            shown += f"\n[{self._key}: what it prints after these {MOST_PRINTED} bytes is left out]\n".encode()
        os.write(STDERR, shown)

    def close(self) -> None:
        """Close both ends, once what was printed so far is read; processes that still print get nowhere."""
        if self._transport is None:
            return
        transport, self._transport = self._transport, None
        pipe = transport.get_extra_info("pipe").fileno()
        while self._left > 0 and janitor.readable(pipe, 0) and (data := os.read(pipe, 65536)):
            self.data_received(data)
        os.close(self.write_end)
        transport.close()
