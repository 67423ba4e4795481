"""Buckets of whole tensors as what one rank writes into shared memory, and a sender that is called as a broadcast is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megarl.models.hf_pieces import Entry, lay_out
from megarl.serving.client import ServerEndpoint
from megarl.sync.broadcast import Bucket
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender


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


class SharedBuckets:
    """A SharedMemorySender of one rank for whole tensors."""

    def __init__(self, registry: Path, timeout_s: float = 60.0, join_s: float = 30.0) -> None:
        self.sender = SharedMemorySender(rank=0, writers=(0,), registry=registry, timeout_s=timeout_s, join_s=join_s)

    def send(
        self,
        buckets: Callable[[], Iterator[Bucket]],
        version: int,
        servers: Sequence[ServerEndpoint],
        *,
        flush_cache: bool = True,
    ) -> SyncReport | None:
        return self.sender.send(Written(list(buckets())), version, servers, flush_cache=flush_cache)

    def close(self) -> None:
        self.sender.close()
