"""Which grader grades which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.recipe.reward import Reward
from megarl.rewards.row_choice import check_choice, first_ungraded, grades_row


def rows(*fields: dict[str, Any]) -> list[Prompt]:
    ids = np.array([1], np.int32)
    return [Prompt(f"a.jsonl:{at}", ids, "1", "1", each) for at, each in enumerate(fields, 1)]


def reward(**only: dict[str, Any]) -> Reward:
    """A rule for each name, with the rows that it grades."""
    return Reward.model_validate(
        {"graders": {name: {"kind": "rule", "fn": "exact", "only": each} for name, each in only.items()}}
    )


@pytest.mark.parametrize(
    ("only", "graded"),
    [
        ({}, [1, 2, 3, 4]),
        ({"source": ("math",)}, [1]),
        ({"source": ("math", "code")}, [1, 2, 3]),
        ({"source": ("code",), "extra.hard": (True,)}, [3]),
        ({"extra.level": (1,)}, [2]),
        ({"extra.level": (1, 2)}, [2, 3]),
        ({"extra.hard": (1,)}, []),
        ({"a.b": ("whole",)}, [4]),
        ({"nothing": ("x",)}, []),
    ],
)
def test_a_row_is_graded_where_each_field_has_one_of_the_values(only: dict[str, Any], graded: list[int]) -> None:
    """A name with a dot is a field's own before it reaches into an object; true is not 1."""
    fields: list[dict[str, Any]] = [
        {"source": "math"},
        {"source": "code", "extra": {"level": 1, "hard": False}},
        {"source": "code", "extra": {"level": 2, "hard": True}},
        {"source": None, "extra": "none", "a.b": "whole"},
    ]
    assert [at for at, each in enumerate(fields, 1) if grades_row(only, each)] == graded


def test_a_grader_without_rows_is_named_with_what_rows_say() -> None:
    given = rows({"source": "maths"}, {"source": "code"})
    says = r"`reward\.graders\.b\.only`: no row is so: wanted is 'math' in 'source', where they have 'code', 'maths' "
    with pytest.raises(UserError, match=rf"{says}\(did you mean 'maths'\?\)"):
        check_choice(reward(a={}, b={"source": "math"}), given, alone=given)
    check_choice(reward(a={}, b={"source": "math"}), given, alone=given, part=True)


def test_a_row_without_graders_is_named_unless_something_else_rewards_it() -> None:
    given, settings = rows({"source": "math"}, {"source": "chat"}), reward(a={"source": "math"})
    with pytest.raises(UserError, match=r"a\.jsonl:2: no grader with a weight grades this row, .*'source' is 'chat'"):
        check_choice(settings, given, alone=given)
    check_choice(settings, given, alone=())
    measured = Reward.model_validate(
        {"graders": {**settings.model_dump()["graders"], "b": {"kind": "rule", "fn": "exact", "weight": 0.0}}}
    )
    with pytest.raises(UserError, match=r"a\.jsonl:2: no grader with a weight"):
        check_choice(measured, given, alone=given)


def test_the_first_row_that_a_grader_leaves_out_is_found() -> None:
    given, settings = rows({"source": "math"}, {"source": "chat"}), reward(a={"source": "math"}, b={})
    found = first_ungraded(settings, "a", given)
    assert found is not None and found.id == "a.jsonl:2"
    assert first_ungraded(settings, "b", given) is None and first_ungraded(settings, "environment", given) is None
