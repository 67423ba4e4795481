"""All graders of a recipe as one: a response is graded by all that its row is for, and rewarded with their weighted sum.

A grader that fails is counted by itself, and leaves the response without a reward: neither zero nor what the others say
would be the truth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.recipe.reward import Classify, Code, HttpGrader, Judge, Reward, Rule
from megarl.recipe.reward import Grader as Settings
from megarl.rewards.check import read_key
from megarl.rewards.classify import ClassifyForm, open_tokenizer
from megarl.rewards.code import CodeGrader
from megarl.rewards.grade import FIGURES, Grade, Grader, Item
from megarl.rewards.graders import GraderPool
from megarl.rewards.http import JsonClient
from megarl.rewards.judge import JudgeForm
from megarl.rewards.question import compile_template
from megarl.rewards.remote import RemoteGrader
from megarl.rewards.row_choice import Only, grades_row
from megarl.rewards.single import SingleGrader

log = get_logger(__name__)

# A grader that is at one response for so long is told of: a part of its deadline, between these bounds, in seconds.
LONG_PART, LONG_LEAST_S, LONG_MOST_S = 0.2, 3.0, 15.0
LOOK_S = 0.5
AGAIN_S = 10.0  # until it is told again; twice as long each time


@dataclass(frozen=True)
class Combined:
    """What all graders say of one response.

    reward: the weighted sum, 0 where a grader failed. parts: the own score of each that grades the row, None where it failed.
    failure: which graders failed and why, by name; None where none did. figures: what they say beside their scores, as
    Sample.numbers has it.
    """

    reward: float
    parts: dict[str, float | None]
    failure: str | None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighted:
    """A grader and what its score counts for. about: what it is, for messages. timeout_s: its deadline for one response.

    only: the rows that it grades, by their fields; without any, all.
    """

    grader: Grader
    weight: float
    about: str
    timeout_s: float
    only: Only = field(default_factory=dict)


class Graders:
    """The graders of a run, by name. One that is at a response for long is told of while it is."""

    def __init__(self, members: Mapping[str, Weighted], tell: Callable[[str], None] = log.warning) -> None:
        """tell: takes a line for people."""
        self._members = dict(members)
        self._tell = tell
        self._under_way = 0
        self._look: asyncio.TimerHandle | None = None
        self._told: dict[str, tuple[float, int]] = {}  # when, and how often
        self._failed: set[str] = set()  # of whose first failure people were told: the step's line comes late

    @classmethod
    def open(
        cls, reward: Reward, tell: Callable[[str], None] = log.warning, *, episodes: bool = False, known: bool = False
    ) -> Graders:
        """The graders that a recipe asks for; `start` starts them. Raises UserError, as `check_graders` does.

        episodes: what they grade are episodes, with all that was said in their metadata. known: those behind an address were
        there before, and `start` waits for one that is gone.
        """
        members = {
            name: Weighted(
                _open(
                    settings, reward, reward.key_of(name), partial(_client, tell=tell, known=known), episodes=episodes
                ),
                settings.weight,
                f"{name} ({settings.kind})",
                reward.timeout_s if isinstance(settings, Rule) else settings.timeout_s,
                settings.only,
            )
            for name, settings in reward.by_name().items()
        }
        return cls(members, tell)

    async def start(self) -> None:
        """Start all and ask those behind an address whether they are there.

        Raises MegarlError that names all who are not, or the error of the only one that failed where it says more.
        """
        outcomes = await asyncio.gather(
            *(member.grader.start() for member in self._members.values()), return_exceptions=True
        )
        problems = [
            (member.about, outcome)
            for member, outcome in zip(self._members.values(), outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]
        if problems:
            await self.close()
        for _, problem in problems:
            if type(problem) is not MegarlError:
                raise problem
        if problems:
            said = "; ".join(f"{about}: {problem}" for about, problem in problems)
            raise MegarlError(
                f"Graders did not answer at the start: {said}. Start them, or correct url and key_env in reward.graders."
            )

    async def grade(self, item: Item, fields: Mapping[str, Any] | None = None) -> Combined:
        """Grade one response, by those who grade its row. fields: the row's own; default: metadata.

        An episode's metadata says more than its row, and nothing of who grades it: that was checked of rows, before the start.
        Raises MegarlError where a grader can grade nothing any more.
        """
        own = item.metadata if fields is None else fields
        asked = {name: each.grader for name, each in self._members.items() if grades_row(each.only, own)}
        self._under_way += 1
        self._look_later()
        try:
            grades = await asyncio.gather(*(grader.grade(item) for grader in asked.values()))
        finally:
            self._under_way -= 1
        by_name = dict(zip(asked, grades, strict=True))
        self._tell_failures(by_name, item.row)
        failures = [f"{name}: {grade.failure}" for name, grade in by_name.items() if grade.failure is not None]
        total = sum(self._members[name].weight * grade.reward for name, grade in by_name.items())
        parts = {name: grade.reward if grade.failure is None else None for name, grade in by_name.items()}
        figures = {
            f"{FIGURES}{name}/{key}": each for name, grade in by_name.items() for key, each in grade.figures.items()
        }
        return Combined(0.0 if failures else total, parts, "; ".join(failures) or None, figures)

    async def close(self) -> None:
        """End all of them."""
        self._under_way = 0
        if self._look is not None:
            self._look.cancel()
        await asyncio.gather(*(member.grader.close() for member in self._members.values()))

    def _tell_failures(self, grades: Mapping[str, Grade], row: str) -> None:
        """Tell of a grader that fails for the first time."""
        for name, grade in grades.items():
            if grade.failure is not None and name not in self._failed:
                self._failed.add(name)
                self._tell(f"the grader {self._members[name].about} failed at a response to {row}: {grade.failure}")

    def _look_later(self) -> None:
        if self._look is None and self._under_way:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_now)

    def _look_now(self) -> None:
        """Tell of who has been at one response for long, at times that grow further apart."""
        self._look = None
        now = time.monotonic()
        for name, member in self._members.items():
            at, long_s = member.grader.oldest(), min(max(LONG_PART * member.timeout_s, LONG_LEAST_S), LONG_MOST_S)
            when, times = self._told.get(name, (float("-inf"), 0))
            if at is not None and at.for_s > long_s and now >= when + AGAIN_S * 2**times:
                self._told[name] = now, min(times + 1, 5)
                self._tell(
                    f"the grader {member.about} has been at a response to {at.row} for {at.for_s:.0f} s; its deadline is "
                    f"{member.timeout_s:g} s"
                )
        self._look_later()


def _open(
    settings: Settings,
    reward: Reward,
    key: str,
    client_of: Callable[[str, HttpGrader, str], JsonClient],
    *,
    episodes: bool,
) -> Grader:
    if isinstance(settings, Rule):
        return GraderPool(settings.fn, reward.workers, reward.timeout_s, key=f"{key}.fn")
    if isinstance(settings, Code):
        return CodeGrader(settings)
    if isinstance(settings, Judge):
        client = client_of(f"{settings.url}/chat/completions", settings, key)
        judge = JudgeForm(settings, compile_template(settings.template, f"{key}.template"))
        return SingleGrader(client, judge, settings.concurrency)
    if isinstance(settings, Classify):
        tokenizer = open_tokenizer(settings.tokenizer, f"{key}.tokenizer")
        form = ClassifyForm(tokenizer, settings.output, episodes=episodes)
        return SingleGrader(client_of(f"{settings.url}/classify", settings, key), form, settings.concurrency)
    client = client_of(settings.url, settings, key)
    return RemoteGrader(client, batch=settings.batch, concurrency=settings.concurrency)


def _client(url: str, settings: HttpGrader, key: str, *, tell: Callable[[str], None], known: bool) -> JsonClient:
    secret = read_key(settings.key_env, key)
    return JsonClient(
        url,
        secret,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        retry_for_s=settings.retry_for_s,
        known=known,
        section=key,
        tell=tell,
    )
