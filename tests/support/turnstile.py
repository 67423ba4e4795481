"""An address in front of another, through which connections pass or do not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

CHUNK = 2**16
CALL_S = 30.0


class Turnstile:
    """Open within `with`. Closed, nobody listens at `url`, and every connection is cut."""

    def __init__(self, target: str, port: int) -> None:
        parts = urlsplit(target)
        self._target, self._port = (parts.hostname, parts.port), port
        self.url = f"http://127.0.0.1:{port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Turnstile:
        self._thread.start()
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def open(self) -> None:
        """Let connections pass."""
        self._do(self._open)

    def close(self) -> None:
        """Let none pass, and cut those that do."""
        self._do(self._close)

    def _do(self, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(CALL_S)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._writers |= {writer, back}
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        self._writers -= {writer, back}


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # cut off, by either side
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    target.close()
