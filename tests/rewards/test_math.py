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
        (r"\boxed{1 \\ {2} \\} and {3}", r"1 \\ {2} \\"),
        (r"#### 1, that is \boxed{2}", "2"),
        (r"\boxed{1} no" + "\n#### 2", "2"),
        ("42", None),
        ("####", None),
        ("#### \n42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", None),
        (r"\boxed {42} or \fbox{43}", "43"),
        ("#### **42**", "42"),
        ("\\boxed{42}\n#### Check\nIt holds.", "42"),
        ("\\boxed{42}\n##### Note", "42"),
        ("\\boxed{42}\n#### B", "B"),
        ("#### Check", "Check"),
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
        ("<think>It may be \\boxed{5}.</think>I do not know.", "5", 0),
        ("<think>It may be \\boxed{5}", "5", 0),
        ("It may be \\boxed{5}.\n</think>\n\nIt is \\boxed{6}.", "6", 1),
        ("[THINK]\\boxed{6}[/THINK]\\boxed{5} <think>or \\boxed{6}", "5", 1),
        (r"\boxed{\frac{1}{}", "1", 0),
        (r"\boxed{18 \approx 17}", "18", 0),
        (r"\boxed{18 ≈ 17}", "18", 0),
        (r"\boxed{5.67 \approx 6}", "5.67", 1),
        (r"\boxed{)(}", "1", 0),
    ],
)
def test_rewards(response: str, answer: str, reward: float) -> None:
    assert math("", response, answer, {}) == reward


