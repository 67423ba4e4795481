r"""What an answer counts or measures: `5\text{ cm}`, `12 cm^2`, `45^\circ`, `\$18`, `42 apples`.

A data set's answer has a unit or has none, and so has a model's: one alone is left out of account, two that are known have to
be the same. math-verify takes units away whatever they are, and a symbol at the end with them: to it `x+2h` is `x+2`.
"""

from __future__ import annotations

import re

# Names of one unit, in one string; in one case where a name has three letters or more.
_NAMES = (
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "mg milligram milligrams",
    "g gm gram grams",
    "kg kilogram kilograms kgs",
    "lb lbs pound pounds",
    "oz ounce ounces",
    "ml mL milliliter milliliters millilitre millilitres",
    "l L liter liters litre litres",
    "gal gallon gallons",
    "s sec secs second seconds",
    "min mins minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "yr yrs year years",
    "deg degree degrees °",
    "rad radian radians",
    "°C celsius",
    "°F fahrenheit",
    "$ dollar dollars usd",
    "¢ cent cents",
    "€ euro euros eur",
    "£ gbp",
    "¥ yen",
    "₹ rupee rupees rs",
    "J joule joules",
    "N newton newtons",
    "W watt watts",
    "Hz hertz",
    "acre acres",
)
KNOWN = {name: names.split()[0] for names in _NAMES for name in names.split()}
_GAP = r"(?:\\[,;:! ]|\\q?quad|[~\s])*"
_POWER = r"(?:\^\s*\{?\s*-?\d\s*\}?)?"
_WRAPPED = rf"\\(?:text|textbf|textit|mathrm|mathit|operatorname)\s*\{{[^{{}}]*\}}{_POWER}"
_DEGREES = rf"\^\s*\{{?\s*(?:\\circ|\\text\s*\{{\s*o\s*\}})\s*\}}?{_GAP}(?:\\(?:text|mathrm)\s*\{{\s*[CF]\s*\}}|[CF])?"
_BETWEEN = r"(?:\\[,;:! ]|\\cdot|[~\s/])*"
_TAIL = re.compile(rf"({_DEGREES}|''|{_WRAPPED}(?:{_BETWEEN}{_WRAPPED})*(?:\s*/\s*[a-z]+{_POWER})?)$")
# Bare words are units behind a plain number alone, and single letters where nothing else can be meant.
_BARE = re.compile(
    rf"((?:[$+\-\d.,/{{}}]|\\frac|\\sqrt|\\pi)*[\d}}i]){_GAP}([A-Za-z]+\.?{_POWER}(?:[ /]+[A-Za-z]+\.?{_POWER})*)"
)
_LETTER = re.compile(rf"([+-]?[\d.,]*\d)({_GAP})([mghsLl])")
_MONEY = re.compile(rf"(\\\$|[€£¥₹]|\$(?=[\d.,]+$)|USD|EUR|Rs\.?){_GAP}(?=[-\d.])")
_MODULUS = re.compile(r"(?<=\d)\s*\\text\s*\{\s*\(?mod\s+\d+\)?\s*\}$")
_CLOCK = re.compile(r":\d\d\W*$")  # of what is behind, by_text knows
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
# Words that change what is before them, or take it back.
_CHANGES = re.compile(
    r"\b(hundred|(thous|mill|bill|trill)\w+|k|dozen|percent\w*|pct|hal(f|ves)|(third|quarter|tenth)s?|and|or|to|if|unless|but|maybe"
    r"|perhaps|possibly|probably|alternatively|either|neither|not?|none|nor|never|wrong|false|incorrect|than|at|sin|cos|tan|log|sqrt"
    r"|times|plus|minus|over|squared|cubed|factorial|choose|mod|modulo|base|zero|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)\b",
    re.IGNORECASE,
)


def changes(words: str) -> bool:
    """Whether words behind a number make another one of it, or take it back: `5 million`, `5 or so`, `5 is wrong`."""
    return _CHANGES.search(words) is not None


