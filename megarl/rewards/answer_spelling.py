r"""One spelling for what people and models write in several: `√2` and `\sqrt2`, `½`, `45°`, `2 1/3`, `0.\overline{3}`.

Of text alone, and nothing here changes what an answer says. Not for what two answers together say: that is answer_forms.py's.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
        "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ",
        "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "°": r"^\circ ", "ℝ": r"\mathbb{R}", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "√": r"\sqrt",
    }
)  # fmt: skip
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FOLDED = re.compile(r"[\uff10-\uff19\U0001d7ce-\U0001d7ff]+")  # digits of other widths and faces
_ROOT = re.compile(r"√\s*(\d+|[a-z])")
_VULGAR = re.compile(r"(?<=\d)?[¼½¾⅐-⅞]")
_COMMANDS = (
    (re.compile(r"\\(?:[dt]frac|cfrac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:color\s*\{\w+\}|displaystyle|textstyle|boldsymbol|bm|underline|large|Large|bf)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\textcolor\s*\{\w+\}\s*"), ""),
    (re.compile(r"\\(?:lbrace|\{)(?![A-Za-z])\s*"), r"\\{"),
    (re.compile(r"\s*\\(?:rbrace|\})(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\\{\\\}|\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\mathbb\s*R(?![A-Za-z])|\\mathbf\s*\{R\}"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:mbox|hbox|textrm|textnormal)(?![A-Za-z])"), r"\\text"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\(?:geqslant|geqq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\(?:leqslant|leqq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:degree|degrees)(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\{\s*:\s*\}|\\colon(?![A-Za-z])|\\text\s*\{\s*(?::|to)\s*\}|\\!:\\!|(?<=\d) to (?=\d)"), ":"),
    (re.compile(r"\\(sqrt(?:\[\d+\])?)\s*(?:\((\w+)\)|(\d|[a-z](?![A-Za-z])))"), r"\\\1{\2\3}"),
    (re.compile(r"\\log_\{?e\}?(?![A-Za-z])"), r"\\ln "),
    (re.compile(r"\\text\s*\{([^{}a-z\\]*)\}(?=-?\d|$)"), r"\1"),
    (re.compile(r"\\text\s*\{\s*percent\s*\}"), r"\\%"),
    (re.compile(r"(?<=\d)\s*pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"\\(?:mathrm|text)\s*\{\s*([ie])\s*\}"), r"\1"),
    (re.compile(r"(?<=\d)i(?![A-Za-z])"), " i"),  # math-verify takes it for the unit where it is a word
    (re.compile(r"(?:\\[,;:! ]|~)+\s*\\?%"), r"\\%"),
)  # fmt: skip
_MIXED = re.compile(r"([+-]?\d{1,15})\s+(\d{1,15})\s*/\s*(\d{1,15})")
_REPEATING = re.compile(r"(\d{0,15})\.(\d{0,15})\\(?:overline|bar|dot)\s*\{(\d{1,15})\}")


def respelled(text: str) -> str:
    """An answer in the spelling that algebra reads."""
    if text.isdecimal() and text.isascii():
        return text
    text = text.strip().removeprefix("**").removesuffix("**")
    if not text.isascii():
        text = _ascii(text)
    for pattern, spelling in _COMMANDS:
        text = pattern.sub(spelling, text)
    text = _REPEATING.sub(_repeating, text).strip()
    mixed = _MIXED.fullmatch(text)
    return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}" if mixed is not None else text


def _ascii(text: str) -> str:
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0]).replace('−', '-')}}}", text)
    text = _FOLDED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _VULGAR.sub(_vulgar, text)
    return _ROOT.sub(r"\\sqrt{\1}", text).translate(_SIGNS)


def _vulgar(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}" if below else match[0]


def _repeating(match: re.Match[str]) -> str:
    """The fraction that a decimal with a period is."""
    whole, fixed, period = match.groups()
    ahead = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    value = ahead + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
