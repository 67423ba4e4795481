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

from megarl.data.answers import BOXED, final_answer

# Plain integers, with or without thousands separators: by far the most answers, and they need no algebra.
_INTEGER = re.compile(r"([+-]?)0*(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")


def math(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1.0 where the response's final answer equals the answer mathematically, else 0.0.

    The answer may itself be marked (a worked solution), or stand alone.
    """
    found = final_answer(response)
    if found is None:
        return 0.0
    wanted = final_answer(answer)
    return float(equal(found, answer.strip() if wanted is None else wanted))


def equal(found: str, wanted: str) -> bool:
    """Whether two final answers are the same number, expression, set or interval."""
    if found == wanted:
        return True
    found_integer, wanted_integer = _integer(found), _integer(wanted)
    if found_integer is not None and wanted_integer is not None:
        return found_integer == wanted_integer
    parse, verify = _math_verify()
    parsed_wanted = parse(f"{BOXED}{wanted}}}", parsing_timeout=None)
    parsed_found = parse(f"{BOXED}{found}}}", parsing_timeout=None)
    return bool(verify(parsed_wanted, parsed_found, timeout_seconds=None))


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """math-verify's parse and verify, imported where they are first needed: most answers are integers."""
    from math_verify import parse, verify

    # It warns that somebody else must hold a deadline, which the grader pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


def _integer(text: str) -> str | None:
    """A plain integer in one spelling (no separators, no leading zeros, no plus), or None. `$` and a final dot go."""
    match = _INTEGER.fullmatch(text.strip().replace("\\$", "").strip("$ ").removesuffix("."))
    if match is None:
        return None
    digits = match[2].replace(",", "")
    return digits if match[1] != "-" or digits == "0" else f"-{digits}"
