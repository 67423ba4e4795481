r"""Inequalities as intervals: `x > 5` for `(5,\infty)`, `2 \le x < 5` for `[2,5)`, `x \le -3 \text{ or } x \ge 3` for a union.

Of text alone, where an answer is nothing but inequalities of one symbol.
"""

from __future__ import annotations

import re

_SIGN = r"\s*(<|>|\\(?:le|ge|leq|geq)(?![A-Za-z]))\s*"
_END = r"([^<>=,\\]*(?:\\(?:d?frac|sqrt|pi|infty|cdot|left|right)(?![A-Za-z])[^<>=,\\]*)*)"
_SYMBOL = r"([a-zA-Z])"
_ONE = re.compile(rf"{_SYMBOL}{_SIGN}{_END}")
_TURNED = re.compile(rf"{_END}{_SIGN}{_SYMBOL}")
_BOTH = re.compile(rf"{_END}{_SIGN}{_SYMBOL}{_SIGN}{_END}")
_OR = re.compile(r"\s*(?:,?\s*\\text\s*\{\s*or\s*\}|,?\s*\bor\b|\\lor(?![A-Za-z])|\\cup(?![A-Za-z])|,)\s*")
_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid|\\colon|:|\|)\s*(.*?)\s*\\\}")
_INTERVAL = re.compile(r"(?:[a-zA-Z]\s*\\in\s*)?(?:\\left)?\s*[(\[].*,.*[)\]]", re.DOTALL)
_TURN = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def as_ranges(found: str, wanted: str) -> tuple[str, str]:
    """Both as intervals, where one is inequalities of a symbol, and the other as well, of the same, or intervals already."""
    left, right = _read(found), _read(wanted)
    if left and right:
        return (left[1], right[1]) if left[0] == right[0] else (found, wanted)
    if left and _INTERVAL.fullmatch(wanted.strip("$ ")):
        return left[1], wanted
    if right and _INTERVAL.fullmatch(found.strip("$ ")):
        return found, right[1]
    return found, wanted


def _read(text: str) -> tuple[str, str] | None:
    """The symbol, and the intervals that it is in; None where it is something else."""
    if not re.search(r"[<>]|\\[lg]e", text):
        return None
    text = re.sub(r"\s+", " ", text).strip("$ .")  # patterns would try each way to share out many
    built = _BUILDER.fullmatch(text)
    pieces = [_interval(piece) for piece in _OR.split(built[1] if built else text)]
    if not pieces or any(piece is None for piece in pieces):
        return None
    symbols = {piece[0] for piece in pieces if piece is not None}
    intervals = [piece[1] for piece in pieces if piece is not None]
    return (symbols.pop(), r"\cup ".join(intervals)) if len(symbols) == 1 else None


def _interval(text: str) -> tuple[str, str] | None:
    both = _BOTH.fullmatch(text)
    if both is not None:
        first, sign, symbol, other, last = both.groups()
        if _plain(sign)[-2:] in ("ge", ">"):
            first, sign, other, last = last, _TURN[_plain(other)], _TURN[_plain(sign)], first
        if _plain(sign) in (">", r"\ge") or _plain(other) in (">", r"\ge") or not first.strip() or not last.strip():
            return None
        return symbol, f"{_open(sign)}{first.strip()},{last.strip()}{_close(other)}"
    one, turned = _ONE.fullmatch(text), _TURNED.fullmatch(text)
    if one is not None:
        symbol, sign, end = one[1], _plain(one[2]), one[3].strip()
    elif turned is not None:
        symbol, sign, end = turned[3], _TURN[_plain(turned[2])], turned[1].strip()
    else:
        return None
    if not end or re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", end)):
        return None
    if sign in ("<", r"\le"):
        return symbol, rf"(-\infty,{end}{_close(sign)}"
    return symbol, rf"{_open(_TURN[sign])}{end},\infty)"


def _plain(sign: str) -> str:
    return sign.removesuffix("q")


def _open(sign: str) -> str:
    """The bracket in front of what is smaller."""
    return "[" if _plain(sign) == r"\le" else "("


def _close(sign: str) -> str:
    return "]" if _plain(sign) == r"\le" else ")"
