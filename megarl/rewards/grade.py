"""What a grader is asked and what it says. What several graders together say is combine.py's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megarl.algorithms.limits import MAX_REWARD
from megarl.data.answers import Answer
from megarl.rewards.patience import UnderWay

SCORE = "score"  # in a mapping that a function returns
MOST_SHOWN = 600  # characters of a failure's reason
FIGURE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TAKEN = (SCORE, "mean", "std", "failures")  # what is written of every grader's score: no figure has such a name
MOST_FIGURES = 16  # of a grader: each is a metric of its own
FIGURES = "reward/by/"  # in Sample.numbers, before GRADER/KEY


@dataclass(frozen=True)
class Grade:
    """A score, or why there is none. figures: what a function says of the response beside it, by name."""

    reward: float
    failure: str | None = None  # `timeout...`, `error: ...`, `not a number: ...` and the like; the reward is then 0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One response to grade. metadata: its row's other fields, and what its episode adds.

    row: its prompt's, for messages and to tell whose responses time out. truncated: whether the response ended at a limit of
    length, or at a budget of its episode.
    """

    prompt: str
    response: str
    answer: Answer
    metadata: dict[str, Any] = field(default_factory=dict)
    row: str = ""
    truncated: bool = False

    @property
    def said(self) -> dict[str, Any]:
        """What graders are given of it, by name: keywords of functions, variables of templates, fields of requests."""
        return {name: value for name, value in vars(self).items() if name != "row"}


def failed(reason: str) -> Grade:
    """No grade, for a reason in words, cut where it is long: a counted failure, and no reward of zero."""
    return Grade(0.0, reason[:MOST_SHOWN])


def score_of(value: Any) -> Any:
    """The score among what a reward function says of a response, as verl's and slime's do; the value itself where it is alone."""
    return value[SCORE] if isinstance(value, Mapping) and SCORE in value else value


def grade_of(value: Any) -> Grade:
    """The grade that a function's or a server's answer is: a number, or a mapping with one as `score` and figures beside it."""
    grade = number(score_of(value))
    alone = grade.failure is not None or not isinstance(value, Mapping) or SCORE not in value
    return grade if alone else replace(grade, figures=_figures(value))


def _figures(value: Mapping[Any, Any]) -> dict[str, float]:
    """What stands beside the score and is a number, as verl's reward_extra_info: what is none, text say, is left out.

    So is a name that is no word, one that is taken, and what comes after the first MOST_FIGURES by their names.
    """
    named = {key: each for key, said in value.items() if _may_be_named(key) and (each := _finite(said)) is not None}
    return {key: named[key] for key in first_figures(named)}


def _may_be_named(key: Any) -> bool:
    return isinstance(key, str) and FIGURE.fullmatch(key) is not None and key not in TAKEN


def first_figures(names: Iterable[str]) -> list[str]:
    """Those that become metrics: samples may have others each, and there would be a metric for every one."""
    return sorted(names)[:MOST_FIGURES]


def _finite(value: Any) -> float | None:
    """As a number; None where it is none, is text, or has no end."""
    try:
        found = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of a tensor with several numbers it is a RuntimeError
        return None
    return found if math.isfinite(found) else None


def number(value: Any) -> Grade:
    """The grade that a value of somebody else's is: a failure where it is no finite number, too large a one, or text."""
    score = _finite(value)
    if score is None:
        return failed(f"not a number: {value!r}")
    if abs(score) > MAX_REWARD:
        return failed(f"too large: {value!r}; a reward is at most {MAX_REWARD:g}, and float32")
    return Grade(score)


class Grader(Protocol):
    """Grades one response at a time, many at once."""

    async def start(self) -> None:
        """Get ready; raises MegarlError where it cannot be."""

    async def grade(self, item: Item) -> Grade:
        """Grade one response, within a deadline of the grader's own. What goes wrong with one is its failure."""

    def oldest(self) -> UnderWay | None:
        """What it has been at for longest; None where it is at nothing."""

    async def close(self) -> None:
        """End what was started; grades under way raise."""
