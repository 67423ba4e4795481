"""Grades code by running it against its row's tests, in sandboxes. What tests are is code_tests.py's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from megarl.core.errors import MegarlError, UserError, WorkerDiedError
from megarl.data.answers import behind_thinking
from megarl.recipe.reward import Code
from megarl.rewards.code_tests import Pair, RowTests, last_block, read_tests, same_output, stripped
from megarl.rewards.grade import Grade, Item, failed
from megarl.rewards.patience import InFlight, UnderWay
from megarl.sandbox.job import MIB, MOST_VALUE, Check, Limits, Result
from megarl.sandbox.pool import SandboxPool

KIB = 1024


def limits_of(settings: Code) -> Limits:
    """What a recipe says of one sandbox. Raises UserError."""
    return Limits(
        timeout_s=settings.timeout_s,
        cpu_s=settings.timeout_s,
        memory_bytes=settings.memory_mb * MIB,
        disk_bytes=settings.disk_mb * MIB,
        file_bytes=settings.disk_mb * MIB,
        processes=settings.processes,
        output_bytes=settings.output_kb * KIB,
    )


def check_sandbox(settings: Code, key: str) -> None:
    """Raises UserError where this machine makes no sandboxes, and what to do. Starts one. key: for messages."""

    async def once() -> None:
        async with SandboxPool(limits_of(settings), size=1):
            return

    try:
        asyncio.run(once())
    except UserError as error:
        raise UserError(f"`{key}`: {error}") from None


class CodeGrader:
    """Grades the last block of code of a response: each pair of input and output in a sandbox, all checks in one."""

    def __init__(self, settings: Code) -> None:
        self._settings = settings
        self._pool = SandboxPool(limits_of(settings), settings.sandboxes)
        self._room = asyncio.Semaphore(self._pool.size)
        self._in_flight = InFlight()

    async def start(self) -> None:
        """Start sandboxes. Raises UserError where this machine makes none."""
        await self._pool.start()

    async def grade(self, item: Item) -> Grade:
        """Grade one response: 0 where it has no code. Raises WorkerDiedError where no sandbox can be had any more."""
        try:
            tests = read_tests(item.metadata, item.answer, self._settings.field).first(self._settings.max_tests)
        except ValueError as error:
            return failed(f"error: {error}")
        code = last_block(behind_thinking(item.response, item.metadata))
        if code is None:
            return Grade(0.0)
        if self._settings.score == "all" and (why := self._beyond(tests)):
            return failed(f"error: {why}")
        try:
            passed = await self.passed(code, tests, item.row or str(id(item)))
        except WorkerDiedError:
            raise
        except MegarlError as error:
            return failed(f"error: {error}")
        if self._settings.score == "share":
            return Grade(passed / len(tests))
        return Grade(float(passed == len(tests)))

    def oldest(self) -> UnderWay | None:
        """The program that has been run for longest."""
        return self._in_flight.oldest()

    async def close(self) -> None:
        """End all sandboxes; grades under way raise."""
        await self._pool.close()

    async def first(self, code: str, tests: RowTests, row: str) -> Result:
        """What a program does with the input of the first test, or without any where tests are checks. Raises MegarlError."""
        return await self._run(row, code, stdin=tests.pairs[0].stdin if tests.pairs else "")

    async def passed(self, code: str, tests: RowTests, row: str) -> int:
        """How many tests pass. Where only all of them count, the first that does not ends it. Raises MegarlError."""
        if self._settings.score == "share":
            outcomes = await asyncio.gather(*(self._pair(code, pair, row) for pair in tests.pairs))
            return sum(outcomes) + await self._checks(code, tests, row)
        for pair in tests.pairs:
            if not await self._pair(code, pair, row):
                return 0
        return len(tests.pairs) + await self._checks(code, tests, row)

    def _beyond(self, tests: RowTests) -> str:
        """Why no program could pass all tests within the bounds of a sandbox; empty where one could."""
        for number, pair in enumerate(tests.pairs, 1):
            size = len(stripped(pair.stdout).encode(errors="replace"))
            if size > self._pool.limits.output_bytes:
                return f"its test {number} wants {size} bytes of output, and output_kb is {self._settings.output_kb}"
        for number, expected in enumerate(tests.checks, len(tests.pairs) + 1):
            size = _shortest(expected.value) - (2 if expected.as_json else 0)  # a list of one stands for its item
            if expected.check.kind == "value" and size > MOST_VALUE:
                return f"its test {number} wants a value of {size} characters, and one of up to {MOST_VALUE} is read"
        return ""

    async def _pair(self, code: str, pair: Pair, row: str) -> bool:
        result = await self._run(row, code, stdin=pair.stdin)
        return result.ended == "ok" and same_output(result.stdout, pair.stdout)

    async def _checks(self, code: str, tests: RowTests, row: str) -> int:
        if not tests.checks:
            return 0
        before = tests.setup_inside()
        setup = (Check("assert", before),) if before else ()
        result = await self._run(row, code, checks=setup + tuple(each.check for each in tests.checks))
        said = result.checked[len(setup) :]
        # Those that were not reached are missing at the end: they did not pass.
        return sum(expected.met(each) for expected, each in zip(tests.checks, said, strict=False))

    async def _run(self, row: str, code: str, *, stdin: str = "", checks: tuple[Check, ...] = ()) -> Result:
        """Run a program when a sandbox is free: one that waits for that is not under way."""
        async with self._room:
            with self._in_flight.at(row):
                return await self._pool.run(code, stdin=stdin, checks=checks)


def _shortest(value: Any) -> int:
    """Characters of the shortest literal that equals a value, or fewer: to Python, 1 is 1.0 and True."""
    return len(re.sub(r"\.0\b|(?<=T)rue|(?<=F)alse", "", repr(value)))
