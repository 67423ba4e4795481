"""What is written in several ways comes out in one."""

from __future__ import annotations

import pytest

from megarl.rewards.answer_spelling import respelled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("**42**", "42"),
        ("√2", r"\sqrt{2}"),
        ("√12", r"\sqrt{12}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\sqrt12", r"\sqrt{1}2"),
        ("∛4", r"\sqrt[3]{4}"),
        ("2½", r"2\frac{1}{2}"),
        ("-1 2/3", r"-1\frac{2}{3}"),
        ("x²", "x^{2}"),
        ("10⁻⁵", "10^{-5}"),
        ("４２", "42"),
        ("−5", "-5"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"0.\bar{3}", r"\frac{1}{3}"),
        ("2 pi", r"2\pi"),
        (r"3\text{ to }4", "3:4"),
        (r"\color{red}{7}", "{7}"),
        (r"\left\{ 1 \right\}", r"\left\{1 \right\}"),
        (r"\mbox{cm}", r"\text{cm}"),
        (r"20\,\%", r"20\%"),
        ("Evelyn", "Evelyn"),
        ("", ""),
    ],
)
def test_one_spelling(text: str, said: str) -> None:
    assert respelled(text) == said
