"""Writes the trainer's weights into a store of versions, which the servers' nodes read for themselves (fetch.py).

A version is whole, or has what changed since the last one that these ranks wrote. Each rank keeps, in its temporary folder, the
plain files of what it wrote last: no second copy of the weights is in memory.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.disk import FULL
from megarl.core.errors import DiskFullError, MegarlError, SyncError
from megarl.models.all_gather import all_gather_objects
from megarl.models.hf_read import STORED_DTYPES
from megarl.models.hf_weights import Bucket
from megarl.sync.delta import Bytes, encode
from megarl.sync.orphans import owner, remove_orphans
from megarl.sync.outgoing import Outgoing
from megarl.sync.session import Stopwatch, SyncReport
from megarl.sync.store import Manifest, Store, StoredFile, StoredTensor, crc32, side_by_side
from megarl.sync.tensor_files import Mark, Named, TensorFile, mark, write_file

# A server that joins late reads a whole version and at most so many differences.
MOST_DELTAS = 16
KEPT = "sent-"
STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


class DiskSender:
    """The writing end. Every rank of the trainer makes one and calls `write`; rank 0 says when a version is there.

    control: the trainer ranks' own process group; None where there is one rank. whole_bytes: of the weights. deltas: off, every
    version is whole, so that servers can read it where it is.
    """

    def __init__(
        self,
        *,
        rank: int,
        store: Store,
        whole_bytes: int,
        deltas: bool = True,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self._rank = rank
        self._store = store
        self._whole_bytes = whole_bytes
        self._deltas = deltas
        self._control = control
        self._kept: Path | None = None
        self._marks: dict[str, Mark] = {}  # of the files in there
        # What a server reads that has nothing; the last one's plain files are kept. Nothing: the next version is whole.
        self._chain: list[Manifest] = []
        self._watch = Stopwatch()

    def write(self, weights: Outgoing, files: Sequence[str], version: int) -> SyncReport | None:
        """Write a version; the report, on rank 0, names no server: none has it yet. files: of each bucket.

        One that is written again is written whole: somebody could not read it. Raises DiskFullError, and SyncError where
        another rank failed.
        """
        began, watch, self._watch = time.monotonic(), Stopwatch(), Stopwatch()
        base = self._base(version)
        trouble = self._begun(version, base)
        chain, self._chain = self._chain, []
        written: list[StoredFile] = []
        pending: Future[StoredFile] | None = None
        with ThreadPoolExecutor(1) as writer:  # one bucket is written while the next is gathered
            for number, (parcel, name) in enumerate(zip(weights.parcels, files, strict=True)):
                tensors = weights.gather(number)  # whatever happens: the other ranks gather it too
                watch.lap("gather")
                if parcel.sender != self._rank or trouble is not None:
                    continue
                try:
                    written += [pending.result()] if pending is not None else []
                    bucket = list(zip(parcel.names, tensors, strict=True))
                    pending = writer.submit(self._write, name, bucket, version, base)
                except Exception as error:  # raised below: the others wait for this rank's word first
                    trouble, pending = error, None
                watch.lap("wait")
            try:
                written += [pending.result()] if pending is not None else []
            except Exception as error:
                trouble = error
        watch.lap("wait")
        manifest = self._agreed(written, trouble, version, base)
        self._chain = [manifest] if base is None else [*chain, manifest]
        if self._rank != 0:
            return None
        self._store.prune({each.version for each in self._chain})
        watch.lap("commit")
        pieces = {**watch.seconds, **self._watch.seconds}
        return SyncReport(version, (), {}, manifest.num_bytes, time.monotonic() - began, 1, pieces)

    def close(self) -> None:
        """Forget what was kept; the next version is whole."""
        self._forget()
        self._chain = []

    def _forget(self) -> None:
        if self._kept is not None:
            shutil.rmtree(self._kept, ignore_errors=True)
        self._kept, self._marks = None, {}

    def _base(self, version: int) -> Manifest | None:
        """What this version is the difference to, the same on every rank; None: it is whole."""
        chain, is_kept = self._chain, self._is_kept()
        if not is_kept:
            self._forget()
        good = is_kept and self._deltas and bool(chain) and chain[-1].version < version and len(chain) <= MOST_DELTAS
        good = good and sum(each.num_bytes for each in chain[1:]) < chain[0].num_bytes  # else they save nothing
        return chain[-1] if all(self._all(good)) else None

    def _is_kept(self) -> bool:
        """Whether this rank's plain files are as it left them: who cleans temporary folders may have been there."""
        try:
            return all(mark(self._folder() / name) == left for name, left in self._marks.items())
        except OSError:
            return False

    def _begun(self, version: int, base: Manifest | None) -> Exception | None:
        trouble: Exception | None = None
        if self._rank == 0:
            try:
                self._store.begin(version, self._whole_bytes if base is None else base.num_bytes)
            except Exception as error:
                trouble = error
        return next(filter(None, self._all(_sendable(trouble, version))), None)

    def _agreed(
        self, files: list[StoredFile], trouble: Exception | None, version: int, base: Manifest | None
    ) -> Manifest:
        """All ranks' files as a version that is there. Raises, on every rank, where one of them failed."""
        told = self._all((files, _sendable(trouble, version)))
        manifest = Manifest(version, None if base is None else base.version, tuple(f for each, _ in told for f in each))
        failed = [error for _, error in told if error is not None]
        if self._rank == 0 and not failed:
            try:
                self._store.commit(manifest)
            except Exception as error:
                trouble = error
        if self._rank == 0 and (failed or trouble is not None):
            self._store.discard(version)
        if trouble is not None:
            self._all(_sendable(trouble, version))
            raise trouble
        for other in [*failed, *filter(None, self._all(None))]:
            raise other
        return manifest

    def _write(self, name: str, bucket: Bucket, version: int, base: Manifest | None) -> StoredFile:
        named, contents = [_named(*each) for each in bucket], [_content(tensor) for _, tensor in bucket]
        before = None if base is None else base.by_name.get(name)
        if base is not None and (before is None or before.plain != tuple(named)):
            raise SyncError(f"{name} of weight version {version} has other tensors than in version {base.version}.")
        with self._store.explained(self._whole_bytes):
            path = self._store.files(version) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if before is None:
                return self._write_whole(path, named, contents)
            return self._write_changed(path, named, contents, before)

    def _write_whole(self, path: Path, named: list[Named], contents: list[Bytes]) -> StoredFile:
        sums = side_by_side(crc32, contents)
        self._watch.lap("compare")
        num_bytes = write_file(path, named, contents, lasting=True)
        if self._deltas:
            with self._keeping():
                _link_or_copy(path, self._folder() / path.name)
                self._marks[path.name] = mark(self._folder() / path.name)
        self._watch.lap("write")
        tensors = (StoredTensor(*each, crc, True) for each, crc in zip(named, sums, strict=True))
        return StoredFile(path.name, num_bytes, tuple(tensors))

    def _write_changed(self, path: Path, named: list[Named], contents: list[Bytes], before: StoredFile) -> StoredFile:
        kept = TensorFile(self._folder() / path.name)

        def change(each: tuple[StoredTensor, Bytes]) -> tuple[StoredTensor, bytes | None]:
            stored, new = each
            old = kept.read(stored.name)
            if (old == new).all():
                return StoredTensor(*stored.named, stored.crc32, False), None
            return StoredTensor(*stored.named, crc32(new), True), encode(new, old, stored.width)

        found = side_by_side(change, zip(before.tensors, contents, strict=True))
        tensors = tuple(stored for stored, _ in found)
        self._watch.lap("compare")
        payloads = [(stored.name, payload) for stored, payload in found if payload is not None]
        if not payloads:
            return StoredFile(path.name, 0, tensors)
        packed: list[Named] = [(name, "U8", (len(payload),)) for name, payload in payloads]
        num_bytes = write_file(path, packed, (_bytes(payload) for _, payload in payloads), lasting=True)
        temporary = kept.path.with_suffix(".tmp")
        with self._keeping():
            write_file(temporary, named, contents, lasting=False)
            temporary.rename(kept.path)
            self._marks[path.name] = mark(kept.path)
        self._watch.lap("write")
        return StoredFile(path.name, num_bytes, tensors)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Within, plain files are kept: another disk than the store's may be full."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            folder = self._kept or Path(tempfile.gettempdir())  # it is full before there is a folder of ours
            raise DiskFullError(
                f"No room in {folder} on {socket.gethostname()} for the rank's part of a weight version, with which the next one "
                f"is compared: {shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free. Make room, or have TMPDIR name a "
                "larger disk."
            ) from error

    def _folder(self) -> Path:
        """This rank's plain files, in what goes with the run however it ends. Those of ranks that were killed go now."""
        if self._kept is None:
            remove_orphans(Path(tempfile.gettempdir()), KEPT)
            self._kept = Path(tempfile.mkdtemp(prefix=KEPT, suffix=owner()))
        return self._kept

    def _all(self, mine: Any) -> list[Any]:
        """What every rank passes, on every rank."""
        return [mine] if self._control is None else all_gather_objects(mine, self._control)


def _sendable(trouble: Exception | None, version: int) -> MegarlError | None:
    """What the other ranks are told of it."""
    if trouble is None or isinstance(trouble, MegarlError):
        return trouble
    return SyncError(f"Weight version {version} could not be written: {type(trouble).__name__}: {trouble}")


def _named(name: str, tensor: Tensor) -> Named:
    return name, STORED_NAMES[tensor.dtype], tuple(tensor.shape)


def _content(tensor: Tensor) -> Bytes:
    """[bytes] uint8, in the host's memory. A copy: numpy would hold on to storage that a role frees when it is offloaded."""
    found: Bytes = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _bytes(payload: bytes) -> Bytes:
    return np.frombuffer(payload, np.uint8)


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
