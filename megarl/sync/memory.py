"""The memory that buckets take turns in: one piece of a node's for all, or one on each device that servers share with ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import MegarlError, SyncError
from megarl.models.all_gather import all_gather_objects
from megarl.models.hf_pieces import Entry
from megarl.serving.client import ServerEndpoint
from megarl.sync.segments import Handle, Segment


class Pieces(Protocol):
    """What is sent: buckets that every rank knows, and that each rank fills where it holds something."""

    @property
    def buckets(self) -> Sequence[Sequence[Entry]]:
        """What lies where in each bucket."""
        ...

    def write(self, number: int, flat: Tensor) -> None:
        """Write this rank's rows of a bucket into its memory; for `DeviceMemory` all of it, where the rank has memory.

        Every rank is asked, for what it gives the others.
        """
        ...


class Memory(Protocol):
    """One rank's end. Every rank makes one, and makes the same calls: they are collective, but for `payloads` and `close`."""

    @property
    def size(self) -> int:
        """Bytes that are taken."""
        ...

    @property
    def answered_early(self) -> Collection[str]:
        """Names of servers that answer that a bucket is loaded while ranks of theirs may read it still."""
        ...

    def take(self, num_bytes: int) -> None:
        """Take so much, anew. Raises SyncError where it is not to be had."""
        ...

    def fill(self, pieces: Pieces, number: int, start: int, readers: Collection[str]) -> None:
        """Write a bucket from byte `start` on; returns once all ranks have. Raises where this rank could not, or another.

        readers: names of the servers that are to be told of it.
        """
        ...

    def payloads(self, server: ServerEndpoint, bucket: Sequence[Entry], start: int) -> list[str]:
        """On rank 0: what each rank of a server is told of the bucket that was filled last."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class NodeMemory:
    """One piece of shared memory, which rank 0 makes, all writers write into and all servers read from.

    writers: the ranks that hold the model's first copy, all on the servers' node. registry: file with the names of shared
    memory that is removed when the run ends. device: of this rank. control: the trainer ranks' own process group, which takes
    tensors of it; None where there is one rank.
    """

    answered_early: Collection[str] = ()  # what a CPU copies it has copied when it goes on

    def __init__(
        self,
        *,
        rank: int,
        writers: Collection[int],
        registry: Path,
        device: str,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        assert 0 in writers, writers
        self._rank, self._writes, self._device = rank, rank in writers, device
        self._registry, self._control = registry, control
        self._segment: Segment | None = None
        self.size = 0

    def take(self, num_bytes: int) -> None:
        """As `Memory` says."""
        self.close()
        handles: list[Any] = [None]
        try:
            if self._rank == 0:
                self._segment = Segment.make(num_bytes, self._registry)
                handles = [self._segment.handle]
        except SyncError as error:
            raise SyncError(
                f"The weight sync needs {num_bytes / 2**20:,.0f} MiB of shared memory. {error} Or set sync.transport to "
                "broadcast, which does without."
            ) from error
        finally:
            if self._control is not None:
                dist.broadcast_object_list(handles, src=0, group=self._control)
        if self._rank != 0:
            handle = _given(handles[0])
            self._segment = Segment.open(handle) if self._writes else None
        self.size = num_bytes

    def fill(self, pieces: Pieces, number: int, start: int, readers: Collection[str]) -> None:
        """As `Memory` says."""
        trouble: Exception | None = None
        if self._segment is not None:
            try:
                pieces.write(number, self._segment.flat[start:])
            except Exception as error:  # raised below: the others wait for this rank's word first
                trouble = error
        if self._control is not None:
            failed = torch.tensor([int(trouble is not None)], device=self._device)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._control)
            if failed.item():
                _refuse(all_gather_objects(_reason(trouble), self._control), trouble)
        if trouble is not None:
            raise trouble

    def payloads(self, server: ServerEndpoint, bucket: Sequence[Entry], start: int) -> list[str]:
        """As `Memory` says: all ranks of a server read the same."""
        assert self._segment is not None
        return [self._segment.payload(bucket, start, num_readers=server.tp)] * server.tp

    def close(self) -> None:
        """Let go of it; rank 0, which made it, removes it."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self.size = None, 0


