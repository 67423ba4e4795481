"""Arithmetic in several steps with a calculator that does one operation at a time.

A turn that ends with `left op right =` gets the calculator's result; one with `#### number` is the answer, and ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.data.answers import final_answer

DIGITS = 12  # of a number that the calculator takes
NUMBER = rf"-?\d{{1,{DIGITS}}}"
ASKED = re.compile(rf"(?<!\d)({NUMBER})\s*([-+*/])\s*({NUMBER})\s*=\s*$")
CHAIN = re.compile(rf"\d{{1,{DIGITS}}}(?:[-+*]\d{{1,{DIGITS}}})+")
LINK = re.compile(r"([-+*])(\d+)")
ANSWER = re.compile(r"-?\d{1,1000}")  # Python reads no more than 4300
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
HELP = "The calculator takes one operation, such as `12*34=`; the answer is given as `#### 408`."


@dataclass(frozen=True)
class Chain:
    """What is left of operations in a row: the number in front, and (operation, number) of each that follows."""

    first: str
    links: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.first + "".join(map("".join, self.links))

    def next(self) -> tuple[str, ...]:
        """The operation that comes first: left, operation, right; only the number where none is left."""
        return (self.first, *(self.links[0] if self.links else ()))

    def after(self, result: str) -> Chain:
        """With the result of its first operation in its place."""
        return Chain(result, self.links[1:])


def read_chain(row: EpisodeRow) -> Chain:
    """That of the row's last message. Raises ValueError."""
    found = CHAIN.search(str(row.messages[-1]["content"]))
    if found is None:
        raise ValueError(f"row {row.id}: wanted are operations in its prompt, such as 12+34-5")
    links = tuple(LINK.findall(found[0]))
    return Chain(found[0].partition(links[0][0])[0], tuple((operation, number) for operation, number in links))


class Calculator:
    """The row's prompt is the problem, its answer a whole number. Reward 1 for it.

    step_cost: taken off for each turn with the calculator, so that short ways are worth more.
    chain: the prompt has operations in a row, such as `12+34-5*2`, which are worked off from left to right, whatever they are:
    each turn has to ask for the next one, and is told its result with what is left, `46-5*2`. Another one, or an answer before
    all is worked off, ends the episode with reward 0.
    """

    def __init__(self, step_cost: float = 0.0, chain: bool = False) -> None:
        if not 0 <= step_cost <= 1:
            raise ValueError(f"step_cost={step_cost}: wanted is a number from 0 to 1")
        self._step_cost = step_cost
        self._chain = chain
        self._left: Chain | None = None
        self._answer = 0
        self._used = 0

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's own prompt. Raises ValueError where there should be a chain in it and is none."""
        self._answer = int(str(row.answer))
        if self._chain:
            self._left = read_chain(row)
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        """A result, a word of help, or the end."""
        said = final_answer(response.text) if "####" in response.text else None
        if said is not None:
            right = ANSWER.fullmatch(said.strip()) is not None and int(said) == self._answer
            return self._done(right and (self._left is None or not self._left.links))
        asked = ASKED.search(response.text.rstrip())
        if asked is None:
            return self._told(HELP)
        self._used += 1
        if self._left is None:
            return self._told(result(*asked.groups()))
        if asked.groups() != self._left.next():
            return self._done(False)
        self._left = self._left.after(result(*asked.groups()))
        return self._told(str(self._left))

    async def close(self) -> None:
        """Nothing is held."""

    def _done(self, right: bool) -> Done:
        return Done(float(right), {"solved": float(right), "used": float(self._used)})

    def _told(self, text: str) -> Turn:
        return Turn([{"role": "user", "content": text}], reward=-self._step_cost)


def result(left: str, operation: str, right: str) -> str:
    """What the calculator shows: a whole number, a fraction in lowest terms, or that there is none."""
    if operation != "/":
        return str(OPERATIONS[operation](int(left), int(right)))
    if int(right) == 0:
        return "no division by 0"
    return str(Fraction(int(left), int(right)))
