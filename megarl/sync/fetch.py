"""One server's end of a weight sync over the disk: has a version put together on its node, and the server load it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megarl.core.errors import DeadlineError, MegarlError, TornError
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError
from megarl.serving.external import check_run
from megarl.sync.mirror import Mirror
from megarl.sync.session import bucket_limit_s, left
from megarl.sync.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """What a server is to load. flush_cache: as transports have it. timeout_s: longest that all of it may take.

    in_place: the server reads a whole version where it was written; off, what its node makes of what changed. all_files: it loads
    what did not change as well.
    """

    store: Store
    version: int
    flush_cache: bool
    in_place: bool
    timeout_s: float
    all_files: bool = False


@dataclass(frozen=True)
class Fetched:
    """How it went. trouble: why the server has not loaded it, or nothing. torn: the version is not as it was written."""

    trouble: str = ""
    torn: bool = False


class Fetcher:
    """Beside one server, on its node: it knows which version the server has."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self._endpoint = endpoint
        self._held: int | None = None
        self._mirror: Path | None = None

    def forget(self) -> None:
        """The server's weights are lost: all of them have to be loaded anew."""
        self._held = None

    def leave(self) -> None:
        """Nothing more comes of where versions came from: its mirror on this node is removed. Servers of a node share one."""
        self.forget()
        if self._mirror is not None:
            shutil.rmtree(self._mirror, ignore_errors=True)
        self._mirror = None

    async def fetch(self, order: Order) -> Fetched:
        """Have the server load a version."""
        end = time.monotonic() + order.timeout_s
        # Until all of it is loaded nobody knows what the server has.
        held, self._held = self._held, None
        try:
            folder = await self._ready(order, held, end)
            async with ServerClient(self._endpoint) as client:
                await check_run(client, left(end))
                if folder is None:  # nor is anything wrong that it computed with them
                    await client.set_weight_version(order.version, left(end))
                else:
                    limit_s = bucket_limit_s(sum(path.stat().st_size for path in folder.iterdir()), end)
                    await client.update_from_disk(folder, order.version, limit_s, flush_cache=order.flush_cache)
        except ServerError as error:
            seen = f" It has to see {order.store.folder} under this path (sync.folder)." if order.in_place else ""
            return Fetched(f"{error}{seen}")
        except TornError as error:
            return Fetched(str(error), torn=True)
        except (MegarlError, OSError) as error:
            return Fetched(str(error))
        self._held = order.version
        return Fetched()

    async def sees(self, order: Order) -> str:
        """Why a process of this node could not read a version where it was written, or nothing. Contents are not looked at."""
        try:
            await self._in_time(order, time.monotonic() + order.timeout_s, lambda: _look(order))
        except (MegarlError, OSError) as error:
            who = f"{self._endpoint.name} on {socket.gethostname()}"
            return f"{who} has to see {order.store.folder} under this path (sync.folder). {error}"
        return ""

    async def _ready(self, order: Order, held: int | None, end: float) -> Path | None:
        self._mirror = mirror_of(order.store)
        return await self._in_time(order, end, lambda: _folder(order, held, end))

    async def _in_time(self, order: Order, end: float, read: Callable[[], T]) -> T:
        """Read in a thread; a disk that does not answer is given up."""
        try:
            async with asyncio.timeout(left(end)):
                return await asyncio.to_thread(read)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._endpoint.name}: weight version {order.version} was not read from {order.store.folder} within "
                f"{order.timeout_s:g} s (deadlines.sync_s)."
            ) from error


def mirror_of(store: Store) -> Path:
    """Where this node puts a store's versions together."""
    return Path(tempfile.gettempdir()) / f"mirror-{store.folder.name}"


def _look(order: Order) -> None:
    manifest = order.store.manifest(order.version)
    for file in manifest.files:
        order.store.open(manifest, file)


def _folder(order: Order, held: int | None, end: float) -> Path | None:
    """The folder that the server is to load; None where it has all of it."""
    mirror = Mirror(mirror_of(order.store), order.store)
    if order.in_place:
        mirror.meet(order.version, end)
        return order.store.files(order.version)
    folder = mirror.bring(order.version, end)
    return folder if held is None or order.all_files else mirror.changed(order.version, held)
