from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.math import equal, final_answer, math


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 42", "42"),
        ("#### 1\nno:\n#### 42 \nbye", "42"),
        ("####42", "42"),
        (r"thus \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}} and \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"#### 1, that is \boxed{2}", "2"),
        (r"\boxed{1} no" + "\n#### 2", "2"),
        ("42", None),
        ("####", None),
        ("#### \n42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_the_final_answer_is_what_the_last_marker_marks(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("#### 42", "42", 1),
        ("#### 42", "6*7 is\n#### 42", 1),
        (r"\boxed{42}", "#### 42", 1),
        ("#### $1,234.", "1234", 1),
        ("#### 1234.00", "1,234", 1),
        ("#### -5", "5", 0),
        ("#### -0", "0", 1),
        ("#### 042", "42", 1),
        ("#### 12,34", "1234", 0),
        ("42", "42", 0),
        ("the answer is 42", "42", 0),
        ("#### 41", "42", 0),
        ("#### 42 apples", "42", 1),
        ("#### 41 or 42", "42", 0),
        ("#### 1, 2, 42", "42", 0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{\dfrac{2}{4}}", r"$\frac12$", 1),
        (r"\boxed{0.333}", r"\frac{1}{3}", 0),
        (r"\boxed{1+x^2}", r"x^2+1", 1),
        (r"\boxed{(x+1)^2}", r"x^2+2x+1", 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        (r"\boxed{\text{A}}", "A", 1),
        (r"\boxed{(1, 2]}", r"(1,2]", 1),
        (r"\boxed{(1, 2)}", r"(1,2]", 0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        (r"\boxed{\frac{1}{}", "1", 0),
        (r"\boxed{)(}", "1", 0),
    ],
)
def test_rewards(response: str, answer: str, reward: float) -> None:
    assert math("", response, answer, {}) == reward


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_integers_are_equal_when_they_are(left: int, right: int) -> None:
    assert equal(f"{left:,}", str(left))
    assert equal(f"{left}.0", f"${left}$")
    assert equal(str(left), str(right)) == (left == right)


@given(st.integers(-50, 50), st.integers(1, 50), st.integers(1, 9))
def test_fractions_are_equal_whatever_they_are_extended_by(numerator: int, denominator: int, factor: int) -> None:
    extended = rf"\frac{{{numerator * factor}}}{{{denominator * factor}}}"
    assert equal(extended, rf"\frac{{{numerator}}}{{{denominator}}}")
    other = Fraction(numerator, denominator) + 1
    assert not equal(extended, rf"\frac{{{other.numerator}}}{{{other.denominator}}}")
