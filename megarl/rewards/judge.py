"""A language model that grades, asked over an OpenAI-compatible address. What it is asked is question.py's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from megarl.core.errors import MegarlError
from megarl.recipe.reward import Judge
from megarl.rewards.grade import Grade, Item, failed
from megarl.rewards.http import ANSWER_SHOWN, CallError, JsonClient
from megarl.rewards.patience import ENOUGH, InFlight, Patience, UnderWay
from megarl.rewards.question import read_score

PROBE = "Answer with one word: are you there?"


class JudgeGrader:
    """Grades by asking a model; up to `settings.concurrency` questions at a time."""

    def __init__(self, client: JsonClient, settings: Judge, question: Callable[..., str]) -> None:
        """question: what `compile_template` returned."""
        self._client = client
        self._settings = settings
        self._question = question
        self._room = asyncio.Semaphore(settings.concurrency)
        self._in_flight = InFlight()
        self._patience = Patience(max(ENOUGH, settings.concurrency))

    async def start(self) -> None:
        """Ask for one word: the model is there and takes the key. Raises MegarlError."""
        try:
            await self._ask(PROBE)
        except CallError as error:
            raise MegarlError(str(error)) from None

    async def grade(self, item: Item) -> Grade:
        """Grade one response. The deadline counts from when the judge is asked."""
        try:
            question = self._question(**item.said)
        except Exception as error:  # what a template computes may raise anything, of a row that it was not made for
            return failed(f"error: the template does not go with this row: {type(error).__name__}: {error}")
        asked_at, row = time.monotonic(), item.row or str(id(question))
        async with self._room:
            if refusal := self._patience.refusal(row, asked_at):
                return failed(refusal)
            try:
                with self._in_flight.at(row):
                    reply, cut_off = await self._ask(question)
            except CallError as error:
                (self._patience.lost if error.late else self._patience.graded)(row)
                return failed(str(error))
        self._patience.graded(row)
        return read_score(reply, self._settings.parse, self._settings.scale, cut_off=cut_off)

    def oldest(self) -> UnderWay | None:
        """The question that has been under way for longest."""
        return self._in_flight.oldest()

    async def close(self) -> None:
        """End the connections; questions under way fail."""
        await self._client.close()

    async def _ask(self, question: str) -> tuple[str, bool]:
        """The reply, and whether it was cut off at its most tokens."""
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        answer = await self._client.post({name: value for name, value in body.items() if value is not None})
        try:
            choice = answer["choices"][0]
            reply = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise CallError(f"error: {self._client.url} answered without a reply: {repr(answer)[:ANSWER_SHOWN]}")
        return reply, choice.get("finish_reason") == "length"
