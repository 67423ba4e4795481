"""Whole tensors as what a broadcast's ranks hold, and senders of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megarl.models.hf_weights import Bucket
from megarl.serving.client import ServerEndpoint
from megarl.sync.broadcast import BroadcastSender
from megarl.sync.disk import DiskSender
from megarl.sync.parcel import Parcel
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender


class Given:
    """One rank's end. Each bucket is its sender's. before: called with the number of each bucket before it is gathered.

    senders: of each bucket; members: of each sender's group.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        before: Callable[[int], None] = lambda _: None,
        *,
        rank: int = 0,
        senders: Sequence[int] | None = None,
        helped: Sequence[int] = (),
    ) -> None:
        self._tensors, self._before, self._rank = list(buckets), before, rank
        self.parcels = [
            Parcel(
                sender,
                (sender, *(helper for helper in helped if helper != sender)),
                tuple(name for name, _ in bucket),
                tuple(tensor.dtype for _, tensor in bucket),
                tuple(tuple(tensor.shape) for _, tensor in bucket),
            )
            for sender, bucket in zip(senders or [0] * len(buckets), buckets, strict=True)
        ]

    def gather(self, number: int) -> list[Tensor]:
        self._before(number)
        mine = self.parcels[number].sender == self._rank
        return [tensor for _, tensor in self._tensors[number]] if mine else []

    def room(self, number: int) -> None:
        return None


class OneRank(ABC):
    """A sender of one rank for whole tensors, called the same whatever way they go."""

    sender: BroadcastSender | SharedMemorySender | DiskSender

    def send(
        self,
        buckets: Callable[[], Iterator[Bucket]],
        version: int,
        servers: Sequence[ServerEndpoint],
        *,
        flush_cache: bool = True,
    ) -> SyncReport | None:
        """As `megarl.sync.transport.Transport` does."""
        return self.sent(list(buckets()), version, servers, flush_cache)

    @abstractmethod
    def sent(
        self, buckets: list[Bucket], version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport | None:
        """What `send` gives, of all buckets at once."""

    def close(self) -> None:
        self.sender.close()


class BroadcastBuckets(OneRank):
    """Over gloo."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.sender: BroadcastSender = BroadcastSender(
            rank=0, host="127.0.0.1", device="cpu", backend="gloo", timeout_s=timeout_s
        )

    def sent(
        self, buckets: list[Bucket], version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport | None:
        return self.sender.send(Given(buckets), version, servers, flush_cache=flush_cache)
