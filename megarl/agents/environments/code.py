"""Programs with tests: the policy writes one, is told how many of its row's tests pass, and may mend it.

Programs run in the sandboxes of the reward `code`, which all episodes of a process share; what tests are is said there
(docs/rewards.md). What a test wants is never told: a program that only prints that would pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.core.errors import WorkerDiedError
from megarl.core.log import get_logger
from megarl.data.answers import behind_thinking
from megarl.recipe.reward import Code
from megarl.rewards.code import CodeGrader
from megarl.rewards.code_tests import RowTests, last_block, read_tests
from megarl.sandbox.python_tool import told

log = get_logger(__name__)

MOST_CHARACTERS = 1000  # of what a program printed, in a turn
NO_CODE = "There is no closed block of code, between lines of three backquotes. Write the whole program in one."


@dataclass(frozen=True)
class Tried:
    """passed: tests. printed: of the first of them, or of the program alone where tests are asserts; errors too."""

    passed: int
    printed: str


class Trials:
    """Runs programs for all episodes of a process. Its sandboxes start with the first program, and anew where their keeper died.

    tries, score: of the environment. settings: of a sandbox.
    """

    def __init__(self, settings: Code, tries: int, score: Literal["all", "share"]) -> None:
        if tries < 1 or score not in ("all", "share"):
            raise ValueError(f"tries={tries}, score={score!r}: wanted are at least one try, and all or share")
        self.tries, self.score = tries, score
        self._settings = settings
        self._grader: CodeGrader | None = None
        self._starting = asyncio.Lock()

    def tests(self, row: EpisodeRow) -> RowTests:
        """The row's. Raises ValueError."""
        return read_tests(row.fields, row.answer, self._settings.field).first(self._settings.max_tests)

    async def run(self, code: str, tests: RowTests, row: str) -> Tried:
        """Run a program with all tests. Raises MegarlError where no sandbox can be had."""
        grader = await self._started()
        try:
            passed, first = await asyncio.gather(grader.passed(code, tests, row), grader.first(code, tests, row))
        except WorkerDiedError as error:
            log.warning("%s; the next program starts another", error)
            if self._grader is grader:
                await self.close()
            raise
        return Tried(passed, told(first, MOST_CHARACTERS))

    async def close(self) -> None:
        """End all sandboxes."""
        grader, self._grader = self._grader, None
        if grader is not None:
            await grader.close()

    async def _started(self) -> CodeGrader:
        async with self._starting:
            if self._grader is None:
                grader = CodeGrader(self._settings)
                await grader.start()
                self._grader = grader
            return self._grader


class CodeWithTests:
    """The row's prompt asks for a program; the last closed block of code of each turn is one.

    The reward comes with the last try: by score `all`, 1 where every test passes; by `share`, the share of those that do.
    """

    timed = (
        True  # each program has its seconds, and a place in a sandbox may be long in coming where others use theirs up
    )

    def __init__(self, shared: Trials) -> None:
        self._trials = shared
        self._tests = RowTests()
        self._row = ""
        self._fields: Mapping[str, Any] = {}

    @staticmethod
    def share(
        tries: int = 3,
        score: Literal["all", "share"] = "all",
        field: str | None = None,
        max_tests: int = 32,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        sandboxes: int | None = None,
    ) -> Trials:
        """What episodes share. From `field` on these are settings of the grader `code`."""
        settings = Code(
            kind="code",
            score="share",  # so that each test is run
            field=field,
            max_tests=max_tests,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            sandboxes=sandboxes,
        )
        return Trials(settings, tries, score)

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's prompt."""
        self._tests, self._row, self._fields = self._trials.tests(row), row.id, row.fields
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        """How many tests pass, and what the program printed; the end where all do, or no try is left."""
        code = last_block(behind_thinking(response.text, self._fields))
        tried = None if code is None else await self._trials.run(code, self._tests, self._row)
        passed, total = 0 if tried is None else tried.passed, len(self._tests)
        if passed == total or response.turn + 1 >= self._trials.tries:
            solved = float(passed == total)
            worth = passed / total if self._trials.score == "share" else solved
            return Done(worth, {"solved": solved, "tests_passed": passed / total, "tries": response.turn + 1.0})
        said = NO_CODE if tried is None else _said(tried, total)
        return Turn([{"role": "user", "content": said}])

    async def close(self) -> None:
        """Nothing is held but what is shared."""


def _said(tried: Tried, total: int) -> str:
    return (
        f"{tried.passed} of {total} tests pass. The program printed, in the first of them:\n{tried.printed}\n"
        "Mend it, and write all of it again in one block of code."
    )
