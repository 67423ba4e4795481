"""What a sandbox writes into a pipe, read up to a bound by the process that keeps it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

BLOCK = 65536


class Stream:
    """What a sandbox writes into a pipe, up to a bound; the rest is read and forgotten."""

    def __init__(self, limit: int, over: Callable[[], None]) -> None:
        """over: called where more is written."""
        self._left = limit
        self._over = over
        self._parts: list[bytes] = []
        self.cut = False
        self.ended = asyncio.get_running_loop().create_future()
        self._fd, self.write_end = os.pipe()
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, BLOCK)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if self._left:
            self._parts.append(data[: self._left])
        if len(data) > self._left and not self.cut:
            self.cut = True
            self._over()
        self._left = max(0, self._left - len(data))

    def close(self) -> None:
        """Read nothing more."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if not self.ended.done():
            self.ended.set_result(None)

    def text(self) -> str:
        """What was written. Where it was cut, the last line says so."""
        data = b"".join(self._parts)
        return data.decode(errors="replace") + (f"\n[cut after {len(data)} bytes]\n" if self.cut else "")
