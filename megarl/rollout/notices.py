"""Lines for people while something is under way: the process that has them keeps them until the driver asks."""

from __future__ import annotations

import asyncio

from megarl.core.log import get_logger

log = get_logger(__name__)


class Notices:
    """Lines in their order. All are in this process's log as well."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def tell(self, line: str) -> None:
        """Keep a line for whoever asks next."""
        log.warning("%s", line)
        self._lines.put_nowait(line)

    async def next(self) -> str:
        """The next line, once there is one."""
        return await self._lines.get()
