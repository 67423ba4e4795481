r"""Where a text says its final answer: after `####`, as in GSM8K, or in `\boxed{}`. Not whether it is right."""

from __future__ import annotations

HASHES = "####"
BOXED = r"\boxed{"


def final_answer(text: str) -> str | None:
    """What follows the last marker: the rest of the line after `####`, or the braces of a box. None without a marker.

    A box that never closes (a truncated response) is no answer.
    """
    hashes, box = text.rfind(HASHES), text.rfind(BOXED)
    if hashes < 0 and box < 0:
        return None
    if box > hashes:
        found = _braced(text[box + len(BOXED) :])
    else:
        line = text[hashes + len(HASHES) :].lstrip(" \t").partition("\n")[0]
        found = line.strip()
    return found or None


def _braced(text: str) -> str | None:
    """What stands before the brace that closes one opened just before the text."""
    depth = 1
    for index, character in enumerate(text):
        if character in "{}" and (index == 0 or text[index - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[:index].strip()
    return None
