"""Memory of a CUDA device that another process uses, by CUDA's handles. Never run: no GPU was at hand.

A server on the same device reads it, or a rank of the node writes into it from its own, over the links between them. SGLang reads
what torch pickles for it, but for the device, which it wants by its UUID: its number is another in each process
(sglang/srt/utils/patch_torch.py, 0.5.21).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.models.hf_pieces import Entry
from megarl.sync.segments import Shared, flattened

# Among the arguments of torch's rebuild_cuda_tensor: the place of the device's number, and of whether its event is waited for.
DEVICE = 6
WAITS = 14


class DeviceSegment:
    """Device memory as a tensor. flat: [bytes] uint8."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.flat: Tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)

    def payload(self, bucket: Sequence[Entry], start: int, num_readers: int) -> str:
        """What `/update_weights_from_tensor` takes as a flattened bucket of what is there from byte `start` on.

        Of one reader: torch counts each handle that it gives out, and the reader counts it back.
        """
        assert num_readers == 1, num_readers
        torch.cuda.synchronize(self.flat.device)  # what was written is there before anybody reads it
        rebuild, arguments = reductions.reduce_tensor(self.flat)
        tensor = Shared(rebuild, *arguments[:DEVICE], self._uuid, *arguments[DEVICE + 1 :])
        return flattened(tensor, bucket, start)

    @classmethod
    def open(cls, arguments: tuple[Any, ...], device: str) -> DeviceSegment:
        """Another rank's memory, of the same node: this process knows it as its own device's, whichever device it is on."""
        segment = cls(0, device)
        place = segment.flat.device.index
        rebuild: Any = reductions.rebuild_cuda_tensor
        segment.flat = rebuild(*arguments[:DEVICE], place, *arguments[DEVICE + 1 :])
        return segment

    def share(self) -> tuple[Any, ...]:
        """What one other rank opens it with: torch counts each, as `payload` says.

        Without the event of this device that the other would wait for, whose own device is another: nothing is under way here.
        """
        torch.cuda.synchronize(self.flat.device)
        _, arguments = reductions.reduce_tensor(self.flat)
        return (*arguments[:WAITS], False)

    def hide(self) -> None:
        """It has no name."""

    def close(self) -> None:
        """Let go of the memory."""
        self.flat = torch.empty(0, dtype=torch.uint8)
