r"""The math grader: the final answer of a response (`#### 42` as in GSM8K, or `\boxed{42}`) against the known one.

math-verify does the mathematics. Its own timeouts are off: they need signals, and the grader pool's deadline rules.
A response without a marked final answer earns nothing: a number somewhere in the text is not an answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from megarl.data.answers import BOXED, Answer, accepted, behind_thinking, final_answer
from megarl.rewards.answer_cost import MOST_CHARACTERS, costly
from megarl.rewards.answer_forms import (
    by_names,
    by_text,
    cases_apart,
    contradicts,
    has_one_number,
    has_series,
    in_order,
    in_set,
    parts,
    plain,
    same_choice,
    same_text,
)
from megarl.rewards.answer_ranges import as_ranges
from megarl.rewards.answer_spelling import respelled
from megarl.rewards.answer_units import without_units

MOST_PARTS = 20  # of a list that is compared part by part
DIGITS, EXACT, NEAR = 60, 1e-40, 1e-5

# Plain integers, with or without thousands separators: by far the most answers, and they need no algebra.
_INTEGER = re.compile(r"([+-]?)0*(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")


def math(prompt: str, response: str, answer: Answer, metadata: dict[str, Any]) -> float:
    """1.0 where the response's final answer equals the answer mathematically, else 0.0.

    The answer may itself be marked (a worked solution), or stand alone. Of several any is right.
    """
    found = final_answer(behind_thinking(response, metadata))
    if found is None:
        return 0.0
    return float(any(equal(found, final_answer(each) or each.strip()) for each in accepted(answer)))


def equal(found: str, wanted: str) -> bool:
    """Whether two final answers are the same number, expression, list, set or interval."""
    if found == wanted or len(found) > MOST_CHARACTERS:  # of a policy: patterns and algebra would be at it for minutes
        return same_text(found, wanted)
    found, wanted = respelled(found), respelled(wanted)
    found_integer, wanted_integer = _integer(found), _integer(wanted)
    if found_integer is not None and wanted_integer is not None:
        return found_integer == wanted_integer
    measured = without_units(found, wanted)
    return measured is not None and _equal_values(plain(measured[0]), plain(measured[1]))


def _equal_values(found: str, wanted: str) -> bool:
    """Whether they are equal as they stand, their units taken away."""
    found_integer, wanted_integer = _integer(found), _integer(wanted)
    if found_integer is not None and wanted_integer is not None:
        return found_integer == wanted_integer
    found, wanted = as_ranges(found, wanted)
    said = by_text(found, wanted)
    if said is None:
        said = same_choice(found, wanted)
    if said is not None:
        return said
    if costly(found) or (has_series(found) and not has_series(wanted)) or contradicts(found):
        return same_text(found, wanted)
    listed = _lists(found, wanted)
    return _algebra(*cases_apart(found, wanted)) if listed is None else listed


def _lists(found: str, wanted: str) -> bool | None:
    """Whether two lists have the same parts; None where there are none to compare."""
    left, right = parts(found), parts(wanted)
    if min(len(left), len(right)) == 1:  # `\{(1,2),(3,4)\}` for `(1,2),(3,4)`
        left, right = (
            parts(in_set(found)) if len(right) > 1 else left,
            parts(in_set(wanted)) if len(left) > 1 else right,
        )
    if max(len(left), len(right)) > MOST_PARTS or r"\pm" in found + wanted:
        return None
    if min(len(left), len(right)) > 1:
        return len(left) == len(right) and _same_parts(left, right)
    if max(len(left), len(right)) == 1:
        return None
    # `(1,2)` for `1,2`, and for `x=1, y=2`: in this order.
    ordered = [in_order(text) or by_names(listed) for text, listed in ((found, left), (wanted, right))]
    if min(map(len, ordered)) == 1:
        return None
    return len(ordered[0]) == len(ordered[1]) and all(map(equal, *ordered))


def _same_parts(found: list[str], wanted: list[str]) -> bool:
    """Whether each of a list has a partner in the other, in any order: as often as it is there."""
    left = list(wanted)
    for part in found:
        partner = next((each for each in left if equal(part, each)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _algebra(found: str, wanted: str) -> bool:
    """What math-verify says, and that numbers are as close as they have to be."""
    _, verify = _math_verify()
    try:
        parsed_wanted, parsed_found = _parsed(wanted), _parsed(found)
        if not verify(parsed_wanted, parsed_found, timeout_seconds=None):
            return False
        return "%" in found + wanted or _close(parsed_found, parsed_wanted)
    except Exception:  # sympy raises anything, as at `17 \\mod 23`: a wrong answer, and no failure of the grader
        return same_text(found, wanted)


def _parsed(text: str) -> list[Any]:
    """What math-verify reads in an answer: an expression, where there is one, and its text.

    What is no LaTeX to it, it looks through for the last number: of `2 \\lor 3` it would be 3. It may where that is the only one.
    """
    parse, _ = _math_verify()
    boxed = f"{BOXED}{text}}}"
    found: list[Any] = parse(boxed, [_whole()], extraction_mode="first_match", parsing_timeout=None)
    if all(isinstance(each, str) for each in found) and has_one_number(text):
        return list(parse(boxed, parsing_timeout=None))
    return found


def _close(found: list[Any], wanted: list[Any]) -> bool:
    """Whether two numbers are: math-verify rounds to six places, so that to it all small numbers are zero.

    Exact numbers have to be equal, others but for a hundred-thousandth of themselves, as 0.166667
    for a sixth. True of what is no number.
    """
    from sympy import Expr, Float, N

    if not (found and wanted and all(isinstance(side[0], Expr) and side[0].is_number for side in (found, wanted))):
        return True
    numbers = [N(side[0], DIGITS) for side in (found, wanted)]
    if any(number.is_finite is not True for number in numbers):
        return True
    if any(side[0].has(Float) for side in (found, wanted)):
        return bool(abs(numbers[0] - numbers[1]) <= NEAR * max(map(abs, numbers)))
    # What comes to zero by roots that cancel each other has no digits that count.
    scale = EXACT if 0 in numbers else max(map(abs, numbers))
    return bool(abs(numbers[0] - numbers[1]) <= EXACT * scale)


@cache
def _whole() -> Any:
    """Says that an answer is all that stands in its box, and no sentence that is to be looked through."""
    from dataclasses import replace

    from math_verify import LatexExtractionConfig

    usual = LatexExtractionConfig().normalization_config
    return LatexExtractionConfig(
        try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=replace(usual, units=False)
    )


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """math-verify's parse and verify, imported where they are first needed: most answers are integers."""
    from math_verify import parse, verify

    # It warns that somebody else must hold a deadline, which the grader pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


def _integer(text: str) -> str | None:
    """A plain integer in one spelling (no separators, no leading zeros, no plus), or None. Signs of money and a final dot go."""
    match = _INTEGER.fullmatch(text.strip().replace("\\$", "").strip("$€£ ").removesuffix("."))
    if match is None:
        return None
    digits = match[2].replace(",", "")
    return digits if match[1] != "-" or digits == "0" else f"-{digits}"
