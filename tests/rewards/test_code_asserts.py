"""Of an assert the code's own call runs inside, and the rest is decided here, where it computes nothing that is large."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from megarl.rewards.code_asserts import holds, split


def taken(source: str) -> tuple[str, ast.expr] | None:
    found = split(ast.parse(source, mode="eval").body)
    return None if found is None else (ast.unparse(found[0]), found[1])


@pytest.mark.parametrize(
    ("source", "inside", "right", "wrong"),
    [
        ("abs(f(1) - 2.0) < 1e-6", "f(1)", 2.0000001, 2.1),
        ("math.isclose(f(1), 0.5, rel_tol=1e-3)", "f(1)", 0.5001, 0.6),
        ("set(f(1)) == set([2, 3])", "set(f(1))", {3, 2}, {2}),
        ("sorted(g.f(1)) == [1, 2]", "sorted(g.f(1))", [1, 2], [2, 2]),
        ("f(3) == [0] * 3", "f(3)", [0, 0, 0], [0]),
        ("f(3) % 10 == 2 ** 3", "f(3)", 18, 19),
        ("len(f([1])[0]) > 2", "len(f([1])[0])", 3, 2),
        ("f(1) in (1, 2)", "f(1)", 2, 3),
        ("f(1) != 2 * 3", "f(1)", 5, 6),
        ("1 < f(1) <= 2 ** 3", "f(1)", 8, 9),
        ("f(1) == {'a': -1} or False", "f(1)", {"a": -1}, {"a": 1}),
        ("f(1) is None and True", "f(1)", None, 0),
        ("f(1) == float('inf')", "f(1)", float("inf"), 1.0),
    ],
)
def test_the_rest_is_decided_outside(source: str, inside: str, right: Any, wrong: Any) -> None:
    found = taken(source)
    assert found is not None and found[0] == inside
    assert holds(found[1], right) and not holds(found[1], wrong)


@pytest.mark.parametrize(
    "source",
    [
        "f(1)",
        "not f(1)",
        "f(1) == f(2)",
        "all(f(x) for x in y) == g(1)",
        "len([1]) == 1",
        "f(1) @ 2 == 3",
        "f(1) is not None",
        "{**{}, 1: 2} == f(1)",
        "f(1) == [*[1]]",
    ],
)
def test_what_has_not_one_call_stays_whole(source: str) -> None:
    assert taken(source) is None


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("len(f(1) * 10 ** 12) > 0", "ab"),
        ("f(1) * 10 ** 12 != 0", [0]),
        ("f(1) + 1 != 0", "text"),
        ("10 ** f(1) != 0", 10**9),
        ("10 ** 10 ** 10 != f(1)", 1),
        ("f(1) % 5 != 9", "%1000000000d"),
        ("round(5, f(1)) == 0", -(10**9)),
    ],
)
def test_what_would_be_large_does_not_hold(source: str, value: Any) -> None:
    found = taken(source)
    assert found is not None and not holds(found[1], value)
