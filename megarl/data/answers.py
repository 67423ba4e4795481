r"""Which answers of a row are right, and where a text says its final one: after `####`, as in GSM8K, or in `\boxed{}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# What a row's answer is: text; a list, whose texts are all right; or an object, or another list, for a grader of one's own.
Answer = str | list[Any] | dict[str, Any]

HASHES = "####"
# What thinking stands between: of Qwen, DeepSeek, GLM and others; of Mistral.
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# A field of a row's metadata, where its prompt opens the thinking: what ends it.
ENDS_KEY = "thinking_ends"
BOXED = r"\boxed{"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ESCAPED_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\\` is the end of a line, and a brace behind it one
# What an answer begins with, or a single letter. Behind a box anything else is a heading of Markdown's.
_ANSWER = re.compile(r"[\d+\-−.,$€£\\({\[]|[A-Za-z]\W*$")


def accepted(answer: Answer) -> list[str]:
    """The texts of which each is right by itself: the answer, or, where it is a list, those of its texts that are not empty.

    Raises ValueError for an object, and for a list of anything else: what would be right by it, only its row's author knows.
    """
    texts = [answer] if isinstance(answer, str) else answer
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        kind = "an object" if isinstance(answer, dict) else "a list of other things than texts and numbers"
        raise ValueError(f"the row's answer is {kind}, with which no response can be compared")
    return texts if isinstance(answer, str) else [each for each in texts if each.strip()]


def thinking_ends(prompt: str, hidden: Collection[str] = ()) -> str | None:
    """What ends the thinking that a prompt opens, as some templates do; None where it opens none.

    hidden: texts of tokens that no response shows. Where such a one ends the thinking, nobody can tell that it has ended.
    """
    return next((ends for begins, ends in THINKING if prompt.rstrip().endswith(begins) and ends not in hidden), None)


def behind_thinking(text: str, metadata: Mapping[str, Any]) -> str:
    """What a response says behind its thinking, where that is marked in it: none of thinking that does not end.

    What was only thought of is no answer: a guess among others earns nothing. metadata: the row's, which says whether its
    prompt has opened the thinking.
    """
    if metadata.get(ENDS_KEY, "") not in text:
        return ""
    for begins, ends in THINKING:
        text = text.rpartition(ends)[2].partition(begins)[0]
    return text


def final_answer(text: str) -> str | None:
    """What follows the last marker: the rest of the line after `####`, or the braces of a box. None without a marker.

    A box that never closes (a truncated response) is no answer. After a box, `#### Check` is a heading, and none either.
    """
    hashes, box = text.rfind(HASHES), max((match.end() for match in _BOX.finditer(text)), default=-1)
    if hashes < 0 and box < 0:
        return None
    line = text[hashes + len(HASHES) :].lstrip(" \t").partition("\n")[0].strip().removeprefix("**").removesuffix("**")
    if box > hashes or (box >= 0 and line and not _ANSWER.match(line)):
        return _braced(text[box:]) or None
    return line.strip() or None


def _braced(text: str) -> str | None:
    """What stands before the brace that closes one opened just before the text."""
    depth = 1
    for found in _ESCAPED_OR_BRACE.finditer(text):
        if len(found[0]) == 1:
            depth += 1 if found[0] == "{" else -1
            if depth == 0:
                return text[: found.start()].strip()
    return None
