import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.data.cursor import Cursor


def cursor(num_rows: int, seed: int = 1, *, shuffle: bool = True) -> Cursor:
    return Cursor(num_rows, seed, shuffle=shuffle, what="rows")


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    walk = cursor(50)
    epochs = [walk.take(50).tolist() for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != cursor(50, seed=2).take(50).tolist()


def test_without_shuffling_the_files_order_repeats() -> None:
    assert cursor(3, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_are_counted_with_the_part_of_the_last() -> None:
    walk = cursor(4)
    counts = []
    for _ in range(4):
        counts.append(walk.epoch)
        walk.take(2)
    assert [*counts, walk.epoch] == [0, 0.5, 1, 1.5, 2]


@given(
    num_rows=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 30), max_size=4),
    after=st.lists(st.integers(0, 30), min_size=1, max_size=4),
)
def test_resuming_gives_what_would_have_come(
    num_rows: int, seed: int, shuffle: bool, before: list[int], after: list[int]
) -> None:
    walk = cursor(num_rows, seed, shuffle=shuffle)
    for count in before:
        walk.take(count)
    resumed = cursor(num_rows, seed, shuffle=shuffle)
    resumed.load_state(json.loads(json.dumps(walk.state())))
    assert resumed.epoch == walk.epoch
    for count in after:
        assert resumed.take(count).tolist() == walk.take(count).tolist()


@given(num_rows=st.integers(1, 20), counts=st.lists(st.integers(0, 30), max_size=6))
def test_the_sizes_of_the_takes_do_not_matter(num_rows: int, counts: list[int]) -> None:
    walk = cursor(num_rows)
    parts = [walk.take(count) for count in counts]
    whole = cursor(num_rows).take(sum(counts))
    assert np.concatenate([np.zeros(0, np.int64), *parts]).tolist() == whole.tolist()


def test_a_place_in_other_rows_is_refused() -> None:
    state = cursor(10).state()
    with pytest.raises(UserError, match=r"num_rows was 10 and is 11"):
        cursor(11).load_state(state)
    with pytest.raises(UserError, match=r"seed was 1 and is 2, shuffle was True and is False"):
        cursor(10, 2, shuffle=False).load_state(state)


def test_a_place_in_as_many_rows_that_say_something_else_is_refused() -> None:
    def of(**digests: str) -> Cursor:
        return Cursor(10, 1, shuffle=True, what="rows", digests=digests)

    state = json.loads(json.dumps(of(ids="a", prompts="b", answers="c").state()))
    of(ids="a", prompts="b", answers="c").load_state(state)
    with pytest.raises(UserError, match=r"made with \(other prompts, other answers\)\. Resume with the same data"):
        of(ids="a", prompts="x", answers="y").load_state(state)
    of(ids="a").load_state({key: value for key, value in state.items() if key != "digests"})  # of an older megarl


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        cursor(0)
