"""Which value of a flag counts."""

from __future__ import annotations

import pytest

from megarl.core.words import last_value, with_article


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--share", "0.5"], "0.5"),
        (["--share=0.5", "--other", "1", "--share", "0.7"], "0.7"),
        (["--share", "0.7", "--share=0.5"], "0.5"),
        (["--share"], ""),
        (["--share="], ""),
        (["--shares", "0.5", "share", "0.5"], None),
        ([], None),
    ],
)
def test_the_last_one_counts(words: list[str], value: str | None) -> None:
    assert last_value(words, "--share") == value


@pytest.mark.parametrize(("noun", "whole"), [("int", "an int"), ("Array", "an Array"), ("str", "a str")])
def test_a_noun_has_its_article(noun: str, whole: str) -> None:
    assert with_article(noun) == whole
