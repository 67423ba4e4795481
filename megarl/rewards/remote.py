"""A server that grades: requests that come within a moment travel as one batch. The protocol is in docs/rewards.md."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import MegarlError
from megarl.rewards.grade import Grade, Item, failed, grade_of
from megarl.rewards.http import ANSWER_SHOWN, CallError, JsonClient
from megarl.rewards.patience import ENOUGH, InFlight, Patience, UnderWay

GATHER_S = 0.002  # how long the first response of a batch waits for others


@dataclass(frozen=True)
class _Job:
    """One response on its way. asked_at: by `time.monotonic`."""

    item: Item
    future: asyncio.Future[Grade]
    row: str
    asked_at: float

    def finish(self, grade: Grade) -> None:
        """Hand over the grade, unless the caller has given up."""
        if not self.future.done():
            self.future.set_result(grade)


class RemoteGrader:
    """Grades with a server: batches of up to `batch` responses, up to `concurrency` of them at a time."""

    def __init__(self, client: JsonClient, *, batch: int, concurrency: int) -> None:
        self._client = client
        self._batch = batch
        self._concurrency = concurrency
        self._waiting: deque[_Job] = deque()
        self._unanswered: set[asyncio.Future[Grade]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._in_flight = InFlight()
        self._patience = Patience(max(ENOUGH, concurrency))

    async def start(self) -> None:
        """Have the server grade nothing: it is there, takes the key and speaks the protocol. Raises MegarlError."""
        try:
            _rewards(await self._client.post({"items": []}, probes=True), 0)
        except CallError as error:
            raise MegarlError(str(error)) from None

    async def grade(self, item: Item) -> Grade:
        """Grade one response. The deadline counts from when its batch is sent."""
        if self._closed:
            raise MegarlError("the remote grader is closed")
        job = _Job(item, asyncio.get_running_loop().create_future(), item.row or str(id(item)), time.monotonic())
        self._waiting.append(job)
        self._unanswered.add(job.future)
        job.future.add_done_callback(self._unanswered.discard)
        if len(self._waiting) >= self._batch:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._send)
        return await job.future

    def oldest(self) -> UnderWay | None:
        """The batch that has been under way for longest, by its first response."""
        return self._in_flight.oldest(self._client.well_since)

    async def close(self) -> None:
        """Give up what is under way and end the connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._refuse(MegarlError("the remote grader is closed"))
        await self._client.close()

    def _send(self) -> None:
        """Send what waits, as far as the bound on requests in flight allows; what is left goes when one comes back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._sending) < self._concurrency and not self._closed:
            jobs = self._next_batch()
            if not jobs:
                return
            task = asyncio.get_running_loop().create_task(self._post(jobs))
            self._sending.add(task)
            task.add_done_callback(self._came_back)

    def _next_batch(self) -> list[_Job]:
        """Those that have waited longest, without what would only time out as well, and what nobody waits for any more."""
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < self._batch:
            job = self._waiting.popleft()
            if job.future.done():
                continue
            refusal = self._patience.refusal(job.row, job.asked_at)
            if refusal is None:
                jobs.append(job)
            else:
                job.finish(failed(refusal))
        return jobs

    def _came_back(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a mistake of this program's: nobody may wait for ever because of it
            self._refuse(error)
        if self._timer is None:
            self._send()

    def _refuse(self, error: BaseException) -> None:
        for future in list(self._unanswered):
            future.set_exception(error)

    async def _post(self, jobs: list[_Job]) -> None:
        first = jobs[0].row
        try:
            with self._in_flight.at(first):
                grades = _rewards(await self._client.post({"items": [job.item.said for job in jobs]}), len(jobs))
            self._patience.graded(first)
        except CallError as error:
            grades = [failed(str(error))] * len(jobs)
            (self._patience.lost if error.late else self._patience.graded)(first)
        for job, grade in zip(jobs, grades, strict=True):
            job.finish(grade)


def _rewards(answer: Any, count: int) -> list[Grade]:
    """Raises CallError where the answer is not one of the protocol."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        shown = repr(answer)[:ANSWER_SHOWN]
        raise CallError(f'error: wanted is {{"rewards": [{count} numbers]}}, and the server answered {shown}')
    return [grade_of(reward) for reward in rewards]
