"""What contests ask for is computed; what a policy writes to be waited for is not."""

from __future__ import annotations

import pytest

from megarl.rewards.answer_cost import costly


@pytest.mark.parametrize(
    "text",
    [
        "2^{2023}",
        "x^{2023}-1",
        r"e^{i\pi/3}",
        "2^{n^{2}}",
        "(1+x)^{50}",
        "100!",
        r"\binom{52}{13}",
        "(2n)!",
        r"\frac{(n+1)!}{2^{n}}",
        r"\left(\frac{2}{3}\right)^{2023}",
        "2^{100}+3^{100}+5^{100}",
        r"\frac{a^{10}+b^{10}}{(a+b)^{10}}",
        r"\sqrt{2+\sqrt{2+\sqrt{2}}}",
        r"\frac{10^{2024}-1}{9}",
    ],
)
def test_what_contests_ask_for_is_computed(text: str) -> None:
    assert not costly(text)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "(9^{9999})^{9999}",
        r"2^{2\cdot 10^{9}}",
        r"2^{\binom{100}{50}}",
        "((5!)!)!",
        "17!!",
        "(10^6)!",
        r"(1+\sqrt2)^{9999}",
        "(x+y+z+w+v+u)^{40}",
        r"\frac{x^{9999}-1}{x-1}",
        "((((((((((1))))))))))",
        "a_" * 30 + "1",
        "x" * 500,
        r"(0,1)\cup" * 20 + "(1,2)",
    ],
)
def test_what_takes_for_ever_shows_it(text: str) -> None:
    assert costly(text)
