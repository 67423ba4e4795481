"""Which tests run apart from the code, and with what of the row."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from megarl.rewards.code_apart import apart, asks, free_names, inside, prepares
from megarl.rewards.code_tests import read_tests
from megarl.sandbox.job import Check


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("for x in range(3):\n    assert f(x) == g.h(x)", {"f", "g"}),
        ("def check(f):\n    assert f(1) == g(2)\ncheck(f)", {"f", "g"}),
        ("import math\nfrom os import path as p\nassert math.pi == f(p)", {"f"}),
        ("assert [f(y) for y in x for z in y] == (lambda a: a + b)(1)", {"f", "x", "b"}),
        ("class A:\n    y = f(1)\n    def z(self): return self.y + A.k", {"f"}),
        ("assert len([1]) == 1", set()),
    ],
)
def test_names_of_the_code(source: str, names: set[str]) -> None:
    assert free_names(source) == names


@pytest.mark.parametrize(
    "source",
    [
        "import os\nassert f(1) == g(1)",
        "import unittest.mock\nassert f(1) == g(1)",
        "from . import x\nassert f(1) == x",
        "open('a').read() == f(1)",
        "try:\n    f(1)\nexcept Broken:\n    pass",
        "class A(Base):\n    pass\nassert f(A())",
        "@fixture\ndef g(): pass\nassert f(1)",
        "async def g():\n    await f()",
        "x = [1]\nassert f(x) is x",
        "assert len([1]) == 1",
    ],
)
def test_what_acts_on_the_process_or_its_objects_stays_beside_the_code(source: str) -> None:
    assert apart(source, "", "", None) == Check("assert", source)


def test_a_setup_runs_before_it() -> None:
    assert apart("assert f(x) == y", "x, y = 1, 2", "", None) == Check("apart", "x, y = 1, 2\nassert f(x) == y", ("f",))


PROMPT = """import math

def poly(xs, x):
    '''Value.'''
    return sum(c * power(x, i) for i, c in enumerate(xs))

def power(x, i):
    return math.pow(x, i)

def unused():
    return 1

def find_zero(xs):
    '''A zero.'''
"""


@pytest.mark.parametrize("prompt", [PROMPT, f"Complete this:\n```python\n{PROMPT}```\nThanks."])
def test_helpers_of_the_prompt_are_the_tests_own(prompt: str) -> None:
    check = apart("assert abs(poly([1, 2], find_zero([1, 2]))) < 1", "", prompt, "find_zero")
    assert check.names == ("find_zero",)
    assert "def poly" in check.source and "def power" in check.source and check.source.startswith("import math\n")
    assert "def unused" not in check.source
    without = apart("assert abs(poly([1, 2], find_zero([1, 2]))) < 1", "", prompt, None)
    assert without.names == ("find_zero", "poly")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("f(1)", True),
        ("len(f(1)[0].x) - 1", True),
        ("f(1 == 2, [x for x in y if x])", True),
        ("-f(1)", True),
        ("Solution().f(g(1) == 2)", True),
        ("f(1) == 2", False),
        ("not f(1)", False),
        ("len([x for x in f(1) if x not in (1, 2)])", False),
        ("all(f(1))", False),
        ("isinstance(f(1), int)", False),
        ("ours(f(1) == 2)", False),
        ("ours(f(1))", True),
        ("str(f(1) or 3)", False),
        ("max(f(1), key=lambda x: x)", False),
    ],
)
def test_what_inside_says_something_of_what_is_wanted(source: str, said: bool) -> None:
    assert asks(ast.parse(source, mode="eval").body, {"ours"}) is said


def test_what_prepares_is_no_test() -> None:
    assert prepares(ast.parse("import x\ny = f(1)\ny.push(2)\ndef g(): assert 1\n'why'").body)
    assert not any(prepares(ast.parse(each).body) for each in ("", "g()", "assert f(1)", "for x in y: assert x"))


def test_the_code_gets_of_a_setup_what_its_own_checks_use() -> None:
    setup = "import math\nwanted = {1: 2}\ndef right(x): return wanted[x]"
    assert inside(setup, ["f(1)"]) == "import math"
    assert inside(setup, ["f(right)"]) == setup
    assert inside("", ["f(1)"]) == ""


@pytest.mark.parametrize(
    ("tests", "kinds"),
    [
        (["import math", "assert math.isclose(f(1), 2.0)"], ["value"]),
        (["assert all(f(x) == x for x in range(3))"], ["apart"]),
        (["assert isinstance(f(1), int)"], ["apart"]),
        (["assert (f(1) == 2) == True"], ["value"]),
        (["assert f(1) == f(2)", "assert f(1) == 2"], ["apart", "value"]),
        (["def ordered(x): return x == sorted(x)", "assert ordered(f(1))"], ["apart"]),
        (["x = f(1)", "assert x == 2"], ["value"]),
        (["s = Stack()", "s.push(1)", "assert s.pop() == 1"], ["value"]),
        (["assert f(1)"], ["value"]),
    ],
)
def test_how_tests_of_a_row_run(tests: list[str], kinds: list[str]) -> None:
    row: dict[str, Any] = {"test_list": tests}
    assert [each.check.kind for each in read_tests(row, "", None).checks] == kinds
