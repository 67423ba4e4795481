"""What nodes say, among all else that a node's output may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.launch.words import WORDS, Message, parse_line

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1)


@given(st.sampled_from(WORDS), NAMES, NAMES)
def test_a_line_says_what_was_put_into_it(word: str, node: str, address: str) -> None:
    message = Message(word, node, address)  # type: ignore[arg-type]
    assert parse_line(message.line() + "\n") == message


@pytest.mark.parametrize(
    "line",
    ["", "megarl-node ready", "megarl-node gone node1 10.0.0.1", "a megarl-node ready node1", "srun: error: x y"],
)
def test_other_lines_are_no_messages(line: str) -> None:
    assert parse_line(line) is None
