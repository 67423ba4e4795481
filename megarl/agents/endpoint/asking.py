"""How a session's requests are sampled: by the run's rules in an episode. Not for what they are asked with (session.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from megarl.agents.endpoint.forms import ChatRequest, CompletionRequest
from megarl.agents.tally import Tally
from megarl.core.log import get_logger
from megarl.core.types import TokenArray
from megarl.rollout.asking import Asker, Request, RequestFailedError
from megarl.rollout.attempt import Attempt
from megarl.rollout.pictures import Sends
from megarl.serving.answers import Generation
from megarl.serving.sampling import Sampling

log = get_logger(__name__)


async def ask_all(
    asker: Asker, requests: Sequence[Request], step: int = 0, expected_tokens: float = 0.0
) -> list[Generation]:
    """Answers to all, asked side by side. step, expected_tokens: as of `Asker.ask`.

    Raises RequestFailedError where no server answers one of them in time.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            making = [
                tasks.create_task(asker.ask(each, step=step, expected_tokens=expected_tokens)) for each in requests
            ]
    except* RequestFailedError as errors:
        raise RequestFailedError(str(errors.exceptions[0])) from errors
    return [each.result() for each in making]


class EpisodeAsker:
    """Asks for the turns of one episode, and counts the time that they take."""

    def __init__(self, attempt: Attempt, asker: Asker) -> None:
        self._attempt, self._asker = attempt, asker
        self._asked_s = 0.0
        self._since: float | None = None

    def seconds(self) -> float:
        """In which the agent waited for the policy, those before its turn at the servers among them."""
        return self._asked_s + (0.0 if self._since is None else time.monotonic() - self._since)

    async def ask(
        self,
        context: TokenArray,
        request: ChatRequest | CompletionRequest,
        tally: Tally,
        *,
        most_tokens: int,
        pictures: Sends | None = None,
    ) -> list[Generation]:
        """What the policy writes after the context: as many choices as are wanted, side by side. pictures: of the context.

        Raises RequestFailedError where no server answers in time.
        """
        asked = [
            Request(context, self._sampling(request, tally.turns, choice, most_tokens), pictures=pictures)
            for choice in range(request.count)
        ]
        self._since = time.monotonic()
        attempt = self._attempt
        try:
            return await ask_all(self._asker, asked, attempt.step, attempt.expected_tokens)
        finally:
            tally.generation_s += max(each.seconds for each in asked)
            self._asked_s += time.monotonic() - self._since
            self._since = None

    def _sampling(self, request: ChatRequest | CompletionRequest, turn: int, choice: int, most_tokens: int) -> Sampling:
        """The run's, ended by the agent's stop strings as well: what is trained on was sampled as the trainer thinks."""
        own = self._attempt.seeded(turn, choice)
        return replace(own, max_tokens=most_tokens, stop=tuple(dict.fromkeys((*own.stop, *request.stops))))


class SamplingNotice:
    """Says once that requests ask for another temperature, top_p or seed than the run samples with."""

    def __init__(self) -> None:
        self._told = False

    def look(self, request: ChatRequest | CompletionRequest, own: Sampling) -> None:
        """A request of an agent, and the run's rules."""
        other = [
            f"{name}={asked}"
            for name, asked, used in (
                ("temperature", request.temperature, own.temperature),
                ("top_p", request.top_p, own.top_p),
                ("seed", request.seed, None),
            )
            if asked is not None and asked != used
        ]
        if other and not self._told:
            self._told = True
            log.warning(
                "the agent asks for %s; in a run all are sampled by the recipe: temperature=%g, top_p=%g, and seeds of its own",
                ", ".join(other),
                own.temperature,
                own.top_p,
            )
