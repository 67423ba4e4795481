r"""What an answer's text says before any algebra: numbers as people write them, and forms that algebra would misread.

math-verify 0.9.0 reads `60 43` as a mixed number, `1:2:4` as two divisions, `TTF` as a product whose order does not matter, `M`
and `m` as one symbol, and of `1, 2, ..., 9` the last number. Each rule here has one of these in mind. They look at text alone.
"""

from __future__ import annotations

import re
from fractions import Fraction

_GAP = r"(?:\\[,;:! ]|~|\{,\}|,\\!|[ \u00a0\u2009\u202f])"
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_GAP} ?\d{{3}})+(?![\d.])")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE](?:\+|(-))?0*(\d+)")
_COUNTED = re.compile(r"([$€£]?[+-]?[\d.,]+)\s+([A-Za-z]{3,}(?: [A-Za-z]+)*)\.?")
# Words that change the number before them.
_NO_UNITS = re.compile(
    r"\b(hundred|(thous|mill|bill|trill)\w+|dozen|percent|hal(f|ves)|(third|quarter|tenth)s?|and|or|to|sin|cos|tan|log|sqrt|times|plus"
    r"|minus|over)\b",
    re.IGNORECASE,
)
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*(?:\s|\\[,;:! ]|\\q?quad|~)+\d+(?!\d|\s*/|\.\d)")
_DOTS = re.compile(r"\\[lcd]?dots[a-z]*|\.\.\.|…")
_RATIO = re.compile(r"\d{1,1000}(?:\s*:\s*\d{1,1000})+")  # Python reads numbers of no more than 4300 digits
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_WORD = re.compile(r"[A-Z]{2,}|[A-Za-z]{5,}|(?i:yes|no|true)|[A-Z][a-z]{2,}")  # other short ones are products as well
_BEGUN = re.compile(r"[A-Z]?[a-z]{2,}")  # a capital begins a sentence: `Even` is `even`
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}|\\(?:angle|triangle)\b|[$\s]"
)
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTERS = "qwzjuykvxphstbca"  # for symbols; others have meanings of their own
_TOWER = re.compile(r"\d\s*\^\s*\{?\s*\(?\d+\s*\^")
_EXPONENT = re.compile(r"(\S)\s*\^\s*\{?\s*[+-]?(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*!|\\[dt]?binom\s*\{?\s*(\d+)")
_SERIES = re.compile(r"\\(?:sum|prod|i*int|oint|lim|Gamma)(?![A-Za-z])")
_BASE = re.compile(r"\d_\{?(\d+)\}?[$.\s]*$")
_MODULUS = re.compile(r"\(\s*\\?[bp]?mod\b\s*\{?\s*\d+\s*\}?\s*\)")
_EQUALS = re.compile(r"(?<![!<>:\\])=")
_NUMBER = re.compile(r"\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+")
_DENIED = re.compile(
    r"\\(?:n?[lg]eq?(?:slant|q)?|neq?|not|notin|neg|[lg]t|ll|gg)(?![A-Za-z])|[<>≠≤≥¬!^_]|\b(?:not|no|nor|never|or|and)\b",
    re.IGNORECASE,
)
MOST_CHARACTERS, MOST_EXPONENT, MOST_POWER, MOST_FACTORIAL = 1000, 10_000, 100, 2000


def plain(text: str) -> str:
    r"""Numbers in the form that algebra reads: no separators of thousands (`10\,000`), no `1e-05`, no words behind them."""
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text.strip())
    counted = _COUNTED.fullmatch(text)
    if counted is not None and not _NO_UNITS.search(counted[2]):
        text = counted[1]
    scientific = _SCIENTIFIC.fullmatch(text)
    # As text: Python makes no number of more than 4300 digits, and a model may write as many as it likes.
    return rf"{scientific[1]}\times 10^{{{scientific[2] or ''}{scientific[3]}}}" if scientific is not None else text


def by_text(found: str, wanted: str) -> bool | None:
    """Whether two answers are equal, where their text alone decides; None where algebra may."""
    if any(form.search(text) for form in (_DOTS, _SIDE_BY_SIDE) for text in (found, wanted)):
        return same_text(found, wanted)
    bases = [_BASE.search(text) for text in (found, wanted)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False  # to algebra a name's index, of which it makes nothing behind a number
    words = [_WRAPPED.sub(r"\1", text).removesuffix(".") for text in (found, wanted)]
    same = words[0].casefold() == words[1].casefold()
    if all(_WORD.fullmatch(word) for word in words):
        return same
    if same and all(_BEGUN.fullmatch(word) for word in words):
        return True
    ratios = [_RATIO.fullmatch(text.strip("$ ")) for text in (found, wanted)]
    if any(ratios):
        return _ratios(found.strip("$ "), wanted.strip("$ "))
    opens = {_opening(found), _opening(wanted)}
    return False if opens == {"(", "{"} else None


def costly(text: str) -> bool:
    """Whether algebra on it may take longer than anybody waits: towers of powers, huge powers, factorials."""
    if len(text) > MOST_CHARACTERS or _TOWER.search(text):
        return True
    multiplied_out = re.search("[A-Za-z]", _COMMAND.sub(" ", text)) is not None  # brackets with symbols are
    for base, exponent in _EXPONENT.findall(text):
        if len(exponent) > 6 or int(exponent) > (MOST_POWER if multiplied_out and base in ")]}" else MOST_EXPONENT):
            return True
    numbers = (match[1] or match[2] for match in _FACTORIAL.finditer(text))
    return any(len(number) > 6 or int(number) > MOST_FACTORIAL for number in numbers)


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
    """What commas outside of all brackets separate."""
    found, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(text[start:index])
            start = index + 1
    return [part.strip() for part in [*found, text[start:]]]


def _ratios(found: str, wanted: str) -> bool | None:
    """Times of day as they are, ratios but for a factor; a ratio of two may be written as a fraction."""
    if all(_CLOCK.fullmatch(text) for text in (found, wanted)):
        return found == wanted
    left, right = (_RATIO.fullmatch(text) for text in (found, wanted))
    if left is None or right is None:
        longer = left or right
        return None if longer is not None and longer[0].count(":") == 1 else False
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


def _opening(text: str) -> str:
    """The bracket that it begins with, a set's without its backslash."""
    return text.strip("$ ").removeprefix(r"\left").lstrip().removeprefix("\\")[:1]


def _bare(text: str) -> str:
    return re.sub(r"[$\s]|\\[,;:! ]|\\(?:left|right)(?![a-z])", "", text)
