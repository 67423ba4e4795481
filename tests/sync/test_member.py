"""One rank's end of a broadcast, in groups that send nothing: the memory that it takes beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.sync.member import Member
from megarl.sync.parcel import Parcel
from tests.support.live_bytes import LiveBytes


class Under:
    """Broadcasts that are under way until somebody waits for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def wait(self, *_: Any) -> None:
        return None


class Group:
    def __init__(self) -> None:
        self.limits: list[float] = []

    def start(self, tensors: Sequence[Tensor], timeout_s: float) -> Under:
        self.limits.append(timeout_s)
        return Under(tensors)

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


class Place:
    def is_given_up(self) -> bool:
        return False

    def begin(self, number: int) -> None:
        return None

    def close(self) -> None:
        return None


class Made:
    """Buckets that are made where they are gathered."""

    def __init__(self, senders: Sequence[int], helped: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> None:
        names = tuple(map(str, range(len(shapes))))
        dtypes = (torch.float32,) * len(shapes)
        self.parcels = [Parcel(sender, (sender, *helped), names, dtypes, tuple(shapes)) for sender in senders]

    def gather(self, number: int) -> list[Tensor]:
        parcel = self.parcels[number]
        return [torch.zeros(shape) for shape in parcel.shapes] if parcel.sender == 0 else []

    def room(self, number: int) -> None:
        return None


def peak_buckets(outgoing: Made) -> float:
    """The most that rank 0 holds while it sends all of it, in buckets."""
    member: Any = Member(0, "127.0.0.1", torch.device("cpu"), None)
    member._groups, member._places = {0: Group(), 1: Group()}, {0: Place(), 1: Place()}
    with LiveBytes() as live:
        assert member.stream(outgoing, 60.0).reason is None
    return live.peak / outgoing.parcels[0].nbytes


def test_a_rank_holds_two_buckets_beside_the_model() -> None:
    small, large = [(1000,)] * 100, [(1024, 512)] * 2
    for shapes in (small, large):
        assert Made([0], [], shapes).parcels[0].is_flattened is (shapes is small)
        assert peak_buckets(Made([0] * 6, [], shapes)) == 2
        assert peak_buckets(Made([0, 1, 1, 0, 0, 1], [0], shapes)) == 2


def test_a_bucket_has_the_time_of_all_that_servers_take_before_it() -> None:
    """Each may make them wait: 2 s, and a second for 50 MB; never longer than the attempt."""
    half_a_second = [(6_250_000,)]
    for seconds, expected in ((60.0, [2.5, 7.5, 2.5]), (5.0, [2.5, 5.0, 2.5])):
        member: Any = Member(0, "127.0.0.1", torch.device("cpu"), None, join_s=2.0)
        group = Group()
        member._groups, member._places = {0: group}, {0: Place()}
        member.stream(Made([0, 1, 1, 0, 0], [], half_a_second), seconds)
        assert group.limits == pytest.approx(expected, abs=0.4)
