"""Sends LoRA adapters alone, to servers that hold the model itself: as a PEFT folder, which servers read from the run's folder.

Servers name it by one name. While it is exchanged nobody asks them: a request that came between would be of no adapter, and is
refused. What they computed with the one before is no prefix of what they compute with this one: SGLang keeps both apart.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megarl.models.lora_served import ADAPTER
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError
from megarl.serving.external import check_run
from megarl.sync.session import Stopwatch, SyncReport, connected, everyone, left

WEIGHTS = "adapter_model.safetensors"


class Exports(Protocol):
    """What is asked of a rank."""

    def export_adapters(self, folder: Path) -> None:
        """Write the adapters; collective."""
        ...


class AdapterSender:
    """The sending end. Every rank of the trainer makes one and calls `send`; rank 0 writes the files, and tells the servers.

    folder: that ranks and servers see; it holds the adapters of the newest version. timeout_s: longest
    that servers may take once these are written.
    """

    def __init__(self, *, rank: int, folder: Path, timeout_s: float) -> None:
        self._rank, self._folder, self._timeout_s = rank, folder, timeout_s

    def send(
        self, weights: Exports, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As `transport.Transport` says. flush_cache: not asked for; see above."""
        began, watch = time.monotonic(), Stopwatch()
        folder = self._folder / f"version-{version}"
        weights.export_adapters(folder)
        if self._rank != 0:
            return None
        watch.lap("write")
        failures = asyncio.run(self._load(folder, version, servers, time.monotonic() + self._timeout_s))
        watch.lap("load")
        for other in self._folder.iterdir():
            if other != folder:
                # Of a file that a server has open NFS leaves a name: the next sync removes it.
                shutil.rmtree(other, ignore_errors=True)
        ok = tuple(server.name for server in servers if server.name not in failures)
        num_bytes = (folder / WEIGHTS).stat().st_size
        return SyncReport(version, ok, failures, num_bytes, time.monotonic() - began, 1, watch.seconds)

    async def _load(self, folder: Path, version: int, servers: Sequence[ServerEndpoint], end: float) -> dict[str, str]:
        """Exchange the adapters on all servers side by side; who failed, and why."""

        async def exchange(client: ServerClient) -> None:
            try:
                await client.ask("/unload_lora_adapter", {"lora_name": ADAPTER}, left(end))
            except ServerError as error:
                if "does not exist" not in str(error):
                    raise
            loaded = {"lora_name": ADAPTER, "lora_path": str(folder)}
            await client.ask("/load_lora_adapter", loaded, left(end))
            await check_run(client, left(end))
            await client.set_weight_version(version, left(end))

        async with connected(servers) as clients:
            failures = await everyone(clients, exchange)
        return {name: str(error) for name, error in failures.items()}

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Servers hold nothing of this process."""
        return {}

    def close(self) -> None:
        """Nothing is kept but the files."""
