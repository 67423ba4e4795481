"""A teacher behind an address, as a collector asks it: what its servers say of a sample becomes columns of the sample.

They are asked once a sample has ended, beside its graders, of each of its sequences and from the first token on that is
trained on. A server that is gone or busy is asked again until the deadline: somebody may start it again. Not for a teacher
that ranks hold, and not for whether its servers suit the run (serving/teacher.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.types import TEACHER_LOGPROBS, TEACHER_TOP, FloatArray, Sample, TokenArray
from megarl.models.hf_config import load_model_config
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rewards.check import read_key
from megarl.serving.answers import AnswerError
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError, ServerUnreachableError
from megarl.serving.prompt_scores import PromptScores

KEY = "teacher.servers"
WAITED, FAILURES = "teacher_s", "teacher_failures"  # in Sample.numbers
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 4.0
SILENT_S = 3.0  # after which people are told: a connection that a server has closed for its age is no outage
TOO_MANY = 429
# Probability of all but the likeliest tokens that is not told from none: what float32 has of log-probs near 0 leaves no more.
LEAST_REST = 2.0**-23


@dataclass(frozen=True)
class Said:
    """What a teacher said of a sample. columns: as of Sample; none where it failed. failure: why, None where it did not."""

    columns: dict[str, FloatArray]
    seconds: float
    failure: str | None = None

    def put(self, sample: Sample) -> None:
        """Make it the sample's. One that the teacher said nothing of can be trained on as little as one without a response."""
        sample.columns = self.columns
        sample.numbers = sample.numbers | {WAITED: self.seconds, FAILURES: float(self.failure is not None)}
        if self.failure is not None:
            sample.fail(f"the teacher: {self.failure}")


@dataclass
class _Server:
    """One of the servers. silent_since: when it first gave no answer, since it last gave one; by time.monotonic."""

    client: ServerClient
    in_flight: int = 0
    silent_since: float | None = None
    again_at: float = 0.0
    told: bool = False


