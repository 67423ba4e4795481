"""Whether algebra on an answer would take longer than anybody waits, by its text.

A policy may write what it likes, and a deadline that passes is a failure, on which nothing is trained: the answer would cost it
nothing. So what shows its cost is wrong at once. Not the deadline itself: that is the pool's.
"""

from __future__ import annotations

import re
from itertools import accumulate
from math import prod

_TOWER = re.compile(r"\d\s*\^\s*\{?\s*\(?\d+\s*\^|\^\s*\{?\s*\w+\s*\^\s*\{?\s*\w+\s*\^")
_POWER = re.compile(r"(\S)\s*\^\s*(\{|[+-]?\d+|[A-Za-z\\])")
_GROWS = re.compile(r"\^|!|\\[dt]?binom")
_FACTORIAL = re.compile(r"(\d+)\s*\}?\s*!|\\[dt]?binom\s*\{?\s*(\d+)")
_ROOTS = re.compile(r"\\(?:sqrt|sin|cos|tan|ln|log|exp)(?![a-z])")
_PIECES = re.compile(r"[-+*/^_]|\\[A-Za-z]+|[A-Za-z]")
_TWICE = re.compile(r"!\s*\)?\}?\s*!|[\^!][^()]*\)\s*!|\\exp\s*\(?\s*\d+\s*\^")  # factorials of what has grown already
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_DIVIDED = re.compile(r"\\frac|/")
MOST_CHARACTERS, MOST_PIECES, MOST_OF_ONE = 1000, 150, 12
MOST_DEPTH = 8  # brackets within brackets, for which the parser takes twice as long each
MOST_EXPONENT, MOST_FACTORIAL = 10_000, 2000
MOST_POWER, MOST_TERMS, MOST_DIVIDED = 100, 100_000, 1000  # with symbols


def costly(text: str) -> bool:
    """Whether algebra on it may take longer than anybody waits: nests, towers of powers, huge powers, factorials."""
    if len(text) > MOST_CHARACTERS or len(_PIECES.findall(text)) > MOST_PIECES or _deepest(text) > MOST_DEPTH:
        return True
    if any(text.count(piece) > MOST_OF_ONE for piece in ("_", ")(", "|", r"\cup")):
        return True
    numbers = [match[1] or match[2] for match in _FACTORIAL.finditer(text)]
    if any(len(number) > 6 or int(number) > MOST_FACTORIAL for number in numbers):
        return True
    return _TOWER.search(text) is not None or _TWICE.search(text) is not None or _high(text)


def _high(text: str) -> bool:
    """Whether powers in it are too high, one by one or together."""
    # Brackets with symbols, or with roots, are multiplied out.
    symbols = {*re.findall("[A-Za-z]", _COMMAND.sub(" ", text)), *enumerate(_ROOTS.findall(text))}
    divided = symbols and _DIVIDED.search(text)
    powers, terms = 1, 0
    for match in _POWER.finditer(text):
        exponent = _braced(text, match.end()) if match[2] == "{" else match[2]
        numbers = re.findall(r"\d+", exponent)
        if numbers and not re.search("[A-Za-z]", _COMMAND.sub(" ", exponent)) and _GROWS.search(exponent):
            return True
        size = prod(int(number) if len(number) < 7 else 10**7 for number in numbers)
        if size > (MOST_DIVIDED if divided else MOST_EXPONENT):
            return True
        powers, terms = powers * max(size, 1), terms + (size if match[1] in ")]}" else 0)
        if match[1] in ")]}" and powers > MOST_EXPONENT:
            return True  # powers of powers
    return bool(symbols) and (terms > MOST_POWER or (terms + 1) ** len(symbols) > MOST_TERMS)


def _deepest(text: str) -> int:
    """How many brackets are open at most."""
    return max(accumulate((character in "([{") - (character in ")]}") for character in text), default=0)


def _braced(text: str, start: int) -> str:
    """What stands up to the brace that closes one opened before."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start:index]
    return text[start:]