def without_units(found: str, wanted: str) -> tuple[str, str] | None:
    """Both without what they count or measure; None where they measure in different units."""
    (left, left_unit), (right, right_unit) = _split(found), _split(wanted)
    letters = [_LETTER.fullmatch(text) for text in (found, wanted)]
    # `5m` may be five times m: not where the other says what m is, or has no letters at all and this is a policy's.
    if letters[0] and not letters[1] and not left_unit:
        left, left_unit = letters[0][1], KNOWN[letters[0][3]]
    if letters[1] and not letters[0] and not right_unit and (left_unit or letters[1][2]):
        right, right_unit = letters[1][1], KNOWN[letters[1][3]]
    known = left_unit is not None and right_unit is not None
    return None if known and left_unit != right_unit else (left, right)


def _split(text: str) -> tuple[str, str | None]:
    """The value of an answer, and its unit in one spelling; None where it has none, or one that nobody here knows."""
    text = text.strip().removesuffix(".")
    money = _MONEY.match(text)
    if money is not None:
        rest = text[money.end() :]
        sign = money[1].removeprefix("\\").casefold().removesuffix(".")
        return _value(rest), KNOWN[sign]
    bare = _BARE.fullmatch(text)
    if bare is not None and (unit := _unit(bare[2])) is not None and len(bare[2].strip(" .")) > 1:
        return bare[1], unit
    text = _MODULUS.sub("", text)
    tail = _TAIL.search(text)
    if (
        tail is None
        or not (value := text[: tail.start()]).strip("\\ {")
        or _CLOCK.search(value)
        or changes(_words(tail[0]))
    ):
        return text, None
    unit = _unit(tail[0])
    if unit is None and (re.search(r"\d", _words(tail[0])) or not re.search(r"\d|\\pi|\\sqrt", value)):
        return text, None  # of a symbol, `\text` is a part as a rule
    if unit in ("deg", "°C", "°F") and _TRIGONOMETRIC.search(value):
        return text, None
    return re.sub(rf"{_GAP}$", "", value), unit


def _value(text: str) -> str:
    """Without the words of a currency behind its sign: `\\$5 \\text{ dollars}`."""
    value, unit = _split(text) if text and text[0] not in "$€£¥₹\\" else (text, None)
    return value if unit is not None else text


def _words(tail: str) -> str:
    """What stands in the braces of a unit, its powers left out."""
    return re.sub(r"\^\s*\{?\s*-?\d\s*\}?|\\[A-Za-z]+|[{}~\\]", " ", tail)


def _unit(tail: str) -> str | None:
    """A unit in one spelling, such as `cm^2` or `m/s`; None where a part of it is not known."""
    if tail == "''":
        return "in"
    text = re.sub(r"\^\s*\{?\s*(?:\\circ|\\text\s*\{\s*o\s*\})\s*\}?", "°", tail)
    text = re.sub(rf"°{_GAP}(?:\\[a-z]+\s*\{{\s*)?([CF])(?![A-Za-z])", r"°\1", text)
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathit|operatorname)\s*", "", text)
    text = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\{([^{}]*)\}\^", r" \1^", text)
    text = re.sub(r"\\[A-Za-z]+|\\.|[{}~()]", " ", text)
    text = re.sub(r"\b[Pp]er\b", "/", text).strip(" .")
    text = re.sub(
        r"\b(km|mi|m)p?h\b", lambda match: f"{match[1].replace('m', 'mi') if match[1] == 'm' else match[1]}/h", text
    )
    parts = [_product(part.split()) for part in text.split("/")]
    return "/".join(part for part in parts if part) if all(part is not None for part in parts) else None


def _product(words: list[str]) -> str | None:
    """One side of a fraction of units."""
    found, power = [], ""
    for word in words:
        if word.lower() in ("square", "sq", "cubic", "cu"):
            power = "^2" if word.lower().startswith("sq") else "^3"
            continue
        name, hat, own = word.strip(".").partition("^")
        # A word's case says nothing; of `m` and `M` it does.
        known = KNOWN.get(name) or (KNOWN.get(name.lower()) if len(name) > 2 else None)
        if known is None:
            return None
        found.append(known + (power or hat + own))
        power = ""
    if found[:1] == ["deg"] and found[1:] in (["°C"], ["°F"]):
        del found[0]
    return "*".join(sorted(found)) if not power else None
