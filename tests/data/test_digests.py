from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.data.digests import ROWS_AT_ONCE, Digester, differing


def of(rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    digester = Digester()
    for one, other in rows:
        digester.add({"ids": one, "answers": other})
    return digester.digests()


@pytest.mark.parametrize("count", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_the_same_rows_have_the_same_digests_and_every_other_row_is_noticed(count: int) -> None:
    rows = [(f"a:{index}", "4") for index in range(count)]
    found = of(rows)
    assert found == of(rows) and differing({"digests": found}, of(rows)) == []
    for at in {0, count // 2, count - 1}:
        assert differing({"digests": found}, of([*rows[:at], (rows[at][0], "5"), *rows[at + 1 :]])) == ["answers"]


def test_texts_are_not_run_together() -> None:
    assert of([("ab", ""), ("c", "")])["ids"] != of([("a", ""), ("bc", "")])["ids"]


def test_a_state_without_digests_differs_in_none() -> None:
    assert differing({"num_rows": 1}, of([("a", "b")])) == []