class OnDevice(Protocol):
    """Memory of one device. flat: [bytes] uint8."""

    flat: Tensor

    def payload(self, bucket: Sequence[Entry], start: int, num_readers: int) -> str:
        """What `/update_weights_from_tensor` takes as a flattened bucket of what is there from byte `start` on."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class DeviceMemory:
    """A piece on each device that a server has in common with a rank: that rank puts whole buckets together for the server there.

    hosts: by server, the rank beside each of its ranks. make: takes so many bytes on this rank's device. control: the trainer
    ranks' own process group; None where there is one rank.
    """

    def __init__(
        self,
        *,
        rank: int,
        hosts: Mapping[str, Sequence[int]],
        make: Callable[[int], OnDevice],
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self._readers = [
            (name, index) for name, ranks in hosts.items() for index, host in enumerate(ranks) if host == rank
        ]
        # A server's ranks have all begun to copy when the first answers, which waits for its own device alone.
        self.answered_early: Collection[str] = frozenset(name for name, ranks in hosts.items() if len(ranks) > 1)
        self._make, self._control = make, control
        self._memory: OnDevice | None = None
        self._payloads: dict[tuple[str, int], str] = {}
        self.size = 0

    def take(self, num_bytes: int) -> None:
        """As `Memory` says."""
        self.close()
        trouble: Exception | None = None
        try:
            self._memory = self._make(num_bytes) if self._readers else None
        except (MegarlError, RuntimeError) as error:  # torch's own, out of memory, is a RuntimeError
            trouble = error
        self._share({}, trouble)
        self.size = num_bytes

    def fill(self, pieces: Pieces, number: int, start: int, readers: Collection[str]) -> None:
        """As `Memory` says. Gathering is collective: a rank without a server takes part as well.

        A rank that cannot gather raises at once: the others wait for what it has, and would never come to hear of it.
        Memory of a device is held until whoever has been given a handle has let go of it: a server that takes no part gets none.
        """
        pieces.write(number, torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.flat[start:])
        trouble: Exception | None = None
        told: dict[tuple[str, int], str] = {}
        try:
            if self._memory is not None:
                bucket = pieces.buckets[number]
                wanted = [reader for reader in self._readers if reader[0] in readers]
                told = {reader: self._memory.payload(bucket, start, num_readers=1) for reader in wanted}
        except Exception as error:  # raised below: the others wait for this rank's word first
            trouble = error
        self._share(told, trouble)

    def _share(self, told: dict[tuple[str, int], str], trouble: Exception | None) -> None:
        mine = (told, _reason(trouble))
        everybody = [mine] if self._control is None else all_gather_objects(mine, self._control)
        _refuse([reason for _, reason in everybody], trouble)
        self._payloads = {reader: payload for each, _ in everybody for reader, payload in each.items()}

    def payloads(self, server: ServerEndpoint, bucket: Sequence[Entry], start: int) -> list[str]:
        """As `Memory` says: each rank of a server reads what the rank beside it has."""
        return [self._payloads[server.name, index] for index in range(server.tp)]

    def close(self) -> None:
        """Give it back."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self.size = None, 0


def _reason(trouble: Exception | None) -> str | None:
    """What the other ranks are told of it."""
    if trouble is None or isinstance(trouble, MegarlError):
        return None if trouble is None else str(trouble)
    return f"{type(trouble).__name__}: {trouble}"


def _refuse(reasons: Sequence[str | None], trouble: Exception | None) -> None:
    """Raises this rank's own trouble, else SyncError that names each rank that has one. reasons: by rank."""
    if trouble is not None:
        raise trouble
    said = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if said:
        raise SyncError(f"Another rank could not write its part of the weights. {'; '.join(said)}")


def _given(handle: Handle | None) -> Handle:
    if handle is None:
        raise SyncError("Rank 0 could not take the shared memory of the weight sync; its own error says why.")
    return handle
