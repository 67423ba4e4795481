"""What the text of an answer says before any algebra."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.answer_forms import (
    by_names,
    by_text,
    cases_apart,
    contradicts,
    in_order,
    in_set,
    parts,
    plain,
    same_choice,
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"1\,234\,567", "1234567"),
        ("1 234 567", "1234567"),
        ("12 34", "12 34"),
        (r"0.1\,234", r"0.1\,234"),
        ("-2.5e-3", r"-2.5\times 10^{-3}"),
        ("3e", "3e"),
        ("42 apples", "42"),
        ("42 apples each day.", "42"),
        ("42 or less", "42 or less"),
        ("5 million dollars", "5 million dollars"),
        ("2 pi", "2 pi"),
    ],
)
def test_numbers_are_written_plainly(text: str, said: str) -> None:
    assert plain(text) == said


@given(st.integers(10**6, 10**12))
def test_any_separator_of_thousands_is_one(number: int) -> None:
    for separator in (r"\,", r"\ ", "~", "{,}", r",\!", " ", "\u202f"):
        assert plain(f"{number:,}".replace(",", separator)) == str(number)


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ("x+1", "1+x", None),
        ("1:2", "2:4", True),
        ("1:2", "1/2", None),
        ("1:2:3", "1/6", False),
        ("0:2", "0:3", True),
        ("3:30", "3:30 ", True),
        ("ABC", r"\text{ABC}", True),
        ("ABC", "ACB", False),
        ("abc", "acb", None),
        ("(1,2)", r"\left\{1,2\right\}", False),
        (r"1,\dots,9", r"$1, \dots, 9$", True),
        ("1 7", "17", False),
        ("17_8", "17", False),
        ("17", "17_8", None),
        ("17_{10}", "17", None),
        ("3:30 pm", r"3:30\text{ p.m.}", True),
        ("3:30 am", r"3:30\text{ p.m.}", False),
        ("0.1", "3:30", False),
        (r"\{(1,2)\}", "(1,2),(3,4)", None),
    ],
)
def test_where_the_text_decides(found: str, wanted: str, said: bool | None) -> None:
    assert by_text(found, wanted) is said


def test_letters_of_both_cases_are_different_symbols() -> None:
    assert cases_apart(r"\frac{M}{m}", r"\text{M}") == (r"\frac{q}{m}", r"\text{M}")
    assert cases_apart("Qq", "W") == ("zq", "W")
    assert cases_apart("A", "a") == ("A", "a")
    assert cases_apart("X+y", "y+X") == ("X+y", "y+X")


def test_commas_within_brackets_separate_nothing() -> None:
    assert parts(r"(1,2), \{3,4\}, 5") == ["(1,2)", r"\{3,4\}", "5"]
    assert parts("1") == ["1"]


def test_a_choice_has_one_marked_letter() -> None:
    assert same_choice(r"\textbf{(C)}\ 12", "C") is True
    assert same_choice("(C)", r"\text{(C)}") is True
    assert same_choice("C", "C") is None  # the text alone says it
    assert same_choice("D. 12", "C") is False
    assert same_choice("C. not (D)", "C") is False
    assert same_choice("12", "C") is None
    assert same_choice("C) 12", "12") is None


def test_brackets_around_all_of_it() -> None:
    assert in_order(r"\left(1, f(2)\right)") == ["1", "f(2)"]
    assert in_order("(1,2),(3,4)") is None
    assert in_order("(1)") is None
    assert in_set(r"\{1,2\}") == "1,2"
    assert in_set("1,2") == "1,2"
    assert by_names(["y=1", "x=2"]) == ["x=2", "y=1"]
    assert by_names(["2", "1"]) == ["2", "1"]


@pytest.mark.parametrize(
    ("text", "does"), [("18=17", True), ("x=1/3=0.33", False), ("2/0=1", False), ("a=18=17", True)]
)
def test_a_number_is_no_other(text: str, does: bool) -> None:
    assert contradicts(text) is does
