"""Tests as data sets have them, and what passes one. Each row here has the form of the data set that it is named after."""

from __future__ import annotations

import base64
import json
import pickle
import re
import time
import warnings
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.code_tests import Expected, Pair, RowTests, last_block, read_tests, same_output
from megarl.sandbox.job import MOST_VALUE, Check, Checked

PAIRS = (Pair("1 2\n", "3\n"), Pair("4 5\n", "9\n"))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"input_output": json.dumps({"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]})}, None),  # APPS, TACO
        ({"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]}, None),
        ({"tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"},
                               {"type": "stdin_stdout", "input": "4 5\n", "output": "9\n"}])}, None),  # DeepCoder
        ({"public_tests": {"input": ["1 2\n", "4 5\n"], "output": ["3\n", "9\n"]}}, None),  # CodeContests
        ({"private_tests": {"input": [], "output": []},
          "public_tests": {"input": ["1 2\n", "4 5\n"], "output": ["3\n", "9\n"]}}, None),
        ({"public_tests": {"input": ["0"], "output": ["0"]}, "private_tests": json.dumps({"input": [], "output": []}),
          "generated_tests": {"input": ["1 2\n", "4 5\n"], "output": ["3\n", "9\n"]}}, None),
        ({"public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
                                           {"input": "4 5\n", "output": "9\n", "testtype": "stdin"}]),
          "private_test_cases": "[]", "func_name": "ignored"}, None),  # LiveCodeBench
        ({"extra": {"cases": {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}}}, "extra.cases"),
    ],
)  # fmt: skip
def test_pairs(row: dict[str, Any], field: str | None) -> None:
    assert read_tests(row, "", field) == RowTests(pairs=PAIRS)


def test_the_answer_may_hold_the_tests_as_they_are() -> None:
    pairs = [{"input": "1 2", "output": "3"}]
    for answer in (pairs, {"inputs": ["1 2"], "outputs": ["3"]}, json.dumps(pairs)):
        assert read_tests({}, answer, None) == RowTests((Pair("1 2", "3"),), (), "")
    assert len(read_tests({}, ["assert f(1) == 2"], "answer").checks) == 1


def test_the_answer_is_looked_at_last() -> None:
    answer = json.dumps({"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]})
    assert read_tests({"difficulty": "easy"}, answer, None).pairs == PAIRS
    assert read_tests({"test_list": ["assert 1 == f()"]}, answer, "answer").pairs == PAIRS


def test_asserts() -> None:
    row = {"test_list": ["assert f(1) == [2, -3]", "assert 4 == f(2)", "assert f(3)", "assert f(4) is None, 'why'"],
           "test_setup_code": "import math", "test_imports": ["import re"]}  # fmt: skip
    tests = read_tests(row, "", None)
    assert tests.setup == "import math\nimport re"
    assert tests.checks == (
        Expected(Check("value", "f(1)"), [2, -3]),
        Expected(Check("value", "f(2)"), 4),
        Expected(Check("value", "not not f(3)"), True),
        Expected(Check("value", "f(4)"), None, exactly=True),
    )
    assert read_tests({"tests": "assert f(1) == [2, -3]\nassert 4 == f(2)"}, "", None).checks == tests.checks[:2]
    assert read_tests({"tests": row["test_list"]}, "", None).first(2).checks == tests.checks[:2]


def test_other_statements_are_one_test() -> None:
    source = "def check(candidate):\n    for x in [1]:\n        assert candidate(x) == 2"
    assert read_tests({"test": source, "entry_point": "f"}, "", None).checks == (
        Expected(Check("apart", f"{source}\ncheck(f)", ("f",))),
    )


def test_a_check_function_of_asserts_alone_is_as_many_tests() -> None:
    source = "METADATA = {}\ndef check(c):\n    'why'\n    print\n    assert True\n    assert c(1) == 2, 'm'\n    assert not c(0)"
    assert read_tests({"test": source, "entry_point": "f"}, "", None).checks == (
        Expected(Check("value", "f(1)"), 2),
        Expected(Check("value", "not not f(0)"), False),
    )
    looped = f"{source}\n    for x in range(3):\n        assert c(x) == x"
    assert [each.check.kind for each in read_tests({"test": looped, "entry_point": "f"}, "", None).checks] == ["apart"]


def test_what_stands_beside_asserts_is_no_test_itself() -> None:
    """Whatever the code is, it would pass."""
    helper = "def doubled(number):\n    return 2 * number"
    tests = read_tests(
        {"tests": [helper, "x = f(1)", "assert x == doubled(1)"], "test_imports": ["import re"]}, "", None
    )
    assert len(tests) == 1 and (tests.setup, tests.prepared) == ("import re", f"{helper}\nx = f(1)")
    assert tests.setup_inside() == "import re"
    row = {"tests": [helper, "assert doubled(f(1)) == 2"], "test_setup_code": "class Node: pass"}
    assert read_tests(row, "", None).setup_inside() == f"class Node: pass\n{helper}"
    assert len(read_tests({"tests": f"{helper}\nif doubled(1) != f(1):\n    raise ValueError"}, "", None)) == 1


def test_calls() -> None:
    row = {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})}
    call = "(Solution().add if 'Solution' in globals() else add)(*[1, 2])"
    assert read_tests(row, "", None).checks == (Expected(Check("value", call), 3, as_json=True),)
    case = {"input": "1\n2", "output": "3", "testtype": "functional"}  # LiveCodeBench
    for field in ("tests", "private_test_cases", "public_test_cases"):
        row = {field: json.dumps([case]), "metadata": json.dumps({"func_name": "add"})}
        assert read_tests(row, "", None).checks == (Expected(Check("value", call), 3, as_json=True),)


