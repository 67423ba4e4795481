"""The sending end against fake servers that really read the memory, one of which fails in every way there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from megarl.core.errors import SyncError
from megarl.core.janitor import SHARED_MEMORY
from megarl.core.ports import free_port
from megarl.serving.client import ServerEndpoint
from megarl.sync.memory import NodeMemory, Pieces
from megarl.sync.ring import bucket_limit, ring_bytes
from megarl.sync.segments import Segment
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender
from tests.sync.receiver import Receiver
from tests.sync.test_broadcast import (
    NUM_BYTES,
    break_begin,
    break_first_bucket,
    break_second_bucket,
    break_version,
    buckets,
    holds,
    serving,
)
from tests.sync.written import SharedBuckets, Written


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedBuckets]:
    made = SharedBuckets(tmp_path / "registry", timeout_s=20.0, join_s=1.0)
    yield made
    made.close()
    assert not any((SHARED_MEMORY / name).exists() for name in registered(tmp_path))


def registered(folder: Path) -> list[str]:
    registry = folder / "registry"
    return registry.read_text().split() if registry.exists() else []


def send(sender: SharedBuckets, version: int, *receivers: Receiver) -> SyncReport:
    report = sender.send(buckets, version, [receiver.endpoint for receiver in receivers])
    assert report is not None
    return report


@pytest.fixture
def everyone() -> Iterator[dist.ProcessGroup]:
    """The group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_tell_each_other_by_tensors_of_their_own_device(
    everyone: dist.ProcessGroup, device: str, tmp_path: Path
) -> None:
    """NCCL takes none of the host's: test_pretend_device runs this on a device that is not there."""
    memory = NodeMemory(rank=0, writers=(0,), registry=tmp_path / "registry", device=device, control=everyone)
    sender = SharedMemorySender(
        rank=0, memory=memory, bucket_bytes=1 << 20, timeout_s=20.0, device=device, control=everyone
    )
    receiver = Receiver("server 0")
    with serving(receiver):
        report = sender.send(Written(list(buckets())), 1, [receiver.endpoint])
    sender.close()
    assert report is not None and report.ok == ("server 0",), report
    assert holds(receiver, 1)


class Readers(NodeMemory):
    """Notes for whom each bucket is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[tuple[str, ...]] = []

    def fill(self, pieces: Pieces, number: int, start: int, readers: Collection[str]) -> None:
        self.asked.append(tuple(readers))
        super().fill(pieces, number, start, readers)


def test_ranks_hear_which_servers_read_a_bucket(everyone: dist.ProcessGroup, device: str, tmp_path: Path) -> None:
    """A handle that nobody opens would hold memory of a device for good."""
    memory = Readers(rank=0, writers=(0,), registry=tmp_path / "registry", device=device, control=everyone)
    sender = SharedMemorySender(
        rank=0, memory=memory, bucket_bytes=1 << 20, timeout_s=20.0, device=device, control=everyone
    )
    receivers = [Receiver(f"server {number}") for number in range(3)]
    with serving(*receivers):
        break_begin(receivers[1])
        report = sender.send(Written(list(buckets())), 1, [receiver.endpoint for receiver in receivers])
    sender.close()
    assert report is not None and report.ok == ("server 0", "server 2"), report
    assert memory.asked == [("server 0", "server 2")] * 2


def test_all_ranks_of_all_servers_read_all_weights_sync_after_sync(sender: SharedBuckets, tmp_path: Path) -> None:
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        for version in range(1, 5):
            for receiver in (one, two):
                receiver.weights.clear()
            report = sender.send(buckets, version, [one.endpoint, replace(two.endpoint, tp=2)])
            assert report is not None
            assert (report.ok, report.failed, report.attempts) == (("server 0", "server 1"), {}, 1)
            assert report.num_bytes == NUM_BYTES
            assert holds(one, version) and holds(two, version)
        assert [len(body["serialized_named_tensors"]) for body in two.bodies("/update_weights_from_tensor")] == [2] * 8
        # One for all syncs, known to whoever removes what is left, and still there although readers came and went.
        assert len(registered(tmp_path)) == 1
        assert all((SHARED_MEMORY / name).exists() for name in registered(tmp_path))


@pytest.mark.parametrize("ruin", [break_begin, break_first_bucket, break_second_bucket, break_version])
@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_answers_with_an_error_is_named_and_the_rest_are_updated_without_a_second_attempt(
    ruin: Callable[[Receiver], None], place: int, sender: SharedBuckets
) -> None:
    receivers = [Receiver("server 0"), Receiver("server 1")]
    ill, well = receivers[place], receivers[1 - place]
    with serving(*receivers):
        ruin(ill)
        report = send(sender, 1, *receivers)
        assert (report.ok, set(report.failed), report.attempts) == ((well.name,), {ill.name}, 1)
        assert "answered" in report.failed[ill.name]
        assert holds(well, 1)
        assert len(well.bodies("/update_weights_from_tensor")) == 2  # nothing twice
        ill.refuse.clear()
        assert send(sender, 2, well).ok == (well.name,)
        assert holds(well, 2)


@pytest.mark.parametrize("bucket", [1, 2])
def test_a_server_that_never_loads_a_bucket_is_named(bucket: int, sender: SharedBuckets) -> None:
    ill, well = Receiver("server 0"), Receiver("server 1")
    ill.hang_bucket = bucket
    with serving(ill, well):
        began = time.monotonic()
        report = send(sender, 1, ill, well)
        assert time.monotonic() - began < 10
        assert (report.ok, set(report.failed)) == (("server 1",), {"server 0"})
        assert "answer within" in report.failed["server 0"]
        assert holds(well, 1)


def test_buckets_take_turns_in_less_memory_than_all_of_them_need(tmp_path: Path) -> None:
    """Of the nine, four fit at once."""
    weights = [[(str(index), torch.full((1000,), float(index)))] for index in range(9)]
    one, two = Receiver("server 0"), Receiver("server 1")
    sender = SharedBuckets(tmp_path / "registry", bucket_bytes=8192)
    with serving(one, two):
        report = sender.send(lambda: iter(weights), 1, [one.endpoint, two.endpoint])
        assert report is not None and report.ok == ("server 0", "server 1")
        for receiver in (one, two):
            assert all(receiver.weights[name].equal(tensor) for [(name, tensor)] in weights)
        [name] = registered(tmp_path)
        assert (SHARED_MEMORY / name).stat().st_size == 4 * 4096 + 64  # torch keeps its count in front
    sender.close()


class LateRank(Receiver):
    """Of two ranks the second copies a bucket after the first has answered, and before it begins with what comes next."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.late: dict[str, torch.Tensor] = {}
        self._left: dict[str, Any] | None = None
        self._one_by_one = asyncio.Lock()

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        async with self._one_by_one:
            if self._left is not None:
                await asyncio.sleep(0.1)
                of_first, self.weights = self.weights, self.late
                self._load(self._left)
                self.weights, self._left = of_first, None
            if path != "/update_weights_from_tensor":
                return await super().respond(path, body)
            first, second = body["serialized_named_tensors"]
            self._left = body | {"serialized_named_tensors": [second]}
            return await super().respond(path, body | {"serialized_named_tensors": [first]})


