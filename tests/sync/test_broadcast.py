"""The sending end against fake servers that really receive over gloo, one of which fails in every way there is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.core.errors import SyncError
from megarl.core.ports import free_port
from megarl.models.hf_weights import Bucket
from megarl.serving.client import ServerEndpoint
from megarl.sync.broadcast import BroadcastSender
from megarl.sync.group import BackendName, Sent
from megarl.sync.member import Attempt, Member
from megarl.sync.session import SyncReport
from tests.sync.given import Given
from tests.sync.receiver import Receiver

WEIGHTS: dict[str, Tensor] = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
    "d": torch.tensor(7.0),
}
NUM_BYTES = 24 + 4 + 48 + 4


def buckets() -> Iterator[Bucket]:
    """Two buckets; one tensor is not contiguous, one has no dimension."""
    items = list(WEIGHTS.items())
    yield items[:2]
    yield items[2:]


@contextmanager
def serving(*receivers: Receiver) -> Iterator[None]:
    """Receivers on an event loop of their own thread: the sender blocks this one."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        for receiver in receivers:
            await receiver.__aenter__()
        ready.set()
        await asyncio.to_thread(stop.wait)
        for receiver in receivers:
            await receiver.__aexit__(None, None, None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def make_sender(timeout_s: float = 20.0, grace_s: float = 5.0, backend: BackendName = "gloo") -> BroadcastSender:
    return BroadcastSender(
        rank=0, host="127.0.0.1", device="cpu", backend=backend, timeout_s=timeout_s, grace_s=grace_s, join_s=0.5
    )


def send(sender: BroadcastSender, version: int, *receivers: Receiver) -> SyncReport:
    report = sender.send(Given(list(buckets())), version, [receiver.endpoint for receiver in receivers])
    assert report is not None
    return report


def holds(receiver: Receiver, version: int) -> bool:
    """Whether it received everything, bit for bit, and serves that version."""
    return (
        receiver.version == str(version)
        and not receiver.session
        and receiver.weights.keys() == WEIGHTS.keys()
        and all(receiver.weights[name].equal(tensor) for name, tensor in WEIGHTS.items())
        and all(receiver.weights[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items())
    )


def test_servers_on_the_ranks_devices_are_reached_without_nccl() -> None:
    one = Receiver("server 0")
    with serving(one):
        report = make_sender(backend="nccl").send(
            Given(list(buckets())), 1, [replace(one.endpoint, shares_devices=True)]
        )
        assert report is not None and report.ok == ("server 0",)
        assert holds(one, 1)


def test_all_servers_receive_all_weights_and_the_version() -> None:
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        sender = make_sender()
        report = send(sender, 1, one, two)
        assert (report.ok, report.failed, report.attempts) == (("server 0", "server 1"), {}, 1)
        assert report.num_bytes == NUM_BYTES
        assert holds(one, 1)
        assert holds(two, 1)
        sender.close()


def test_large_tensors_travel_by_themselves_and_small_ones_end_to_end() -> None:
    large: Bucket = [
        ("large", torch.rand(1024, 600)),
        ("also", torch.rand(2, 1024, 512, dtype=torch.float32).bfloat16()),
    ]
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        sender = make_sender()
        report = sender.send(Given([large, *buckets()]), 1, [one.endpoint, two.endpoint])
        assert report is not None and report.ok == ("server 0", "server 1")
        formats = [body["load_format"] for body in one.bodies("/update_weights_from_distributed")]
        assert formats == [None, "flattened_bucket", "flattened_bucket"]
        for name, tensor in [*large, *WEIGHTS.items()]:
            assert two.weights[name].equal(tensor) and two.weights[name].dtype == tensor.dtype
        sender.close()


def test_a_group_is_kept_for_the_next_sync() -> None:
    one = Receiver("server 0")
    with serving(one):
        sender = make_sender()
        for version in (1, 2, 3):
            assert send(sender, version, one).ok == ("server 0",)
            assert holds(one, version)
        assert len(one.bodies("/init_weights_update_group")) == 1
        sender.close()


def test_servers_keep_no_group_of_former_syncs() -> None:
    """Each takes connections, and memory of the servers' devices."""
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        sender = make_sender()
        for version in range(1, 7):
            servers = [one, two] if version % 2 else [one]
            assert send(sender, version, *servers).failed == {}
            assert [len(each.groups) for each in servers] == [1] * len(servers)
        assert sender.leave([one.endpoint, two.endpoint], 5.0) == {}
        assert (one.groups, two.groups) == ({}, {})


def test_a_server_that_does_not_leave_a_former_group_is_named() -> None:
    ill, well = Receiver("server 0"), Receiver("server 1")
    with serving(ill, well):
        sender = make_sender(grace_s=1.0)
        assert send(sender, 1, ill).failed == {}
        ill.hang.add("/destroy_weights_update_group")
        report = send(sender, 2, ill, well)
        assert (report.ok, list(report.failed)) == (("server 1",), ["server 0"])
        assert "/destroy_weights_update_group" in report.failed["server 0"]
        assert holds(well, 2)
        sender.close()


def break_init(receiver: Receiver) -> None:
    receiver.refuse["/init_weights_update_group"] = (400, "broken")


def break_begin(receiver: Receiver) -> None:
    receiver.refuse["/begin_weight_update"] = (500, "broken")


def break_first_bucket(receiver: Receiver) -> None:
    receiver.refuse_bucket = 1


def break_second_bucket(receiver: Receiver) -> None:
    receiver.refuse_bucket = 2


def break_version(receiver: Receiver) -> None:
    receiver.refuse["/update_weight_version"] = (400, "broken")


@pytest.mark.parametrize("ruin", [break_init, break_begin, break_first_bucket, break_second_bucket, break_version])
@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_answers_with_an_error_is_named_and_the_rest_are_updated(
    ruin: Callable[[Receiver], None], place: int
) -> None:
    receivers = [Receiver("server 0"), Receiver("server 1")]
    ill, well = receivers[place], receivers[1 - place]
    with serving(*receivers):
        ruin(ill)
        sender = make_sender()
        report = send(sender, 1, *receivers)
        assert report.ok == (well.name,)
        assert set(report.failed) == {ill.name}
        assert "answered" in report.failed[ill.name]
        assert holds(well, 1)
        ill.refuse.clear()
        ill.refuse_bucket = None
        assert send(sender, 2, well).ok == (well.name,)
        assert holds(well, 2)
        sender.close()


def test_a_slow_server_is_not_blamed_where_another_refuses_to_join() -> None:
    """The slow one comes to the meeting place after the sender has already given up: it must still find it there."""
    ill, slow = Receiver("server 0"), Receiver("server 1")
    slow.join_after_s = 0.5
    with serving(ill, slow):
        break_init(ill)
        sender = make_sender()
        report = send(sender, 1, ill, slow)
        assert (report.ok, list(report.failed)) == (("server 1",), ["server 0"])
        assert holds(slow, 1)
        sender.close()


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/begin_weight_update"])
def test_a_server_that_does_not_answer_in_time_is_named(path: str) -> None:
    ill, well = Receiver("server 0"), Receiver("server 1")
    with serving(ill, well):
        ill.hang.add(path)
        sender = make_sender(timeout_s=1.0, grace_s=1.0)
        began = time.monotonic()
        report = send(sender, 1, ill, well)
        assert time.monotonic() - began < 15
        assert report.ok == ("server 1",)
        assert "server 0" in report.failed["server 0"]
        assert "answer within" in report.failed["server 0"]
        assert holds(well, 1)
        sender.close()


@pytest.mark.parametrize("bucket", [1, 2])
def test_a_server_that_never_joins_a_broadcast_is_named(bucket: int) -> None:
    ill, well = Receiver("server 0"), Receiver("server 1")
    ill.hang_bucket = bucket
    with serving(ill, well):
        sender = make_sender(timeout_s=1.0, grace_s=1.0)
        report = send(sender, 1, ill, well)
        assert report.ok == ("server 1",)
        assert set(report.failed) == {"server 0"}
        assert holds(well, 1)
        sender.close()


def test_a_server_that_is_not_there_is_named() -> None:
    well = Receiver("server 1")
    gone = ServerEndpoint("server 0", f"http://127.0.0.1:{free_port()}", "key")
    with serving(well):
        sender = make_sender()
        report = sender.send(Given(list(buckets())), 1, [gone, well.endpoint])
        assert report is not None
        assert report.ok == ("server 1",)
        assert "no answer" in report.failed["server 0"]
        assert holds(well, 1)
        sender.close()


def test_with_no_server_left_the_report_says_so() -> None:
    ill = Receiver("server 0")
    with serving(ill):
        ill.refuse["/begin_weight_update"] = (500, "broken")
        report = send(make_sender(), 1, ill)
        assert report.ok == ()
        assert set(report.failed) == {"server 0"}


def test_a_sync_that_servers_fail_one_after_another_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt but the first begins later than one less than ATTEMPTS take."""
    monkeypatch.setattr("megarl.sync.broadcast.ATTEMPTS", 1)
    ill, well = Receiver("server 0"), Receiver("server 1")
    with serving(ill, well):
        break_begin(ill)
        says = "given up after 1 attempts in 0 s: in each of them other servers failed .*server 0: .*answered"
        with pytest.raises(SyncError, match=says):
            send(make_sender(), 1, ill, well)
        assert not well.session and well.version != "1"


def test_other_ranks_send_nothing() -> None:
    sender = BroadcastSender(rank=1, host="127.0.0.1", device="cpu", backend="gloo", timeout_s=1.0)
    assert sender.send(Given(list(buckets())), 1, []) is None


def late_in(bucket: int, seconds: float) -> Callable[[int], None]:
    """A rank that takes so long to put that bucket together."""
    return lambda number: time.sleep(seconds if number == bucket else 0)


def test_no_server_is_blamed_for_the_time_that_a_rank_takes_to_put_a_bucket_together() -> None:
    """Longer than a bucket may be on its way; in the second sync as well, for which the group is kept."""
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        sender = make_sender()
        for version in (1, 2):
            given = Given(list(buckets()), late_in(2 - version, 1.1))
            report = sender.send(given, version, [one.endpoint, two.endpoint])
            assert report is not None and (report.failed, report.attempts) == ({}, 1)
        sender.close()
    assert holds(one, 2) and holds(two, 2)


def test_a_bucket_that_is_never_put_together_in_time_is_the_ranks_failure() -> None:
    one = Receiver("server 0")
    with serving(one):
        sender = make_sender(timeout_s=1.0, grace_s=1.0)
        says = r"every server is well: rank 0 had not put bucket 1 together within 1 s \(deadlines.sync_s\)"
        with pytest.raises(SyncError, match=says):
            sender.send(Given(list(buckets()), late_in(1, 1.5)), 1, [one.endpoint])
        assert not one.session


def test_a_failure_of_the_gathering_is_raised() -> None:
    def broken(number: int) -> None:
        if number == 1:
            raise RuntimeError("gathering failed")

    one = Receiver("server 0")
    with serving(one):
        sender = make_sender()
        with pytest.raises(RuntimeError, match="gathering failed"):
            sender.send(Given(list(buckets()), broken), 1, [one.endpoint])
        assert not one.session
        # It is well, and takes the next one.
        assert send(sender, 2, one).ok == ("server 0",)
        assert holds(one, 2)
        sender.close()


def test_a_failure_of_the_sending_is_raised_and_leaves_the_server_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sent: Sent, *_: object) -> None:
        wait(sent, *_)  # type: ignore[arg-type]
        raise RuntimeError("the link broke")

    wait, one = Sent.wait, Receiver("server 0")
    with serving(one):
        sender = make_sender()
        with monkeypatch.context() as patch, pytest.raises(SyncError, match="every server is well: the link broke"):
            patch.setattr(Sent, "wait", broken)
            sender.send(Given([list(WEIGHTS.items())]), 1, [one.endpoint])
        assert not one.session
        assert send(sender, 2, one).ok == ("server 0",)
        assert holds(one, 2)
        sender.close()


def test_ranks_are_told_what_they_wait_for_where_one_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have said so themselves, and then wait for whether to send, and for the next attempt."""
    words: list[object] = []

    def join(member: Member, *given: Any) -> str:
        assert joined(member, *given) is None
        return "the group could not be made"

    def word(member: Member, said: object) -> object:
        words.append(said)
        return said

    joined, one = Member.join, Receiver("server 0")
    monkeypatch.setattr(Member, "join", join)
    monkeypatch.setattr(Member, "word", word)
    with serving(one), pytest.raises(SyncError, match="every server is well: the group could not be made"):
        send(make_sender(), 1, one)
    assert isinstance(words[0], Attempt) and words[1:] == [False, None]
