import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout, dp_rank, is_lead, tp_rank


def test_tensor_parallel_ranks_are_neighbours():
    layout = Layout(tp=2, world_size=6)
    assert layout.dp == 3
    assert [tp_rank(rank, layout) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [dp_rank(rank, layout) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [is_lead(rank, layout) for rank in range(6)] == [True, False, True, False, True, False]


def test_every_shard_has_one_lead():
    for world_size in range(1, 13):
        for tp in (size for size in range(1, world_size + 1) if world_size % size == 0):
            layout = Layout(tp, world_size)
            leads = [dp_rank(rank, layout) for rank in range(world_size) if is_lead(rank, layout)]
            assert leads == list(range(layout.dp))


def test_tp_that_does_not_divide_is_refused_with_what_would():
    with pytest.raises(UserError, match=r"4 does not divide 6 devices.*\[1, 2, 3, 6\]"):
        Layout(tp=4, world_size=6)


def test_no_ranks_is_refused():
    with pytest.raises(UserError, match="at least one rank"):
        Layout(tp=0, world_size=2)