def test_what_is_thought_of_within_thinking_that_the_prompt_opened_is_no_answer() -> None:
    opened = {"thinking_ends": "</think>"}
    assert math("<think>\n", r"It may be \boxed{5}", "5", opened) == 0
    assert math("<think>\n", r"It may be \boxed{6}.</think>It is \boxed{5}.", "5", opened) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"10\,000", "10000"),
        ("1 000 000", "1,000,000"),
        ("1{,}234", "1234"),
        ("42 dollars", "42"),
        ("18 eggs per day", "18"),
        ("€42", "42"),
        ("1e-05", "0.00001"),
        ("1e-00", "1"),
        ("1E+003", "1000"),
        ("1e3", "1000"),
        (r"\log_2 8", "3"),
        (r"\binom{5}{2}", "10"),
        ("6:8", "3:4"),
        ("3:4", r"\frac{3}{4}"),
        ("3:6:9", "1:2:3"),
        ("a", "A"),
        (r"\text{true}", "True"),
        ("Yes", "yes"),
        ("no", "No."),
        ("Even", "even"),
        ("1, 100", "100,1"),
        ("1,1,2", "2, 1, 1"),
        (r"1 \pm \sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}"),
        (r"\{1,1,2\}", r"\{1,2\}"),
        (r"\left(\frac{5}{6}\right)^{100}", r"\frac{5^{100}}{6^{100}}"),
        (r"(\frac{2}{3})^{2023}", r"\left(\frac23\right)^{2023}"),
        (r"(x+1)^{2000}", r"\left(x+1\right)^{2000}"),
        ("0.166667", r"\frac{1}{6}"),
        ("ab", "ba"),
        ("Mm", "mM"),
        (r"1, 2, \ldots, 9", r"1,2,\ldots,9"),
        (r"\sqrt{2}\sqrt{3}-\sqrt{6}", "0"),
        ("9^{9^{9}}", "9^{9^{9}} "),
        (r"5\text{ cm}", "5 centimeters"),
        (r"12 \text{ cm}^{2}", "12 square centimeters"),
        (r"12\,\mathrm{cm}^2", "12 cm²"),
        (r"9.8 \mathrm{~m/s^2}", "9.8"),
        (r"3\sqrt{2}\text{ inches}", r"3\sqrt2"),
        ("100 m", "100 meters"),
        ("45°", r"45^{\circ}"),
        ("20°C", r"20^{\circ} \mathrm{C}"),
        (r"\$18.90", "18.9 dollars"),
        ("60 mph", r"60\text{ miles per hour}"),
        (r"(5,\infty)", "x>5"),
        (r"(5, ∞)", r"\{x \mid x>5\}"),
        (r"[2,5)", r"2 ≤ x < 5"),
        ("(-1,7)", "7>x>-1"),
        (r"(-\infty,-3]\cup[3,\infty)", r"x\le -3 \text{ or } x\ge 3"),
        ("√2", r"\sqrt{2}"),
        ("3√5", r"\sqrt{45}"),
        ("∛4", r"\sqrt[3]{4}"),
        ("½", "0.5"),
        ("2 1/3", r"\frac{7}{3}"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        ("x²", "x^2"),
        ("𝟓", "５"),
        ("3 + 4 i", "3+4i"),
        (r"\varnothing", r"\{\}"),
        ("(1,2)", "x=1, y=2"),
        (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
        (r"1, 2 \text{ and } 3", r"\{1,2,3\}"),
        ("17_8", r"17_{\text{eight}}"),
        (r"2\text{A}_{16}", "2A_{16}"),
        ("17", "17_{10}"),
        ("3:30 PM", r"3:30\text{ p.m.}"),
        ("3:4", r"3\text{ to }4"),
        ("5.67 \\approx 6", "5.67"),
        ("f'(x) = 2x", "2x"),
        ("Alice's", r"\text{Alice's}"),
        ("f''(2)", "f''(2) "),
    ],
)
def test_what_is_equal(left: str, right: str) -> None:
    assert equal(left, right) and equal(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("60 43", "103"),
        (r"5 \quad 6", "11"),
        (r"2\,500", "502"),
        (r"1.6\times 10^{-19}", r"-1.6\times 10^{-19}"),
        (r"1.6\times 10^{-19}", r"6.63\times 10^{-34}"),
        ("0.0000001", "0.0000002"),
        ("2^{-60}", "2^{-61}"),
        (r"\frac{1}{2^{2023}}", r"\frac{1}{2^{2022}}"),
        (r"2-\frac{1}{2^{99}}", r"2-\frac{1}{2^{98}}"),
        (r"\frac{4!\cdot 48!}{52!}", r"\frac{4!\cdot 47!}{52!}"),
        ("e^{-50}", "e^{-51}"),
        (r"\left(\frac{2}{3}\right)^{2023}", r"\left(\frac{2}{3}\right)^{2022}"),
        (r"\frac{GMm}{R^2}", r"\frac{Gm^2}{r^2}"),
        (r"\frac{R-r}{2}", "0"),
        (r"\frac{M}{m}", r"\frac{m}{M}"),
        ("X+x", "2x"),
        ("1:2:4", "1:4:2"),
        ("1/6", "1:2:3"),
        ("2:20", "1:10"),
        ("TTF", "TFT"),
        ("No", "Yes"),
        ("Fr", "fr"),
        ("NO", "ON"),
        ("silent", "listen"),
        (r"\angle ABC", r"\angle BAC"),
        ("999", r"1, 2, 3, \ldots, 999"),
        ("10", r"\{1, 2, \ldots, 10\}"),
        ("1,1,2", "1,2,2"),
        ("1,2", "1,2,2"),
        (r"\{0,1\}", "(0,1)"),
        ("5 million", "5"),
        ("123_5", "123_{6}"),
        (r"5\text{ cm}", r"5\text{ m}"),
        (r"5\text{ cm}", "5m"),
        (r"5\text{ cm}", "5 inches"),
        (r"12\text{ cm}^2", r"12\text{ cm}^3"),
        ("60 mph", r"60\,\text{km/h}"),
        ("100 m", "100 km"),
        (r"\$5", "5 cents"),
        ("45 radians", r"45^\circ"),
        (r"20^\circ\text{F}", "20°C"),
        ("x+2h", "x+2"),
        ("6s", "6t"),
        (r"\frac{1}{2}g", r"\frac{1}{2}"),
        (r"5\text{ thousand}", "5"),
        ("(2,1)", "1,2"),
        ("(1,2)", "y=1, x=2"),
        (r"(5,\infty)", r"x \ge 5"),
        ("x>5", "y>5"),
        (r"(-\infty,-3]\cup[3,\infty)", r"x\le -3 \text{ and } x\ge 3"),
        ("A", r"(A) \text{ or } (B)"),
        ("A", "(A), (B)"),
        ("3:30 PM", r"3:30\text{ AM}"),
        ("3:30", "0.1"),
        ("1 7", "17"),
        ("18 = 17", "17 "),
        ("f'(x)", "f(x)"),
        (r"x^{\prime}", "x"),
        (r"\mp 3", "3"),
        ("10^{100}+1", "10^{100}"),
        ("10^{-400}", "0"),
        (r"\sin(10^{-50})", "0"),
        (r"\frac{0}{0}", "5"),
        (r"\infty", r"-\infty"),
        ("[0,1]", "[0,1)"),
        (r"(-\infty,0)\cup(1,\infty)", r"(-\infty,0)\cap(1,\infty)"),
        ("y=y", "y=2x+1"),
        ("0(x^2+y^2)=0", "x^2+y^2=1"),
        ("(x^2+y^2-1)(x-y)=0", "x^2+y^2=1"),
        ("|x|", "x"),
        ("n!", "n"),
        ("х", "x"),
        ("О", "O"),
        ("1\u200b5", "15"),
        (r"\text{not even}", r"\text{even}"),
        ("1", "True"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        ("4+2k", "4"),
    ],
)
def test_what_is_not_equal(left: str, right: str) -> None:
    assert not equal(left, right) and not equal(right, left)


