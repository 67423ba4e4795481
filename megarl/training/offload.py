"""Offloads a role: frees the device memory of its gradients, parameters and optimizer state, and brings them back.

It works on storages, not on tensors: a storage is resized to nothing and back, so that every view stays what it was.
Parameters and gradients are views of Megatron's packed buffers, optimizer shards are views of parameters, tied weights
are one tensor under two names; none of them has to be found and bound again. (Megatron's own `offload_to_cpu` of
optimizers binds new tensors, which leaves shards that were views of a parameter buffer behind.)

When a role has to be awake is not decided here: that is the engine's. Import only after
`models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Module

from megarl.core.errors import MegarlError
from megarl.core.platform import Platform, finish_copies, return_free_memory

Part = Literal["grads", "params", "optimizer"]
PARTS: tuple[Part, ...] = ("grads", "params", "optimizer")
PIECE_BYTES = 8 * 2**20
PINNED_BYTES = 2**28


class Host(Protocol):
    """Where the bytes of one part are while it is offloaded. keeps: what was put is there behind `get`, too."""

    keeps: bool

    def put(self, blocks: Sequence[Tensor]) -> None:
        """Keep a copy of the blocks, each [bytes] uint8 on the device; when it raises, nothing is kept."""

    def get(self, blocks: Sequence[Tensor]) -> None:
        """Write what was kept into blocks of the same sizes, in the same order."""


class MemoryHost:
    """Host memory beside the device's. It is kept for the next time: pinning costs more than copying.

    It is taken in parts of a power of two, and grows by more of them: torch rounds pinned memory up to one, up to twice as much,
    and gives back none that it has pinned.
    """

    keeps = True

    def __init__(self, *, pinned: bool = True, part_bytes: int = PINNED_BYTES) -> None:
        """pinned: locked in memory, so that copies run at the full speed of the link. part_bytes: of a part; the last is less."""
        self._pinned, self._part_bytes = pinned, part_bytes
        self._buffers: list[Tensor] = []

    def put(self, blocks: Sequence[Tensor]) -> None:
        """Copy to the host."""
        self._hold(sum(block.numel() for block in blocks))
        for block, kept in self._pairs(blocks):
            kept.copy_(block, non_blocking=True)

    def _hold(self, total: int) -> None:
        """Have memory for so many bytes."""
        left = total - sum(buffer.numel() for buffer in self._buffers)
        if left > 0 and self._buffers and self._buffers[-1].numel() < self._part_bytes:
            left += self._buffers.pop().numel()
        while left > 0:
            size = min(left, self._part_bytes)
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            left -= size

    def get(self, blocks: Sequence[Tensor]) -> None:
        """Copy to the device."""
        for block, kept in self._pairs(blocks):
            block.copy_(kept, non_blocking=True)

    def _pairs(self, blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the blocks, each with its place on the host."""
        buffers = iter(self._buffers)
        room = torch.empty(0, dtype=torch.uint8)
        for block in blocks:
            start = 0
            while start < block.numel():
                room = room if room.numel() else next(buffers)
                size = min(block.numel() - start, room.numel())
                yield block[start : start + size], room[:size]
                start, room = start + size, room[size:]


class FileHost:
    """A file without a name, for devices that are the host itself: it goes with the process, however that ends.

    The system may keep the file's pages in memory for as long as nobody needs them; they are not the process's.
    """

    keeps = False

    def __init__(self, folder: Path | None = None) -> None:
        """folder: on the file system that shall hold the bytes; None is the system's folder for temporary files."""
        self._folder = folder
        self._file: io.BufferedRandom | None = None

    def put(self, blocks: Sequence[Tensor]) -> None:
        """Write to the file. Raises MegarlError where there is no room."""
        try:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (it stays open for as long as the part is offloaded)
            for piece in _pieces(blocks):
                file.write(piece.clone().numpy().data)
            file.flush()
        except OSError as error:
            total = sum(block.numel() for block in blocks)
            folder = self._folder or tempfile.gettempdir()
            raise MegarlError(
                f"A role that is offloaded needs {total:,} bytes in {folder}: {error}. Make room there, set TMPDIR to a "
                "folder on another file system, or leave the role on the device."
            ) from error
        self._file = file

    def get(self, blocks: Sequence[Tensor]) -> None:
        """Read the file back, and give it up."""
        assert self._file is not None
        with self._file as file:
            file.seek(0)
            for piece in _pieces(blocks):
                staging = np.empty(piece.numel(), np.uint8)
                read = file.readinto(staging.data)
                assert read == piece.numel(), (read, piece.numel())
                piece.copy_(torch.from_numpy(staging))
        self._file = None


