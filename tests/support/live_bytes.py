"""Bytes of live tensors in this process, counted as they come and go: exact, the same in every run, on a machine without a GPU.

Every operation of torch passes a dispatch mode, which notes the storages of its outputs; each is struck off when it is
freed. What a kernel takes and frees within one operation is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make within the block. now: bytes that live. peak: the most since `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset(self) -> None:
        """Let the peak begin again from what lives now."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage(), func)
        return result

    def _note(self, storage: torch.UntypedStorage, func: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if not size or key in self._live:
            return

        def gone(_: Any) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