@pytest.mark.parametrize(
    "hedged",
    [
        r"23 \lor 17",
        "23 | 17",
        "x=17|23",
        r"23 \\ 17",
        r"23 \Rightarrow 17",
        "23 -> 17",
        "x=17。23",
        r"\neq 17",
        r"23 \bmod 17",
        r"\ge 17",
        r"23 \text{ final answer is } $17$. I hope",
        r"17 \text{ or 18 or 19}",
        r"17 \text{ [alternatively 23]}",
        r"17\text{(23)}",
        "17 perhaps thirteen",
        r"17\text{ is wrong}",
        "17 squared",
        "23=17",
    ],
)
def test_a_box_that_says_more_than_its_last_number_is_not_that_number(hedged: str) -> None:
    """math-verify looks through what it cannot read as a whole for the last number, or the first."""
    assert math("", rf"\boxed{{{hedged}}}", "17", {}) == 0.0
    assert math("", r"\boxed{17}", hedged, {}) == 0.0


BETWEEN = (
    r"\approx|\equiv|\sim|\to|\Rightarrow|\iff|:=|==|=|\stackrel{?}{=}|\in|\mid|\cup|\vee|\pm|<|\le|,|;|:|/|\\|\quad|_"
)
BETWEEN += r"|\text{ or }|\text{ and }|\text{ i.e. }|or|&|\boxed{|≈|→|、|%|^|(|\{|[|$"


@pytest.mark.parametrize(
    ("one", "other"), [("5", "4"), (r"\frac12", r"\sqrt{3}"), ("x+1", "x+2"), ("A", "B"), ("(1,2)", "(3,4)")]
)
def test_no_text_is_right_of_two_answers(one: str, other: str) -> None:
    for between in BETWEEN.split("|"):
        for text in (
            f"{one} {between} {other}",
            f"{one} {between} {other} = {one}",
            f"x = {one} {between} {other}, {one}",
        ):
            rewards = [math("", rf"\boxed{{{text}}}", answer, {}) for answer in (one, other)]
            assert sum(rewards) <= 1, text


@pytest.mark.parametrize("chosen", [r"\textbf{(A)}\ 5", "Option A", "A.", "A) red", "A: 5", r"\text{(A) 5}"])
def test_a_choice_is_its_letter(chosen: str) -> None:
    assert math("", rf"\boxed{{{chosen}}}", r"\text{A}", {}) == 1.0
    assert math("", rf"\boxed{{{chosen}}}", "B", {}) == 0.0


def test_a_base_may_be_left_out_and_not_invented() -> None:
    assert math("", r"\boxed{1101}", "1101_2", {}) == 1.0
    assert math("", r"\boxed{17_8}", "17", {}) == 0.0


@pytest.mark.parametrize("marked", [r"\approx 17", "A. 17", r"17 \text{ (mod 23)}", r"10 apples + 7 apples = 17"])
def test_the_only_number_of_a_text_is_the_answer(marked: str) -> None:
    assert math("", rf"\boxed{{{marked}}}", "17", {}) == 1.0


def test_what_algebra_raises_at_is_wrong_and_no_failure() -> None:
    assert math("", r"\boxed{17 \mod 23}", "17", {}) == 0.0


@pytest.mark.parametrize(
    "endless",
    [
        "9^{9^{9}}",
        "9^9^9",
        "3^{3^{3^3}}",
        "(x+1)^{2000}",
        r"\sum_{k=1}^{10000000}\frac1{k^2}",
        "1000000!",
        "0" * 20_000 + ",1",
        "0" * 20_000 + "x",
        "1+" * 500 + "1",
        "(9^{9999})^{9999}",
        r"2^{2\cdot 10^{9}}",
        r"2^{\binom{100}{50}}",
        "((5!)!)!",
        "{1000000}!",
        "(10^6)!",
        "17!!",
        r"(1+\sqrt2)^{9999}",
        "(x+y+z+w+v+u)^{40}",
        r"\frac{x^{9999}-1}{x-1}",
        "x^x^x^x^x^2",
        "(" * 60 + "1" + ")" * 60,
        "a_" * 200 + "1",
        "x" * 500,
        "(x+1)" * 40,
    ],
)
def test_what_takes_for_ever_is_wrong_at_once(endless: str) -> None:
    """It was written by a policy, and is not the grader's failure."""
    assert math("", rf"\boxed{{{endless}}}", r"\frac12", {}) == 0.0


@pytest.mark.parametrize("found", ["1e" + "9" * 5000, "1e-" + "9" * 5000, "1:" + "9" * 5000, "9" * 5000 + ":1:2"])
@pytest.mark.parametrize("wanted", ["0", "1:2", "1:2:3"])
def test_more_digits_than_python_makes_a_number_of_are_wrong(found: str, wanted: str) -> None:
    assert math("", rf"\boxed{{{found}}}", wanted, {}) == 0.0


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


def test_any_of_several_answers_is_right() -> None:
    """Each may be marked, as one may."""
    answers = [r"\frac{1}{2}", "so #### 7", "x"]
    found = [math("", f"#### {response}", answers, {}) for response in ("0.5", "7", "x", "so", "8")]
    assert found == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert math("", "#### 7", [], {}) == 0.0
