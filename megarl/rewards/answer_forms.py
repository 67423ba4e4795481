r"""What an answer's text says before any algebra: numbers as people write them, and forms that algebra would misread.

math-verify 0.9.0 reads `60 43` as a mixed number, `1:2:4` as two divisions, `TTF` as a product whose order does not matter, `M`
and `m` as one symbol, and of `1, 2, ..., 9` the last number. Each rule here has one of these in mind. They look at text alone.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate
from math import gcd

from megarl.rewards.answer_units import changes

_GAP = r"(?:\\[,;:! ]|~|\{,\}|,\\!|[ \u00a0\u2009\u202f])"
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_GAP} ?\d{{3}})+(?![\d.])")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE](?:\+|(-))?0*(\d+)")
_COUNTED = re.compile(r"([$€£]?[+-]?[\d.,]+)\s+([A-Za-z]{3,}(?: [A-Za-z]+)*)\.?")
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*(?:\s|\\[,;:! ]|\\q?quad|~)+\d+(?!\d|\s*/|\.\d)")
_GAPS = re.compile(r"(?:[\s$]|\\[,;:! ]|\\q?quad|~)+")
_DOTS = re.compile(r"\\[lcd]?dots[a-z]*|\.\.\.|…")
_RATIO = re.compile(r"\d{1,1000}(?:\s*:\s*\d{1,1000})+")  # Python reads numbers of no more than 4300 digits
_CLOCK = re.compile(
    r"(\d{1,2}:[0-5]\d)(?:\s|\\[,;: ]|~)*(?:\\(?:text|mathrm)\s*\{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}?", re.IGNORECASE
)
_WORD = re.compile(r"[A-Z]{2,}|[A-Za-z]{5,}|(?i:yes|no|true)|[A-Z][a-z]{2,}")  # other short ones are products as well
_BEGUN = re.compile(r"[A-Z]?[a-z]{2,}")  # a capital begins a sentence: `Even` is `even`
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}|\\(?:angle|triangle)\b|[$\s]"
)
_AND = re.compile(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+|;")
_TEXTS = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}(?!\s*\})")
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTERS = "qwzjuykvxphstbca"  # for symbols; others have meanings of their own
_SERIES = re.compile(r"\\(?:sum|prod|i*int|oint|lim|Gamma)(?![A-Za-z])")
_BASE = re.compile(
    r"(?:^|[-+\s{(])([\da-zA-Z]*\d[\da-zA-Z]*|\d*[A-F]+)_\{?(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}{0,2}[$.\s]*$"
)
_BASES = dict(
    zip(["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], map(str, range(2, 11)), strict=True)
)
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(([A-J])\)|([A-J])(?=[).:]|$))[).:]?(.*)", re.IGNORECASE | re.DOTALL
)
_MODULUS = re.compile(r"\(\s*\\?[bp]?mod\b\s*\{?\s*\d+\s*\}?\s*\)")
_EQUALS = re.compile(r"(?<![!<>:\\])=")
_ROUNDED = re.compile(r"\\(?:approx(?:eq)?|simeq)(?![A-Za-z])|≈|~=")
_PRIME = re.compile(r"[A-Za-z)}]\s*(?:'(?![A-Za-z])|\^\s*\{?\s*\\prime)")  # of a derivative, and not of `Alice's`
_PLAIN = re.compile(r"[+-]?\d{1,15}(?:,\d{3})*(?:\.\d{1,15}|/0{0,9}[1-9]\d{0,9})?")
_NUMBER = re.compile(r"\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+")
_DENIED = re.compile(
    r"\\(?:n?[lg]eq?(?:slant|q)?|neq?|not|notin|neg|[lg]t|ll|gg)(?![A-Za-z])|[<>≠≤≥¬!^_]|\b(?:not|no|nor|never|or|and)\b",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    r"""Numbers in the form that algebra reads: no separators of thousands (`10\,000`), no `1e-05`, no words behind them."""
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text.strip())
    counted = _COUNTED.fullmatch(text)
    if counted is not None and not changes(counted[2]):
        text = counted[1]
    scientific = _SCIENTIFIC.fullmatch(text)
    # As text: Python makes no number of more than 4300 digits, and a model may write as many as it likes.
    return rf"{scientific[1]}\times 10^{{{scientific[2] or ''}{scientific[3]}}}" if scientific is not None else text


def by_text(found: str, wanted: str) -> bool | None:
    """Whether two answers are equal, where their text alone decides; None where algebra may."""
    if (
        len({len(_PRIME.findall(_COMMAND.sub(_without_words, _EQUALS.split(text)[-1]))) for text in (found, wanted)})
        > 1
    ):
        return False  # algebra leaves a prime out
    for told in (_side_by_side(found, wanted), _bases(found, wanted)):
        if told is not None:
            return told
    words = [_WRAPPED.sub(r"\1", text).removesuffix(".") for text in (found, wanted)]
    same = words[0].casefold() == words[1].casefold()
    if all(_WORD.fullmatch(word) for word in words):
        return same
    if same and all(_BEGUN.fullmatch(word) for word in words):
        return True
    found, wanted = found.strip("$ "), wanted.strip("$ ")
    if any(pattern.fullmatch(text) for pattern in (_RATIO, _CLOCK) for text in (found, wanted)):
        return _ratios(found, wanted)
    brackets = {_opening(text) for text in (found, wanted) if _opening(text) != "(" or in_order(text)}
    return False if brackets == {"(", "{"} else None


def same_choice(found: str, wanted: str) -> bool | None:
    """Whether `(A) 5` is the choice `A`; None where no letter of a choice is wanted, or none is marked as one."""
    letter, marked = (_WRAPPED.sub(r"\1", text) for text in (wanted, found))
    choice = _CHOICE.fullmatch(marked)
    if not re.fullmatch(r"\(?[A-J]\)?", letter) or choice is None or choice[0] == (choice[1] or choice[2]):
        return None
    if _DENIED.search(_COMMAND.sub(" ", found)) or re.search(r"(?<![A-Za-z])[A-J](?![A-Za-z])", choice[3]):
        return False  # more than one
    return (choice[1] or choice[2]).upper() == letter.strip("()")


def in_set(text: str) -> str:
    """What the braces of a set hold; the text itself where there are none around all of it."""
    bare = re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip("$ ")
    inside = bare[2:-2] if bare.startswith(r"\{") and bare.endswith(r"\}") else ""
    return inside if inside and r"\{" not in inside else text


def in_order(text: str) -> list[str] | None:
    """What one pair of round brackets around all of it holds, part by part; None where there is none."""
    bare = re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip("$ ")
    inside = parts(bare[1:-1]) if bare[:1] == "(" and bare[-1:] == ")" else []
    depths = list(accumulate((character in "([{") - (character in ")]}") for character in bare))
    return inside if len(inside) > 1 and 0 not in depths[:-1] else None


def by_names(listed: list[str]) -> list[str]:
    """`y=1, x=2` in the order of its names; others as they are."""
    return sorted(listed) if all(re.match(r"\s*[a-z]\s*=", each) for each in listed) else listed


def contradicts(text: str) -> bool:
    """Whether it says that one number is another, `18 = 17` or `18 ≈ 17`: of rounded ones a fiftieth may be between them.

    Where it says that it rounds, half of one as well.
    """
    rounded = _ROUNDED.sub("=", text)
    sides = [side for side in _EQUALS.split(rounded) if _PLAIN.fullmatch(side.strip("$ "))]
    numbers = [float(Fraction(re.sub(r"[\s,]", "", side.strip("$ ")))) for side in sides]
    least = 0.0 if rounded == text else 0.5
    return any(abs(number - numbers[-1]) > max(abs(numbers[-1]) / 50, least) for number in numbers)


def has_one_number(text: str) -> bool:
    """Whether a text has one number, behind any `=`, and says that it is the answer: `P(X>2) = 0.5`, `A. 5`."""
    sides = _EQUALS.split(_MODULUS.sub("", text))
    return len(sides) <= 2 and len(_NUMBER.findall(sides[-1])) == 1 and not _DENIED.search(sides[-1])


def has_series(text: str) -> bool:
    """Whether it names sums, integrals and the like, which an answer computes."""
    return _SERIES.search(text) is not None


def same_text(found: str, wanted: str) -> bool:
    """Equal but for blanks, dollars and the size of brackets."""
    return _bare(found) == _bare(wanted)


def cases_apart(found: str, wanted: str) -> tuple[str, str]:
    """Both, with letters that stand there in either case as different symbols: algebra takes `M` and `m` for one."""
    seen = {letter for text in (found, wanted) for letter in _COMMAND.sub(" ", text) if letter.isalpha()}
    both = sorted(letter for letter in seen if letter.isupper() and letter.lower() in seen)
    free = [letter for letter in _LETTERS if letter not in {each.lower() for each in seen}]
    if len(both) > len(free) or (len(_bare(found)) == len(_bare(wanted)) == 1):
        return found, wanted  # `a` for the choice `A` is right
    names = dict(zip(both, free, strict=False))
    return _renamed(found, names), _renamed(wanted, names)


def parts(text: str) -> list[str]:
    """What commas, `and` and `or` outside of all brackets separate."""
    text = _AND.sub(",", text)
    found, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(text[start:index])
            start = index + 1
    return [part.strip() for part in [*found, text[start:]]]


def _side_by_side(found: str, wanted: str) -> bool | None:
    """Numbers beside each other, and what is left out between some, as they are; None where there is neither."""
    if any(_SIDE_BY_SIDE.search(text) for text in (found, wanted)):
        return _GAPS.sub(" ", found).strip() == _GAPS.sub(" ", wanted).strip()
    return same_text(found, wanted) if any(_DOTS.search(text) for text in (found, wanted)) else None


def _bases(found: str, wanted: str) -> bool | None:
    """Whether numbers with a base are one; None where none has. To algebra a base is an index, of which it makes nothing."""
    read = [_BASE.search(_TEXTS.sub(r"\1", text)) for text in (found, wanted)]
    bases = [None if each is None else _BASES.get(each[2], each[2]) for each in read]
    if read[0] is None:
        return None
    if read[1] is None:
        return None if bases[0] == "10" else False
    return bases[0] == bases[1] and read[0][1].casefold() == read[1][1].casefold()


def _ratios(found: str, wanted: str) -> bool | None:
    """Times of day as they are, ratios but for a factor; a ratio of two may be written as a fraction."""
    clocks = [_CLOCK.fullmatch(text) for text in (found, wanted)]
    if clocks[0] and clocks[1]:
        halves = {(each[2] or "").lower() for each in clocks if each is not None}
        return clocks[0][1] == clocks[1][1] and (len(halves) == 1 or "" in halves)
    left, right = (_RATIO.fullmatch(text) for text in (found, wanted))
    if left is None or right is None:
        longer = left or right
        if longer is None or longer[0].count(":") != 1:
            return False
        # Nobody writes a ratio as 3:30.
        return False if _CLOCK.fullmatch(longer[0]) and gcd(*map(int, longer[0].split(":"))) > 1 else None
    return _lowest(found) == _lowest(wanted)


def _lowest(ratio: str) -> list[Fraction]:
    numbers = [int(part) for part in ratio.split(":")]
    first = next((number for number in numbers if number), 1)
    return [Fraction(number, first) for number in numbers]


def _renamed(text: str, names: dict[str, str]) -> str:
    """With other letters, but for those of commands and of texts."""
    table, pieces, end = str.maketrans(names), [], 0
    for command in _COMMAND.finditer(text):
        pieces += [text[end : command.start()].translate(table), command[0]]
        end = command.end()
    return "".join([*pieces, text[end:].translate(table)])


def _without_words(command: re.Match[str]) -> str:
    """A command as it is, but for one that holds words."""
    return "" if "{" in command[0] else command[0]


def _opening(text: str) -> str:
    """The bracket that it begins with, a set's without its backslash."""
    return text.strip("$ ").removeprefix(r"\left").lstrip().removeprefix("\\")[:1]


def _bare(text: str) -> str:
    return re.sub(r"[$\s]|\\[,;:! ]|\\(?:left|right)(?![a-z])", "", text)