def _pieces(blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of a few MiB: a storage that numpy has seen can never be resized, so bytes go through a copy."""
    return (piece for block in blocks for piece in block.split(PIECE_BYTES))


@dataclass(frozen=True)
class _Written:
    """A part as it was: where it lay, and torch's count of what was written into each of its tensors."""

    storages: list[torch.UntypedStorage]
    counts: list[int]

    def same(self, other: _Written) -> bool:
        """Whether nothing was written between the two. Memory is not told by its address, which goes and comes."""
        mine, theirs = ([storage._cdata for storage in each.storages] for each in (self, other))
        return mine == theirs and self.counts == other.counts


class Offload:
    """The memory of one role on this rank, in three parts that sleep and wake each for itself.

    grads: gradient buffers. They are not kept: they wake up as zeros, which is how every update begins.
    params: parameters and the module's buffers, with the buffers that Megatron's data parallel packs them into.
    optimizer: what the optimizer alone owns: moments, momentum, float32 main weights.

    Adam in float32 updates parameters in place through views: they belong to `params`.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        optimizer: Any | None,
        platform: Platform,
        make_host: Callable[[], Host] | None = None,
    ) -> None:
        """All parts are awake.

        chunks: one model a virtual stage, in Megatron's DistributedDataParallel or, for a frozen role, bare.
        optimizer: Megatron's, or a chain of them; None for a frozen role.
        make_host: where a part is offloaded, called for each; where the platform says when not given.
        """
        self._chunks, self._optimizer = list(chunks), optimizer
        self._platform = platform
        make_host = make_host or (MemoryHost if platform.has_device_memory else FileHost)
        self._hosts: dict[Part, Host] = {part: make_host() for part in PARTS if part != "grads"}
        # Storages of a sleeping part with their sizes.
        self._offloaded: dict[Part, list[tuple[torch.UntypedStorage, int]]] = {}
        # Of a frozen role: what the host's copy was made of.
        self._copied: dict[Part, _Written] = {}

    @property
    def asleep(self) -> tuple[Part, ...]:
        """The parts that sleep."""
        return tuple(part for part in PARTS if part in self._offloaded)

    def device_bytes(self) -> dict[Part, int]:
        """Bytes that each part holds on the device now."""
        return {part: sum(storage.nbytes() for storage in self._storages(part)) for part in PARTS}

    def sleep(self, parts: Iterable[Part] = PARTS) -> int:
        """Free the device memory of these parts; returns the bytes freed. A part that sleeps already stays as it is.

        Raises MegarlError when the host has no room: that part, and those behind it, are then awake and whole.
        """
        freed = 0
        for part in _ordered(parts):
            if part not in self._offloaded:
                freed += self._sleep(part)
        # A device's allocator keeps what any operation has freed, and servers may need it. A host's heap goes back with
        # what sleeps, and where `Rank` says: fresh pages cost more than arithmetic on them.
        if freed or self._platform.has_device_memory:
            return_free_memory(self._platform)
        return freed

    def wake(self, parts: Iterable[Part] = PARTS) -> int:
        """Bring these parts back, bit for bit (gradients: as zeros); returns the bytes that they take on the device."""
        taken = 0
        for part in _ordered(parts):
            if part in self._offloaded:
                taken += self._wake(part)
        return taken

    def _sleep(self, part: Part) -> int:
        if part == "grads" and self._optimizer is not None:
            self._optimizer.zero_grad()  # the last step's gradients may be copies of their own
        storages = self._storages(part)
        fixed = [storage.nbytes() for storage in storages if not storage.resizable()]
        assert not fixed, f"{part}: storages of {fixed} bytes belong to somebody else"
        if part != "grads":
            self._copy_to_host(part, storages)
        self._offloaded[part] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(size for _, size in self._offloaded[part])

    def _copy_to_host(self, part: Part, storages: list[torch.UntypedStorage]) -> None:
        """Copy the part, unless the host still has it: of weights that have no optimizer, and that nobody wrote since."""
        written = None
        if self._optimizer is None and self._hosts[part].keeps:
            written = _Written(storages, [tensor._version for tensor in self._tensors(part)])
        if written is None or part not in self._copied or not written.same(self._copied[part]):
            self._copied.pop(part, None)
            self._hosts[part].put([_block(storage) for storage in storages])
            if written is not None:
                self._copied[part] = written
        finish_copies(self._platform)  # nobody reads the memory any more, on whatever stream

    def _wake(self, part: Part) -> int:
        offloaded = self._offloaded[part]
        for storage, size in offloaded:
            storage.resize_(size)
        blocks = [_block(storage) for storage, _ in offloaded]
        if part == "grads":
            for block in blocks:
                block.zero_()
        else:
            self._hosts[part].get(blocks)
            finish_copies(self._platform)
        del self._offloaded[part]
        return sum(size for _, size in offloaded)

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """The part's storages that have memory on the device, each once; one that two parts use is the earlier part's."""
        seen: set[int] = set()
        for each in PARTS:
            found: dict[int, torch.UntypedStorage] = {}
            for tensor in self._tensors(each):
                storage = tensor.untyped_storage()
                if storage.nbytes() and tensor.device.type == self._platform.device:
                    found.setdefault(storage.data_ptr(), storage)
            if each == part:
                return [storage for pointer, storage in found.items() if pointer not in seen]
            seen |= found.keys()
        raise AssertionError(part)

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "grads":
            yield from (buffer.grad_data for buffer in self._packed())
        elif part == "params":
            yield from (buffer.param_data for buffer in self._packed() if buffer.param_data is not None)
            for chunk in self._chunks:
                # Megatron's data parallel hides the module's `buffers()` behind a list of its own.
                module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
                yield from module.parameters()
                yield from module.buffers()
        elif self._optimizer is not None:
            for member in self._optimizer.chained_optimizers:
                yield from _owned_tensors(member.optimizer)

    def _packed(self) -> Iterator[Any]:
        """The buffers that Megatron's data parallel packs gradients, and sometimes parameters, into."""
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel):
                yield from chunk.buffers
                yield from chunk.expert_parallel_buffers


def _owned_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """What a torch optimizer updates and remembers; nothing where this rank has nothing to update."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _block(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage: [bytes] uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _ordered(parts: Iterable[Part]) -> list[Part]:
    """The parts in the order of PARTS. Raises MegarlError for what is none."""
    asked = set(parts)
    unknown = sorted(asked - set(PARTS))
    if unknown:
        raise MegarlError(f"A role has the parts {', '.join(PARTS)}; got {', '.join(unknown)}.")
    return [part for part in PARTS if part in asked]
