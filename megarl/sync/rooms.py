"""Where buckets lie in memory that other ranks write into: each rank's has two halves, which take turns. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.models.hf_pieces import Entry, size_of
from megarl.models.parts import ALIGNMENT
from megarl.sync.parcel import Parcel

Entries = tuple[Entry, ...]


@dataclass(frozen=True)
class Rooms:
    """sizes: bytes of the memory of each rank that has any. starts: of each bucket, by rank, the first byte of its room.

    A rank has a room for each bucket that it is a member of, in the half that the one before has not: that one is on its way,
    and the one before it has gone, because a rank ends one before it begins the next (member.py).
    """

    sizes: Mapping[int, int]
    starts: Sequence[Mapping[int, int]]


def rooms(parcels: Sequence[Parcel], laid: Sequence[Entries], having: frozenset[int]) -> Rooms:
    """laid: of each bucket, what is put together in its sender's memory. having: the ranks with memory."""
    halves = dict.fromkeys(sorted(having), 0)
    for parcel, entries in zip(parcels, laid, strict=True):
        for member in having.intersection(parcel.members):
            needed = parcel.room_bytes if member != parcel.sender else size_of(entries) if entries else 0
            halves[member] = max(halves[member], -(-needed // ALIGNMENT) * ALIGNMENT)
    passed: Counter[int] = Counter()
    starts = []
    for parcel in parcels:
        starts.append({each: halves[each] * (passed[each] % 2) for each in parcel.members if each in halves})
        passed.update(parcel.members)
    return Rooms({rank: 2 * half for rank, half in halves.items()}, starts)
