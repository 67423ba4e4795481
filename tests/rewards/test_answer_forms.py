"""What the text of an answer says before any algebra."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.answer_cost import costly
from megarl.rewards.answer_forms import by_text, cases_apart, parts, plain


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


@pytest.mark.parametrize(
    "text", ["2^{2023}", "x^{2023}-1", r"e^{i\pi/3}", "2^{n^{2}}", "(1+x)^{50}", "100!", r"\binom{52}{13}"]
)
def test_what_contests_ask_for_is_computed(text: str) -> None:
    assert not costly(text)
