"""Flags among the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence


def last_value(words: Sequence[str], flag: str) -> str | None:
    """What follows a flag, or its `=`, the last time; empty where nothing does, None where the flag is not there."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found
