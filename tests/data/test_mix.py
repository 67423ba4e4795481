"""Sets of rows in given shares."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.data.mix import MixedCursor, rows_by_set
from megarl.recipe.schema import Data

SETS = {"math": np.array([0, 2, 4, 6, 8, 9]), "code": np.array([1, 3]), "chat": np.array([5, 7])}


def cursor(shares: dict[str, float], *, shuffle: bool = True, seed: int = 1) -> MixedCursor:
    return MixedCursor({name: SETS[name] for name in shares}, shares, seed, shuffle=shuffle, what="rows")


def test_each_set_has_its_share_of_every_epoch() -> None:
    """Of 10 rows 5, 3 and 2 are of the sets, whose own rows are 6, 2 and 2."""
    walk = cursor({"math": 5, "code": 3, "chat": 2})
    epochs = [walk.take(10).tolist() for _ in range(6)]
    for epoch in epochs:
        assert [sum(row in SETS[name] for row in epoch) for name in SETS] == [5, 3, 2]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    # 30 of math are 5 passes over its 6 rows, 18 of code 9 over its 2.
    counted = Counter(row for epoch in epochs for row in epoch)
    assert [counted[row] for row in range(10)] == [5, 9, 5, 9, 5, 6, 5, 6, 5, 5]


def test_without_shuffling_each_set_keeps_its_order_evenly_among_the_others() -> None:
    assert cursor({"math": 3, "code": 1}, shuffle=False).take(8).tolist() == [0, 1, 2, 4, 6, 3, 8, 9]
    assert cursor({"code": 1, "chat": 1}, shuffle=False).take(8).tolist() == [5, 1, 7, 3] * 2


@given(
    shares=st.dictionaries(st.sampled_from(sorted(SETS)), st.floats(1e-3, 1e3), min_size=1),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    before=st.integers(0, 40),
)
def test_a_saved_place_is_gone_on_from_and_no_row_comes_again_before_its_sets_others(
    shares: dict[str, float], seed: int, shuffle: bool, before: int
) -> None:
    walk, other = (cursor(shares, seed=seed, shuffle=shuffle) for _ in range(2))
    taken = walk.take(before).tolist()
    other.load_state(json.loads(json.dumps(walk.state())))
    rest = walk.take(25).tolist()
    assert rest == other.take(25).tolist()
    total = sum(len(SETS[name]) for name in shares)
    whole = (taken + rest)[: (before + 25) // total * total]
    counted = Counter(whole)
    for name, share in shares.items():
        times = [counted[row] for row in SETS[name]]
        assert max(times) - min(times) <= 1
        wanted = share / sum(shares.values()) * len(whole)
        assert abs(sum(times) - wanted) <= len(SETS) * max(1, len(whole) // total)


def test_a_place_under_other_shares_is_refused() -> None:
    state = cursor({"math": 1, "code": 1}).state()
    with pytest.raises(UserError, match=r"mix was \{'code': 1, 'math': 1\} and is \{'code': 1, 'math': 2\}"):
        cursor({"math": 2, "code": 1}).load_state(state)


def test_a_place_in_rows_that_have_gone_to_another_set_is_refused() -> None:
    """Of as many rows each: other rows would come, some of them a second time."""
    state = cursor({"math": 1, "code": 1}).state()
    moved = {"math": np.array([1, 2, 4, 6, 8, 9]), "code": np.array([0, 3])}
    other = MixedCursor(moved, {"math": 1, "code": 1}, 1, shuffle=True, what="rows")
    with pytest.raises(UserError, match="other sets"):
        other.load_state(state)
    other.load_state({**state, "digests": {}})  # of an older megarl


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mix_that_names_its_sets_in_another_order_is_the_same(shuffle: bool) -> None:
    """As a recipe does that was written anew: a run that goes on would find other rows where it was."""
    walk, other = (cursor(dict.fromkeys(names, 1), shuffle=shuffle) for names in (("math", "code"), ("code", "math")))
    assert walk.take(30).tolist() == other.take(30).tolist()


def test_a_small_set_that_comes_many_times_in_an_epoch_takes_no_time_for_each() -> None:
    sets, began = {"large": np.arange(150_000), "small": np.arange(150_000, 150_005)}, time.process_time()
    walk = MixedCursor(sets, {"large": 1, "small": 1}, 0, shuffle=True, what="rows")
    assert time.process_time() - began < 3.0  # 0.4 s; 15,000 looks at all of the epoch took over 6
    few = Counter(walk.take(150_005).tolist())
    assert [few[row] for row in sets["small"]] == pytest.approx([15_000] * 5, abs=1)


def prompts(*sources: Any) -> list[Prompt]:
    ids = np.array([1], np.int32)
    return [Prompt(f"a.jsonl:{at}", ids, "1", "1", {"source": each}) for at, each in enumerate(sources, 1)]


def test_rows_are_of_the_set_that_their_field_names_and_those_without_a_share_are_left_out() -> None:
    data = Data(train=Path("a.jsonl"), mix={"math": 3.0, "code": 1.0, "chat": 0.0}, mix_key="source")
    found = rows_by_set(prompts("math", "code", "chat", "math"), data)
    assert {name: rows.tolist() for name, rows in found.items()} == {"math": [0, 3], "code": [1]}
    assert rows_by_set(prompts("math"), Data(train=Path("a.jsonl"))) == {}


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (("math", "cod"), r"a\.jsonl:2: its field 'source', .* is 'cod', .* Did you mean 'code'\?"),
        (("math", None), r"a\.jsonl:2: .* is None, and data\.mix has the sets 'math', 'code'\."),
        (("math", ["code"]), r"a\.jsonl:2: .* is \['code'\]"),
        (("math",), r"data\.mix: no row to train on is of the set 'code' \(field 'source'\)"),
    ],
)
def test_rows_and_sets_that_do_not_meet_are_named(sources: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        rows_by_set(prompts(*sources), Data(train=Path("a.jsonl"), mix={"math": 3.0, "code": 1.0}, mix_key="source"))
