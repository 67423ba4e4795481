"""Memory of devices that ranks and servers share: what a rank does that cannot put its bucket together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.sync.memory import DeviceMemory


class OneDevice:
    def __init__(self, num_bytes: int) -> None:
        self.flat = torch.zeros(num_bytes, dtype=torch.uint8)

    def payload(self, bucket: object, start: int, num_readers: int) -> str:
        return "handle"

    def close(self) -> None:
        return None


class Broken:
    """What cannot be gathered."""

    buckets = ((),)

    def write(self, number: int, flat: object) -> None:
        raise MegarlError("out of memory")


def test_a_rank_that_cannot_gather_does_not_wait_for_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(rank=1, hosts={"server": (0, 1)}, make=OneDevice)
    memory.take(64)

    def share(*_: Any) -> None:
        raise AssertionError("the others are still gathering")

    monkeypatch.setattr(memory, "_share", share)
    with pytest.raises(MegarlError, match="out of memory"):
        memory.fill(Broken(), 0, 0)
