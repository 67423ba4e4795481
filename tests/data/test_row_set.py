import pytest

from megarl.core.errors import UserError
from megarl.data.row_set import RowSet, RowSource


def test_a_source_goes_on_where_it_was() -> None:
    rows = RowSet(tuple("abcde"), 0)
    source, resumed = RowSource(rows, 1), RowSource(rows, 1)
    assert len(set(source.take(3))) == 3
    resumed.load_state(source.state())
    assert source.take(6) == resumed.take(6)
    assert source.epoch == 9 / 5


def test_a_source_may_keep_the_order() -> None:
    assert RowSource(RowSet(tuple("abc"), 0), 1, shuffle=False).take(5) == list("abcab")


def test_a_source_refuses_the_place_in_other_rows() -> None:
    source = RowSource(RowSet(tuple("abc"), 0), 1)
    with pytest.raises(UserError, match=r"training rows: .*num_rows was 4 and is 3"):
        source.load_state(RowSource(RowSet(tuple("abcd"), 0), 1).state())


def test_a_source_refuses_the_place_in_rows_that_say_something_else() -> None:
    def source(text: str) -> RowSource[str]:
        return RowSource(RowSet(tuple("abc"), 0, {"ids": "1", "texts": text}), 1)

    source("x").load_state(source("x").state())
    with pytest.raises(UserError, match=r"training rows: .*\(other texts\)"):
        source("y").load_state(source("x").state())
