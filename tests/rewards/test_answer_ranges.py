"""Inequalities of one symbol are intervals, and nothing else is."""

from __future__ import annotations

import time

import pytest

from megarl.rewards.answer_ranges import as_ranges


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("x>5", r"(5,\infty)"),
        (r"5 \le x", r"[5,\infty)"),
        ("x<-1", r"(-\infty,-1)"),
        (r"2\leq x<5", "[2,5)"),
        (r"5>x\ge 2", "[2,5)"),
        (r"x \le -3 \text{ or } x > 3", r"(-\infty,-3]\cup (3,\infty)"),
        (r"\{x \mid x>\frac{1}{2}\}", r"(\frac{1}{2},\infty)"),
    ],
)
def test_inequalities_are_intervals(text: str, interval: str) -> None:
    for _ in range(2):
        assert as_ranges(text, "(0,1]") == (interval, "(0,1]")
    assert as_ranges("[0,1]", text) == ("[0,1]", interval)


@pytest.mark.parametrize(
    "text", ["x>y", "5", r"x\le -3 \text{ and } x\ge -5", "2<x>1", "x>", r"x<1 \text{ or } y>2", "|x|>2", "f(x)>2"]
)
def test_what_else_there_is_stays_as_it_is(text: str) -> None:
    assert as_ranges(text, "(0,1)") == (text, "(0,1)")


def test_symbols_have_to_be_the_same() -> None:
    assert as_ranges("x>5", "y>5") == ("x>5", "y>5")
    assert as_ranges("x>5", "5<x") == (r"(5,\infty)", r"(5,\infty)")
    assert as_ranges("x>5", "5") == ("x>5", "5")


def test_many_blanks_take_no_time() -> None:
    began = time.process_time()
    as_ranges("x<1" + " " * 900 + ",", "(0,1)")
    assert time.process_time() - began < 1.0
