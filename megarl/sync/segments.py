"""Memory that unrelated processes of one node share, as tensors: torch's own `file_system` sharing, by name.

torch gives every such file a reference count and a small process (torch_shm_manager) that knows its name; SGLang's
unpickler lets through what torch pickles for it. A segment is removed by who made it, or by the run's janitor, which has
its name. torch would remove it as well, where the count comes to nothing, and end a process that finds it removed already:
the maker counts itself twice.
"""

from __future__ import annotations

import base64
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.core.errors import SyncError
from megarl.core.janitor import SHARED_MEMORY, register_segments
from megarl.models.hf_pieces import Entry

Handle = tuple[bytes, bytes, int]  # the manager's socket, the segment's name, its bytes


class Segment:
    """Shared memory as a tensor. flat: [bytes] uint8."""

    def __init__(self, storage: Any, handle: Handle, *, owned: bool) -> None:
        self._storage, self.handle, self._owned = storage, handle, owned
        self.flat: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)

    @classmethod
    def make(cls, num_bytes: int, registry: Path) -> Segment:
        """New memory of this size, taken at once; its name goes to the registry of what is removed with the run.

        Raises SyncError where there is no room for it.
        """
        free = shutil.disk_usage(SHARED_MEMORY).free
        try:
            if num_bytes > free:
                raise RuntimeError(f"{free / 2**20:,.0f} MiB are free")
            storage: Any = torch.UntypedStorage._new_using_filename_cpu(num_bytes)  # takes all of its pages
        except RuntimeError as error:
            raise SyncError(
                f"{SHARED_MEMORY} has no room for {num_bytes / 2**20:,.0f} MiB: {error}. Make it larger (docker run --shm-size), "
                "or lower sync.bucket_mb."
            ) from error
        segment = cls(storage, storage._share_filename_cpu_(), owned=True)
        storage._shared_incref()
        register_segments(registry, [segment.path.name])
        return segment

    @classmethod
    def open(cls, handle: Handle) -> Segment:
        """A segment that another process of this node made."""
        storage: Any = torch.UntypedStorage._new_shared_filename_cpu(*handle)
        return cls(storage, handle, owned=False)

    @property
    def path(self) -> Path:
        """The file behind it."""
        return SHARED_MEMORY / self.handle[1].decode().removeprefix("/")

    def payload(self, bucket: Sequence[Entry], start: int, num_readers: int) -> str:
        """What `/update_weights_from_tensor` takes as a flattened bucket of what is in the segment from byte `start` on.

        Each of the readers counts itself out once it has let go, so they are counted in here.
        """
        for _ in range(num_readers):
            self._storage._shared_incref()
        tensor = Shared(
            reductions.rebuild_tensor, torch.Tensor, _typed(self.handle), (0, (self.handle[2],), (1,), False)
        )
        return flattened(tensor, bucket, start)

    def share(self) -> Handle:
        """What another process of this node opens it with."""
        return self.handle

    def hide(self) -> None:
        """Remove its name: who has opened it keeps the memory, and it is gone once all of them are."""
        if self._owned:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the memory; who made it removes its name as well. Others that have it mapped keep it until they let go."""
        self.hide()
        self.flat, self._storage = torch.empty(0, dtype=torch.uint8), None


def flattened(tensor: Shared, bucket: Sequence[Entry], start: int) -> str:
    """A bucket that begins at byte `start` of the memory of `tensor`, as `/update_weights_from_tensor` takes it."""
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            start_idx=start + entry.start,
            end_idx=start + entry.start + entry.nbytes,
            numel=entry.nbytes,
        )
        for entry in bucket
    ]
    return base64.b64encode(pickle.dumps({"flattened_tensor": tensor, "metadata": metadata})).decode()


class Shared:
    """Pickles as a call: what torch itself writes, without setting its sharing strategy for the process."""

    def __init__(self, rebuild: Any, *arguments: Any) -> None:
        self._call = rebuild, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def _typed(handle: Handle) -> Shared:
    untyped = Shared(reductions.rebuild_storage_filename, torch.UntypedStorage, *handle)
    return Shared(reductions.rebuild_typed_storage, untyped, torch.uint8)
