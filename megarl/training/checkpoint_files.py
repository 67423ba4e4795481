"""Writes a rank's share of a Megatron checkpoint (torch_dist) from the process itself, at once or from a thread.

Megatron's own writer hands the data to forked processes, and their results to a server process of multiprocessing. A
fork of a process with running threads may deadlock, and on a host without device memory its copy is made page by page
while training writes. Here a rank writes one file: at once, tensor by tensor, or from a copy on the host, in a thread
that takes part in no collective. Planning, metadata and the format are Megatron's and torch's.
Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from megarl.core.errors import UserError
from megarl.core.log import get_logger
from megarl.training.manifest import TensorEntry

log = get_logger(__name__)

METADATA, EXTRA = ".metadata", "_extra_state"
# What a checkpoint's `.metadata` is made of: torch's records, and of other modules these names.
RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
NAMED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class RankWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """One file of this rank. Megatron plans through it; `write` may run in another thread."""

    def __init__(self, folder: Path, *, copy: bool, spare: Collection[int] = ()) -> None:
        """copy: take a copy of the data on the host while planning, so that training may go on during `write`.

        spare: addresses of storages on the host that nobody else has: those need no copy.
        """
        super().__init__(str(folder), thread_count=1)
        self._copy, self._spare = copy, spare
        self._name = ""
        self._data: list[tuple[Any, Any]] = []
        self._results: list[WriteResult] = []
        self.refused: OSError | None = None

    @property
    def file(self) -> Path | None:
        """The file of this rank; None where the others hold everything."""
        return Path(self.checkpoint_dir) / self._name if self._data or self._results else None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called by Megatron: collect what this rank writes."""
        self._name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if self._copy and item.type != WriteItemType.BYTE_IO and not self._is_spare(data):
                data = data.detach().to("cpu", copy=True)
            self._data.append((item, data))

    def _is_spare(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._spare

    def write(self) -> None:
        """Write the file and wait until it is on the disk. Raises OSError when the disk is full."""
        if not self._data:
            return
        with open(Path(self.checkpoint_dir) / self._name, "wb") as stream:
            for index, (item, data) in enumerate(self._data):
                content = _own_storage(data) if isinstance(data, torch.Tensor) else data
                self._results.append(
                    _write_item(
                        self.transforms,
                        stream,
                        content,
                        item,
                        self._name,
                        serialization_format=SerializationFormat.TORCH_SAVE,
                    )
                )
                self._data[index] = (item, None)  # let go of the copy
            stream.flush()
            os.fsync(stream.fileno())
        self._data.clear()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by Megatron on rank 0, while the others wait for it: what the system refuses is kept for `RankStrategy`."""
        try:
            super().finish(metadata, results)
        except OSError as error:
            self.refused = error

    def retrieve_write_results(self) -> list[WriteResult]:
        """Called by Megatron when all ranks have written."""
        return self._results


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, and not a view: that would be written with all that it is a view of."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class RankStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's save strategy with `RankWriter` in its place; remembers what the checkpoint holds."""

    def __init__(self, *, copy: bool, spare: Collection[int] = ()) -> None:
        """copy, spare: as `RankWriter` has them."""
        super().__init__("torch_dist", 1)
        self._copies, self._spare = copy, spare
        self.writer: RankWriter | None = None
        self.metadata: Metadata | None = None  # on rank 0

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Plan the save together with the other ranks; nothing is written yet but small common data."""
        from megatron.core.dist_checkpointing.strategies import torch as upstream

        state, _, _ = upstream._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self.writer = RankWriter(Path(checkpoint_dir), copy=self._copies, spare=self._spare)
        planned, *_ = upstream.save_state_dict_async_plan(
            upstream.mcore_to_pyt_state_dict(state, False),
            self.writer,
            None,
            0,
            planner=upstream.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        self.metadata = planned[1]

        def finalize() -> None:
            upstream.save_state_dict_async_finalize(*planned)

        return AsyncRequest(self.writer.write, (), [finalize])

    def complete(self, folder: Path) -> None:
        """On rank 0, when all files are written: note which format they are in. Raises OSError, also of what came before."""
        assert self.writer is not None
        if self.writer.refused is not None:
            raise self.writer.refused
        save_config(CheckpointingConfig(self.backend, self.version), str(folder))

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor of the checkpoint, by name; only rank 0 knows."""
        assert self.metadata is not None
        entries = {}
        for name, stored in sorted(self.metadata.state_dict_metadata.items()):
            if isinstance(stored, TensorStorageMetadata):
                dtype = stored.properties.dtype
                entries[name] = TensorEntry(
                    tuple(stored.size), str(dtype).removeprefix("torch."), stored.size.numel() * dtype.itemsize
                )
        return entries


class _Names(pickle.Unpickler):
    """Reads what stands in a checkpoint's `.metadata`, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        """What the file names. Raises UserError for what no checkpoint needs."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in RECORDS or (module, name) in NAMED or (module == "torch" and "." not in name):
            found = super().find_class(module, name)
            own = isinstance(found, type) and found.__module__ == module
            if (module, name) in NAMED or isinstance(found, torch.dtype) or (module in RECORDS and own):
                return found
        raise UserError(f"it names {module}.{name}, which is nothing that a checkpoint is made of")


def _member(kind: Any, name: str) -> Any:
    """A member of an enumeration: early versions of Python 3.11, such as Debian 12's 3.11.2, pickle those by `getattr`."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise UserError(f"it names {name} of {kind}, which is nothing that a checkpoint is made of")


def check_metadata(folder: Path) -> None:
    """See that a checkpoint's `.metadata`, a pickle that torch opens as it is, only says where tensors are.

    Raises UserError: it, or what it says is to be opened as a pickle, may run anything. What is broken is told by who reads it.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            stored = _Names(file).load().state_dict_metadata
        pickled = [name for name, each in stored.items() if isinstance(each, BytesStorageMetadata)]
        if odd := [name for name in pickled if EXTRA not in name]:
            raise UserError(f"it has {odd[0]} as a pickle, and no tensor")
    except UserError as error:
        raise UserError(
            f"{path}: {error}. It was not written by megarl, and opening it may run somebody's code. "
            "Take the model as an HF folder."
        ) from None
    except Exception:  # a pickle that is cut short raises anything, and Megatron says so of this folder
        log.debug("%s cannot be read", path, exc_info=True)


class _Reader(FileSystemReader):
    """Reads the metadata once: it names every tensor, and would be read again for each of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch asks for at each load."""
        if self._metadata is None:
            check_metadata(Path(self.path))
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def stored_tensors(folder: Path, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a checkpoint, one after the other, on the host; in this process alone, and no other tensor is read."""
    reader = _Reader(folder)
    for name, entry in entries.items():
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        load({name: tensor}, storage_reader=reader, no_dist=True)
        yield name, tensor


def common_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors: the schedule, and what the optimizer's parameter groups say."""
    state: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    return state