class EarlyAnswers(NodeMemory):
    answered_early = ("server 0",)


@pytest.mark.parametrize("sizes", [[1000] * 9, [500, 1000, 1000, 1000]], ids=["four rooms", "one room in each other"])
def test_memory_is_not_written_anew_while_a_rank_of_a_server_copies_it(tmp_path: Path, sizes: list[int]) -> None:
    weights = [[(str(index), torch.full((size,), float(index)))] for index, size in enumerate(sizes)]
    memory = EarlyAnswers(rank=0, writers=(0,), registry=tmp_path / "registry", device="cpu")
    sender = SharedMemorySender(rank=0, memory=memory, bucket_bytes=4000, timeout_s=20.0, device="cpu")
    receiver = LateRank("server 0")
    with serving(receiver):
        report = sender.send(Written(weights), 1, [replace(receiver.endpoint, tp=2)])
    sender.close()
    assert report is not None and report.ok == ("server 0",), report
    for held in (receiver.weights, receiver.late):
        assert [name for [(name, tensor)] in weights if not held[name].equal(tensor)] == []


def test_the_memory_that_a_sync_takes_is_two_buckets_or_two_of_the_largest_tensor() -> None:
    mib = 2**20
    assert (bucket_limit(512 * mib), ring_bytes(10 * mib, 512 * mib)) == (128 * mib, 512 * mib)
    assert (bucket_limit(16 * mib), ring_bytes(4 * mib, 16 * mib)) == (8 * mib, 32 * mib)
    assert ring_bytes(600 * mib, 16 * mib) == 1200 * mib + 128


def test_with_no_server_left_nothing_more_is_written(sender: SharedBuckets) -> None:
    ill, written = Receiver("server 0"), list[int]()
    gone = ServerEndpoint("server 1", f"http://127.0.0.1:{free_port()}", "key")
    with serving(ill):
        ill.refuse["/begin_weight_update"] = (500, "broken")
        report = sender.sender.send(Written(list(buckets()), written.append), 1, [ill.endpoint, gone])
    assert report is not None and report.ok == () and written == []
    assert set(report.failed) == {"server 0", "server 1"}
    assert "no answer" in report.failed["server 1"]


def test_what_a_rank_cannot_write_is_raised(sender: SharedBuckets) -> None:
    def broken(number: int) -> None:
        if number == 1:
            raise RuntimeError("reading failed")

    one = Receiver("server 0")
    with serving(one), pytest.raises(RuntimeError, match="reading failed"):
        sender.sender.send(Written(list(buckets()), broken), 1, [one.endpoint])
    assert one.session is False  # a later sync may begin


def test_no_server_is_blamed_where_the_ranks_write_for_longer_than_the_sync_may(tmp_path: Path) -> None:
    one, sender = Receiver("server 0"), SharedBuckets(tmp_path / "registry", timeout_s=0.5)
    says = r"every server is well: the ranks had not written bucket 1 within 0.5 s \(deadlines.sync_s\)"
    with serving(one), pytest.raises(SyncError, match=says):
        sender.sender.send(Written(list(buckets()), lambda number: time.sleep(0.6 * number)), 1, [one.endpoint])
    assert not one.session
    sender.close()


def test_memory_that_is_not_to_be_had_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Memory that others write into is one thing, for they can send instead; that of a whole sync another."""
    registry = tmp_path / "registry"
    with pytest.raises(SyncError, match=r"/dev/shm has no room for .*--shm-size"):
        Segment.make(1 << 42, registry)
    with pytest.raises(SyncError, match=r"The weight sync needs .*--shm-size.*set sync\.transport to broadcast"):
        NodeMemory(rank=0, writers=(0,), registry=registry, device="cpu").take(1 << 42)
    assert not any((SHARED_MEMORY / name).exists() for name in registered(tmp_path))
