"""Flags among the words of a command line, and which of the words that there are was meant by one that is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


def last_value(words: Sequence[str], flag: str) -> str | None:
    """What follows a flag, or its `=`, the last time; empty where nothing does, None where the flag is not there."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters as it is, of a longer one its beginning."""
    return text if len(text) <= most else f"{text[:most]}..."


def with_article(noun: str) -> str:
    """With its article, `an` in front of a vowel's letter."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def some(names: Sequence[str], most: int) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(given: object, there: Iterable[str], *, quoted: bool = False) -> str:
    """` Did you mean NAME?`, behind a sentence; empty where none of those that there are is near. quoted: NAME in quotes."""
    near = get_close_matches(given, [*there], n=1) if isinstance(given, str) else []
    return f" Did you mean {repr(near[0]) if quoted else near[0]}?" if near else ""


def nearest_beside(path: Path) -> Path | None:
    """What lies in the folder of a path that leads nowhere and has the nearest name; None where nothing is near."""
    names = [each.name for each in path.parent.iterdir() if each.name != path.name] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None
