"""Graders that are asked about one response at a time over an address: how many at once, and until when one is waited for.

What is asked, and what an answer says, is a Form's: a judge's (judge.py), a reward model's (classify.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from megarl.core.errors import MegarlError, TemplateRefusalError
from megarl.rewards.grade import Grade, Item, failed
from megarl.rewards.http import CallError, JsonClient
from megarl.rewards.patience import ENOUGH, InFlight, Patience, UnderWay


class Form(Protocol):
    """What is posted, and how an answer is read."""

    def probe(self) -> Any:
        """What is posted at the start: something that whoever is there answers."""

    def body(self, item: Item) -> dict[str, Any]:
        """What is posted about a response. May raise anything, of a row that it was not made for."""

    def reply(self, answer: Any, body: dict[str, Any]) -> Any:
        """What matters of an answer to what was posted. Raises ValueError, with what is wrong, where that is not there."""

    def grade(self, reply: Any) -> Grade:
        """What it says of the response."""


class SingleGrader:
    """Grades by asking; up to so many requests at a time."""

    def __init__(self, client: JsonClient, form: Form, concurrency: int) -> None:
        self._client, self._form = client, form
        self._room = asyncio.Semaphore(concurrency)
        self._in_flight = InFlight()
        self._patience = Patience(max(ENOUGH, concurrency))

    async def start(self) -> None:
        """Ask once: somebody is there, takes the key and answers in this form. Raises MegarlError."""
        try:
            await self._ask(self._form.probe(), probes=True)
        except (CallError, TemplateRefusalError) as error:
            raise MegarlError(str(error)) from None

    async def grade(self, item: Item) -> Grade:
        """Grade one response. The deadline counts from when the request is sent."""
        try:
            body = self._form.body(item)
        except Exception as error:  # what a template computes may raise anything, of a row that it was not made for
            return failed(f"error: the template does not go with this row: {type(error).__name__}: {error}")
        asked_at, row = time.monotonic(), item.row or str(id(body))
        async with self._room:
            if refusal := self._patience.refusal(row, asked_at):
                return failed(refusal)
            try:
                with self._in_flight.at(row):
                    reply = await self._ask(body)
            except CallError as error:
                (self._patience.lost if error.late else self._patience.graded)(row)
                return failed(str(error))
        self._patience.graded(row)
        return self._form.grade(reply)

    def oldest(self) -> UnderWay | None:
        """The request that has been under way for longest."""
        return self._in_flight.oldest(self._client.well_since)

    async def close(self) -> None:
        """End the connections; requests under way fail."""
        await self._client.close()

    async def _ask(self, body: dict[str, Any], *, probes: bool = False) -> Any:
        answer = await self._client.post(body, probes=probes)
        try:
            return self._form.reply(answer, body)
        except ValueError as error:
            raise CallError(f"error: {self._client.url} answered {error}") from None
