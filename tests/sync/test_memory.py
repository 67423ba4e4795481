"""Memory of devices that ranks and servers share: what a rank does that cannot put its bucket together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.errors import MegarlError, SyncError
from megarl.models import all_gather
from megarl.sync import memory
from megarl.sync.memory import DeviceMemory, NodeMemory


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
    mine = DeviceMemory(rank=1, hosts={"server": (0, 1)}, make=OneDevice)
    mine.take(64)

    def share(*_: Any) -> None:
        raise AssertionError("the others are still gathering")

    monkeypatch.setattr(mine, "_share", share)
    with pytest.raises(MegarlError, match="out of memory"):
        mine.fill(Broken(), 0, 0, ["server"])


class Handles(OneDevice):
    """A device's memory that is held once for each handle that was given out."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.given = 0

    def payload(self, bucket: object, start: int, num_readers: int) -> str:
        self.given += 1
        return f"handle {self.given}"


def test_handles_are_given_to_servers_that_take_part_alone() -> None:
    held: list[Handles] = []
    mine = DeviceMemory(
        rank=1, hosts={"one": (0, 1), "two": (1, 1)}, make=lambda size: held.append(Handles(size)) or held[-1]
    )
    mine.take(64)
    mine.fill(BrokenOn(None), 0, 0, ["two"])
    two: Any = SimpleNamespace(name="two", tp=2)
    assert mine.payloads(two, (), 0) == ["handle 1", "handle 2"] and held[0].given == 2


def test_of_a_server_of_several_ranks_the_first_answers_for_all() -> None:
    made = DeviceMemory(rank=0, hosts={"one": (0,), "two": (0, 1)}, make=OneDevice)
    assert set(made.answered_early) == {"two"}


class TalkingRanks:
    """torch.distributed's collectives between the threads that are the ranks, each of which says its number as the group."""

    class ReduceOp:
        MAX = "max"

    def __init__(self, count: int) -> None:
        self._count, self._barrier, self._said = count, threading.Barrier(count, timeout=10), {}

    def get_world_size(self, group: int) -> int:
        return self._count

    def _all(self, rank: int, said: Any) -> list[Any]:
        self._said[rank] = said
        self._barrier.wait()
        heard = [self._said[each] for each in range(self._count)]
        self._barrier.wait()
        return heard

    def all_reduce(self, value: torch.Tensor, operation: str, group: int) -> None:
        value.fill_(max(self._all(group, int(value))))

    def all_gather_object(self, heard: list[Any], said: Any, group: int) -> None:
        heard[:] = self._all(group, said)

    def broadcast_object_list(self, heard: list[Any], src: int, group: int) -> None:
        heard[:] = self._all(group, list(heard))[src]


def talking(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    ranks = TalkingRanks(count)
    for module in (memory, all_gather):
        monkeypatch.setattr(module, "dist", ranks)


class BrokenOn:
    """What some ranks cannot write."""

    buckets = ((),)

    def __init__(self, trouble: Exception | None) -> None:
        self._trouble = trouble

    def write(self, number: int, flat: object) -> None:
        if self._trouble is not None:
            raise self._trouble


class Remembered:
    """A segment in this process alone."""

    handle = (b"", b"", 0)
    flat = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize("trouble", [MegarlError("the weights are offloaded"), ValueError("odd")])
def test_every_rank_says_which_one_could_not_write_and_why(
    trouble: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank's error is heard first."""
    talking(monkeypatch, 3)
    why = str(trouble) if isinstance(trouble, MegarlError) else "ValueError: odd"

    def one(rank: int) -> Exception | None:
        mine: Any = NodeMemory(rank=rank, writers=(0, 1, 2), registry=tmp_path / "registry", device="cpu", control=rank)  # type: ignore[arg-type]
        mine._segment = Remembered()
        mine.fill(BrokenOn(None), 0, 0, ())
        try:
            mine.fill(BrokenOn(trouble if rank == 1 else None), 0, 0, ())
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(one, range(3))
    assert second is trouble
    for each in (first, third):
        assert isinstance(each, SyncError)
        assert str(each) == f"Another rank could not write its part of the weights. rank 1: {why}"


def test_every_rank_says_whose_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    talking(monkeypatch, 2)

    def make(num_bytes: int) -> OneDevice:
        if threading.current_thread().name.endswith("_1"):
            raise RuntimeError("CUDA out of memory")
        return OneDevice(num_bytes)

    def one(rank: int) -> Exception | None:
        threading.current_thread().name = f"rank_{rank}"
        mine: Any = DeviceMemory(rank=rank, hosts={"server": (0, 1)}, make=make, control=rank)  # type: ignore[arg-type]
        try:
            mine.take(64)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert str(second) == "CUDA out of memory"
    assert str(first).endswith("of the weights. rank 1: RuntimeError: CUDA out of memory")
