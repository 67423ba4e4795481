"""Buckets of whole tensors as what one rank writes into shared memory or files, and senders that are called as a broadcast is."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megarl.models.hf_pieces import Entry, lay_out
from megarl.models.hf_weights import Bucket
from megarl.serving.client import ServerEndpoint
from megarl.sync.disk import DiskSender
from megarl.sync.fetch import Fetched, Fetcher, Order
from megarl.sync.memory import NodeMemory
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender
from megarl.sync.store import Store
from tests.sync.given import Given, OneRank


class Written:
    """One rank that holds everything. before: called with the number of each bucket before it is written."""

    def __init__(self, buckets: Sequence[Bucket], before: Callable[[int], None] = lambda _: None) -> None:
        self._tensors, self._before = list(buckets), before
        self.buckets: list[tuple[Entry, ...]] = [
            lay_out((name, tuple(tensor.shape), tensor.dtype) for name, tensor in bucket) for bucket in buckets
        ]

    def write(self, number: int, flat: Tensor) -> None:
        self._before(number)
        for entry, (_, tensor) in zip(self.buckets[number], self._tensors[number], strict=True):
            entry.of(flat).copy_(tensor)


def names(count: int) -> list[str]:
    """Files of so many buckets."""
    return [f"model-{number + 1:05d}.safetensors" for number in range(count)]


class DiskBuckets(OneRank):
    """A DiskSender of one rank for whole tensors, with what is beside each server: files in `folder`.

    between: called when a version is written, and nobody has it yet.
    """

    def __init__(self, folder: Path, timeout_s: float = 60.0, *, in_place: bool = False, model: str = "model") -> None:
        self.store = Store(folder / f"store-{secrets.token_hex(4)}", model)
        self.sender: DiskSender = DiskSender(rank=0, store=self.store, whole_bytes=2**20, deltas=not in_place)
        self.fetchers: dict[str, Fetcher] = {}
        self.between: Callable[[], None] = lambda: None
        self._in_place, self._timeout_s = in_place, timeout_s

    def sent(
        self, buckets: list[Bucket], version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport | None:
        report = self.sender.write(Given(buckets), names(len(buckets)), version)
        assert report is not None
        self.between()
        fetched = asyncio.run(self.fetch(version, servers, flush_cache=flush_cache))
        ok = tuple(name for name, each in fetched.items() if not each.trouble)
        return replace(report, ok=ok, failed={name: each.trouble for name, each in fetched.items() if each.trouble})

    async def fetch(
        self, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> dict[str, Fetched]:
        order = Order(self.store, version, flush_cache, self._in_place, self._timeout_s)
        found = [self.fetchers.setdefault(server.url, Fetcher(server)).fetch(order) for server in servers]
        return dict(zip([server.name for server in servers], await asyncio.gather(*found), strict=True))


class SharedBuckets(OneRank):
    """A SharedMemorySender of one rank for whole tensors."""

    def __init__(
        self, registry: Path, timeout_s: float = 60.0, join_s: float = 30.0, bucket_bytes: int = 1 << 20
    ) -> None:
        self.sender: SharedMemorySender = SharedMemorySender(
            rank=0,
            memory=NodeMemory(rank=0, writers=(0,), registry=registry, device="cpu"),
            device="cpu",
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            join_s=join_s,
        )

    def sent(
        self, buckets: list[Bucket], version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport | None:
        return self.sender.send(Written(buckets), version, servers, flush_cache=flush_cache)