@dataclass
class ServedTeacher:
    """The servers of a teacher. columns: what is wanted, with what follows [R] in the shape of each.

    vocab_size: of the policy. alone: requests share no cached prefix. tell: takes a line for people.
    """

    clients: Sequence[ServerClient]
    columns: Mapping[str, tuple[int, ...]]
    vocab_size: int
    tell: Callable[[str], None]
    timeout_s: float = 600.0
    concurrency: int = 64
    alone: bool = False
    _servers: list[_Server] = field(init=False)
    _slots: asyncio.Semaphore = field(init=False)
    _failed: bool = False  # people were told of the first failure: the step's line comes late

    def __post_init__(self) -> None:
        self._servers = [_Server(client) for client in self.clients]
        self._slots = asyncio.Semaphore(self.concurrency)

    @classmethod
    def open(cls, recipe: Recipe, tell: Callable[[str], None]) -> ServedTeacher | None:
        """The recipe's; None where it has none. Raises UserError where its key is not there."""
        settings = recipe.teacher.servers if recipe.teacher is not None else None
        if settings is None:
            return None
        key = read_key(settings.key_env, KEY) or ""
        return cls(
            [ServerClient(ServerEndpoint(f"teacher server {at}", url, key)) for at, url in enumerate(settings.urls)],
            served_columns(recipe),
            load_model_config(recipe.model.path).vocab_size,
            tell,
            settings.timeout_s,
            settings.concurrency,
            recipe.rollout.deterministic,
        )

    async def say(self, sample: Sample) -> Said:
        """What the teacher says of a sample's trained tokens. That it says nothing of this one is the sample's failure."""
        began = time.monotonic()
        try:
            columns = await self._columns(sample)
        except MegarlError as error:
            if not self._failed:
                self._failed = True
                self.tell(f"the teacher said nothing of the sample {sample.id}, which has failed: {error}")
            return Said({}, time.monotonic() - began, str(error))
        return Said(columns, time.monotonic() - began)

    async def close(self) -> None:
        """End the connections."""
        await asyncio.gather(*(server.client.close() for server in self._servers))

    async def _columns(self, sample: Sample) -> dict[str, FloatArray]:
        num_prompt, tokens = (
            len(sample.prompt.token_ids),
            np.concatenate([sample.prompt.token_ids, sample.response_ids]),
        )
        trained = num_prompt + np.flatnonzero(sample.loss_mask)  # among the tokens
        bounds = [0, *(num_prompt + start for start in sample.starts), len(tokens)]
        spans = [
            (begin, int(here[0]), int(here[-1]) + 1)
            for begin, end in pairwise(bounds)
            if len(here := trained[(trained >= begin) & (trained < end)])
        ]
        asked = (self._ask(tokens[begin:end], first - begin) for begin, first, end in spans)
        made = {name: np.zeros((len(sample.response_ids), *rest), np.float32) for name, rest in self.columns.items()}
        for (_, first, end), scores in zip(spans, await asyncio.gather(*asked), strict=True):
            mask = sample.loss_mask[first - num_prompt : end - num_prompt] > 0
            if (most := scores.top_ids[mask].max(initial=0)) >= self.vocab_size:
                raise AnswerError(
                    f"it finds token {most} likely, and the policy's vocabulary has {self.vocab_size}: it is of another family"
                )
            for name, column in made.items():
                said = scores.logprobs if name == TEACHER_LOGPROBS else joined_top(scores)
                column[first - num_prompt : end - num_prompt][mask] = said[mask]
        return made

    async def _ask(self, token_ids: TokenArray, first: int) -> PromptScores:
        """Of the tokens from `first` on. Raises DeadlineError, ServerError, AnswerError."""
        top = (self.columns[TEACHER_TOP][0] - 1) // 2 if TEACHER_TOP in self.columns else 0
        last: MegarlError | None = None
        async with self._slots:
            try:
                async with asyncio.timeout(self.timeout_s):
                    while True:
                        server = self._freest()
                        try:
                            return await self._once(server, token_ids, first, top)
                        except (ServerUnreachableError, ServerError, DeadlineError) as error:
                            if isinstance(error, ServerError) and error.status != TOO_MANY and error.status < 500:
                                raise
                            last = error
                            await self._passed_over(server, error)
            except TimeoutError:
                why = f"; the last answer: {last}" if last is not None else ""
                raise DeadlineError(f"no answer within {KEY}.timeout_s, {self.timeout_s:g} s{why}") from last

    async def _once(self, server: _Server, token_ids: TokenArray, first: int, top: int) -> PromptScores:
        # One that takes what it is sent and says nothing leaves time for the others; alone it has all of it.
        limit_s = self.timeout_s / len(self._servers) if len(self._servers) > 1 else 2 * self.timeout_s
        server.in_flight += 1
        try:
            scores = await server.client.prompt_scores(token_ids, limit_s, first=first, top=top, alone=self.alone)
        finally:
            server.in_flight -= 1
        if server.told:
            self.tell(f"the {server.client.endpoint.name} answers again")
        server.silent_since, server.told = None, False
        return scores

    def _freest(self) -> _Server:
        now = time.monotonic()
        return min(self._servers, key=lambda server: (server.again_at > now, server.in_flight))

    async def _passed_over(self, server: _Server, error: MegarlError) -> None:
        """Leave a server alone for a while, the longer the longer it is silent; wait where all are left alone."""
        now = time.monotonic()
        since = server.silent_since = now if server.silent_since is None else server.silent_since
        pause_s = min(max(SHORTEST_PAUSE_S, (now - since) / 2), LONGEST_PAUSE_S)
        server.again_at = now + pause_s
        if now - since >= SILENT_S and not server.told:
            server.told = True
            self.tell(f"{error}. It is asked again, for up to {self.timeout_s:g} s a sample ({KEY}.timeout_s)")
        if all(each.again_at > now for each in self._servers):
            await asyncio.sleep(pause_s)


def joined_top(scores: PromptScores) -> FloatArray:
    """[n, 2k + 1], as training/batch.joined_top has it: k ids, their log-probs, and that of all other tokens together."""
    rest = 1.0 - np.exp(scores.top_logprobs.astype(np.float64)).sum(axis=1, keepdims=True)
    parts = [scores.top_ids, scores.top_logprobs, np.log(np.maximum(rest, LEAST_REST))]
    return np.concatenate(parts, axis=1, dtype=np.float32)
