"""Where buckets lie in the memory of the ranks that send them or help: no two that are there at once overlap."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.hf_pieces import lay_out, size_of
from megarl.models.parts import ALIGNMENT
from megarl.sync.parcel import Parcel
from megarl.sync.rooms import rooms


def parcel(sender: int, members: set[int], lengths: list[int]) -> Parcel:
    names, shapes = tuple(map(str, range(len(lengths)))), tuple((each,) for each in lengths)
    return Parcel(sender, (sender, *sorted(members - {sender})), names, (torch.float32,) * len(lengths), shapes)


@settings(deadline=None, max_examples=100)
@given(
    sent=st.lists(
        st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2)), st.lists(st.integers(1, 90), min_size=1)), min_size=1
    ),
    having=st.frozensets(st.integers(0, 2)),
    own=st.integers(0, 90),
)
def test_a_bucket_and_the_one_before_it_on_a_rank_do_not_overlap(
    sent: list[tuple[int, set[int], list[int]]], having: frozenset[int], own: int
) -> None:
    """own: of tensors up to this length nothing is put together in memory: they are whole on their sender."""
    parcels = [parcel(*each) for each in sent]
    laid = [
        lay_out(each for each in zip(p.names, p.shapes, p.dtypes, strict=True) if each[1][0] > own) for p in parcels
    ]
    found = rooms(parcels, laid, having)
    assert set(found.sizes) == having
    largest = 0
    for rank in having:
        before = range(0)
        for each, entries, starts in zip(parcels, laid, found.starts, strict=True):
            if rank in each.members:
                mine = (size_of(entries) if entries else 0) if rank == each.sender else each.room_bytes
                now = range(starts[rank], starts[rank] + mine)
                assert now.stop <= found.sizes[rank] and now.start % ALIGNMENT == 0
                assert not mine or now.stop <= before.start or before.stop <= now.start
                before, largest = now, max(largest, mine)
        assert found.sizes[rank] <= 2 * (largest + ALIGNMENT)
    assert all(
        set(starts) == having.intersection(each.members) for each, starts in zip(parcels, found.starts, strict=True)
    )


def test_two_halves_of_the_largest_bucket_take_turns_also_for_those_that_a_rank_helps_with() -> None:
    parcels = [parcel(0, {0, 1}, [16]), parcel(1, {0, 1}, [32]), parcel(0, {0, 1}, [16])]
    found = rooms(parcels, [lay_out([]), lay_out([("0", (32,), torch.float32)]), lay_out([])], frozenset({0, 1}))
    assert found.sizes == {0: 256, 1: 256}
    assert found.starts == [{0: 0, 1: 0}, {0: 128, 1: 128}, {0: 0, 1: 0}]