def test_arguments_of_a_call_are_cut_at_newlines_alone() -> None:
    case = {"input": '"a\u2028b\x85c"\r\nno json\n[1]\n', "output": "3", "testtype": "functional"}
    row = {"tests": [case], "metadata": {"func_name": "f"}}
    (check,) = read_tests(row, "", None).checks
    assert check.check.source.endswith(repr(["a\u2028b\x85c", "no json", [1]]) + ")")


@pytest.mark.parametrize("output", [3, [3, 4]])
def test_one_input_of_a_named_function_is_one_call(output: Any) -> None:
    call = "(Solution().add if 'Solution' in globals() else add)(*[1, 2])"
    row = {"tests": {"fn_name": "add", "input": [1, 2], "output": output}}
    assert read_tests(row, "", None).checks == (Expected(Check("value", call), output, as_json=True),)


def test_a_pickle_is_never_opened() -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "1", "output": "1"}] * 99)))).decode()
    row = {"private_test_cases": packed, "public_test_cases": [{"input": "1", "output": "1", "testtype": "stdin"}]}
    with pytest.raises(ValueError, match=r"its field 'private_test_cases' is compressed, a pickle .* is never opened"):
        read_tests(row, "", None)
    assert read_tests(row, "", "public_test_cases").pairs == (Pair("1", "1"),)


