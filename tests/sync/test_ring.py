"""Turns in one piece of memory: nobody overwrites what is still read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.models.parts import ALIGNMENT
from megarl.sync.ring import Turn, turns


def test_buckets_lie_end_to_end_and_then_where_the_oldest_lay() -> None:
    assert turns([64, 64, 100, 64, 64], 256) == [
        Turn(0, None),
        Turn(64, None),
        Turn(128, None),
        Turn(0, 0),
        Turn(64, 1),
    ]


def test_one_that_takes_all_waits_for_everybody() -> None:
    assert turns([64, 64, 256, 64], 256) == [Turn(0, None), Turn(64, None), Turn(0, 1), Turn(0, 2)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(0, 3000))
def test_what_lies_in_the_same_place_is_waited_for(sizes: list[int], more: int) -> None:
    num_bytes = max(sizes) + more
    found = turns(sizes, num_bytes)
    for number, (turn, size) in enumerate(zip(found, sizes, strict=True)):
        assert turn.start % ALIGNMENT == 0 and turn.start + size <= num_bytes
        for before in range(number):
            overlap = found[before].start < turn.start + size and turn.start < found[before].start + sizes[before]
            done = max((each.after for each in found[: number + 1] if each.after is not None), default=-1)
            assert not overlap or before <= done
