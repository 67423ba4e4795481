"""What is read of torch's handles for memory of a device, without one; with one: tests/gpu/test_ipc.py."""

from __future__ import annotations

import inspect
from typing import Any

from torch.multiprocessing import reductions

from megarl.sync.device_segment import DEVICE, WAITS


def test_the_arguments_are_where_torch_has_them() -> None:
    rebuild: Any = reductions.rebuild_cuda_tensor
    names = list(inspect.signature(rebuild).parameters)
    assert (names[DEVICE], names[WAITS:]) == ("storage_device", ["event_sync_required"])