@pytest.mark.parametrize(
    ("row", "field", "says"),
    [
        ({"prompt": "x"}, None, "the row has no tests: none of the fields tests, "),
        ({"prompt": "x", "y": 1}, "z", "the row has no field 'z'; it has prompt, y"),
        ({"tests": "assert ("}, None, "neither JSON nor Python: 'assert \\('"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, None, "as many inputs as outputs"),
        ({"tests": [7]}, None, "these are no tests: 7"),
        ({"tests": [[]]}, None, "its field 'tests' holds no tests"),
        (
            {"private_tests": {"input": [], "output": []}, "public_tests": [[]]},
            None,
            "its fields 'private_tests', 'public_tests' hold no tests",
        ),
        (
            {"tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
            None,
            "of a function that the row does not name",
        ),
        ({"tests": {"fn_name": "a b", "inputs": [[1]], "outputs": [1]}}, None, "'a b' is no name of a function"),
        ({"tests": {"fn_name": 3, "inputs": [[1]], "outputs": [1]}}, None, "its tests cannot be read: AttributeError"),
        ({"tests": "assert f(1) == 1", "test_imports": 5}, None, "its tests cannot be read: TypeError"),
        (
            {"test": "def test_f():\n    assert f(1) == 2"},
            None,
            "its field 'test' calls nothing, and every program would pass",
        ),
        (
            {"test": "M = {}\n\ndef check(candidate):\n    assert candidate(1) == 2"},
            None,
            "what the row's entry_point names",
        ),
        ({"tests": ["x = f(1)", "def test_x():\n    assert x"]}, None, "its field 'tests' calls nothing"),
        (
            {"tests": {"inputs": ["1", "2"], "outputs": ["", "\n"]}},
            None,
            "its field 'tests' wants no output of any input",
        ),
        ({"tests": "[" * 5000}, None, "its tests cannot be read: RecursionError"),
        ({"tests": f"assert f({'-' * 5000}1) == 1"}, None, "its tests cannot be read: RecursionError"),
    ],
)
def test_what_is_no_test_is_said(row: dict[str, Any], field: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_tests(row, "", field)


@pytest.mark.parametrize(
    ("expected", "text", "met"),
    [
        (Expected(Check("value", "x"), [1, (2,)]), "[1, (2, ), ]", True),
        (Expected(Check("value", "x"), [1, 2]), "(1, 2, )", False),
        (Expected(Check("value", "x"), [1, 2], as_json=True), "(1, 2, )", True),
        (Expected(Check("value", "x"), [5], as_json=True), "5", True),
        (Expected(Check("value", "x"), 1), "True", True),  # as Python's == has it
        (Expected(Check("value", "x"), True, exactly=True), "1", False),
        (Expected(Check("value", "x"), 1), "__import__('os')", False),
        (Expected(Check("value", "x"), 1), "[" * 300, False),
        (Expected(Check("value", "x"), [1]), "{{1, }, }", False),  # {frozenset({1})}
        (Expected(Check("value", "x"), [1]), "{{1, }: 2}", False),
        (Expected(Check("value", "x"), 1), f"0x{'f' * 1000}+1j", False),  # it overflows
        (Expected(Check("assert", "x")), "", True),
    ],
)
def test_values_are_judged_outside(expected: Expected, text: str, met: bool) -> None:
    assert expected.met(Checked(True, text)) is met
    assert not expected.met(Checked(False, text))


def test_what_code_says_in_the_runners_place_fills_no_log_and_takes_no_time() -> None:
    wanted = Expected(Check("value", "x"), 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not wanted.met(Checked(True, "1if 1else " * 5 + "1"))
        assert not wanted.met(Checked(True, f"1{' ' * MOST_VALUE}"))
    assert said == []


def test_the_last_closed_block_is_the_code() -> None:
    assert last_block("no code") is None
    assert last_block("```python\nfirst\n```\nthen\n```py\nsecond\n```\n") == "second\n"
    assert last_block("```python\nwhole\n```\n```python\ncut off") == "whole\n"
    assert last_block("  ```\n  x = 1\n  ```") == "  x = 1\n"
    assert last_block("```python\r\nx = 1\r\n```\r\nDone.") == "x = 1\r\n"


def test_a_response_that_opens_block_after_block_is_read_at_once() -> None:
    """A policy that repeats itself: its collector does nothing else meanwhile."""
    began = time.process_time()
    assert last_block("```python\n" * 16000) is None
    assert last_block("```\nx\n```\n" * 16000) == "x\n"
    assert time.process_time() - began < 1.0


@given(st.lists(st.sampled_from(["```", "```py", " ```", "``` ", "``` a`b", "x", "", "```\r"])), st.booleans())
def test_blocks_are_those_of_one_pattern(lines: list[str], ended: bool) -> None:
    text = "\n".join(lines) + "\n" * ended
    pattern = r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*\r?$"
    found = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    assert last_block(text) == (found[-1] if found else None)


def test_output_is_compared_by_lines() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")
    assert not same_output("", "1")
    assert not same_output(" 1", "1")
