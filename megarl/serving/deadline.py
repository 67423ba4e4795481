"""A limit in time whose error says what was waited for."""

from __future__ import annotations

import asyncio
from types import TracebackType

from megarl.core.errors import DeadlineError


class deadline:
    """An asyncio.timeout whose error says what was waited for."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(f"{self._what}: no answer within {self._seconds:g} s") from late
