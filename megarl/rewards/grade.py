"""What a grader is asked and what it says. What several graders together say is combine.py's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.algorithms.limits import MAX_REWARD
from megarl.rewards.patience import UnderWay

SCORE = "score"  # in a mapping that a function returns
MOST_SHOWN = 600  # characters of a failure's reason


@dataclass(frozen=True)
class Grade:
    """A score, or why there is none."""

    reward: float
    failure: str | None = None  # `timeout...`, `error: ...`, `not a number: ...` and the like; the reward is then 0


def failed(reason: str) -> Grade:
    """No grade, for a reason in words, cut where it is long: a counted failure, and no reward of zero."""
    return Grade(0.0, reason[:MOST_SHOWN])


def score_of(value: Any) -> Any:
    """The score among what a reward function says of a response, as verl's and slime's do; the value itself where it is alone."""
    return value[SCORE] if isinstance(value, Mapping) and SCORE in value else value


def number(value: Any) -> Grade:
    """The grade that a value of somebody else's is: a failure where it is no finite number, too large a one, or text."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of a tensor with several numbers it is a RuntimeError
        score = math.nan
    if not math.isfinite(score):
        return failed(f"not a number: {value!r}")
    if abs(score) > MAX_REWARD:
        return failed(f"too large: {value!r}; a reward is at most {MAX_REWARD:g}, and float32")
    return Grade(score)


class Grader(Protocol):
    """Grades one response at a time, many at once."""

    async def start(self) -> None:
        """Get ready; raises MegarlError where it cannot be."""

    async def grade(self, prompt: str, response: str, answer: str, metadata: dict[str, Any], row: str = "") -> Grade:
        """Grade one response, within a deadline of the grader's own. What goes wrong with one is its failure.

        row: its prompt's, for messages and to tell whose responses time out.
        """

    def oldest(self) -> UnderWay | None:
        """What it has been at for longest; None where it is at nothing."""

    async def close(self) -> None:
        """End what was started; grades under way raise."""
