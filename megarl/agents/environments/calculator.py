"""Arithmetic in several steps with a calculator that does one operation at a time.

A turn that ends with `left op right =` gets the calculator's result; one with `#### number` is the answer, and ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from operator import add, mul, sub

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.data.answers import final_answer

DIGITS = 12  # of a number that the calculator takes
NUMBER = rf"-?\d{{1,{DIGITS}}}"
ASKED = re.compile(rf"(?<!\d)({NUMBER})\s*([-+*/])\s*({NUMBER})\s*=\s*$")
ANSWER = re.compile(r"-?\d+")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
HELP = "The calculator takes one operation, such as `12*34=`; the answer is given as `#### 408`."


class Calculator:
    """The row's prompt is the problem, its answer a whole number. Reward 1 for it.

    step_cost: taken off for each turn with the calculator, so that short ways are worth more.
    """

    def __init__(self, step_cost: float = 0.0) -> None:
        if not 0 <= step_cost <= 1:
            raise ValueError(f"step_cost={step_cost}: wanted is a number from 0 to 1")
        self._step_cost = step_cost
        self._answer = 0
        self._used = 0

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's own prompt."""
        self._answer = int(row.answer)
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        """A result, a word of help, or the end."""
        said = final_answer(response.text) if "####" in response.text else None
        if said is not None:
            right = ANSWER.fullmatch(said.strip()) is not None and int(said) == self._answer
            return Done(float(right), {"solved": float(right), "used": float(self._used)})
        asked = ASKED.search(response.text.rstrip())
        if asked is None:
            return self._told(HELP)
        self._used += 1
        return self._told(result(*asked.groups()))

    async def close(self) -> None:
        """Nothing is held."""

    def _told(self, text: str) -> Turn:
        return Turn([{"role": "user", "content": text}], reward=-self._step_cost)


def result(left: str, operation: str, right: str) -> str:
    """What the calculator shows: a whole number, a fraction in lowest terms, or that there is none."""
    if operation != "/":
        return str(OPERATIONS[operation](int(left), int(right)))
    if int(right) == 0:
        return "no division by 0"
    return str(Fraction(int(left), int(right)))
