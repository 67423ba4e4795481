"""Plays episodes by harnesses: whoever can talk to OpenAI's API, in a process or a coroutine, plays at the endpoint.

The Player of recipes with agent.command or agent.function. Not for what becomes of requests (endpoint/session.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from pydantic import ValidationError

from megarl.agents.endpoint.asking import SamplingNotice
from megarl.agents.endpoint.forms import RewardReport
from megarl.agents.endpoint.http import LOOPBACK, Endpoint
from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.session import Budgets, EpisodeSession
from megarl.agents.environment import EnvironmentFailedError, EpisodeRow
from megarl.agents.harness_kinds import Harness, open_harness
from megarl.agents.observer import Observer
from megarl.agents.rows import episode_row
from megarl.core.types import Sample
from megarl.data.chat import Tokenizer
from megarl.data.images import Sight
from megarl.recipe.schema import Recipe
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt
from megarl.serving.call_parser import CallParser
from megarl.serving.client import ServerEndpoint

LOOK_S = 0.2  # between looks at how long an episode has taken, at least


@dataclass(frozen=True)
class HarnessSettings:
    """What all episodes of a run have in common.

    host: where the endpoint listens. graded: whether graders reward as well. most: at once; others wait, and their seconds do not
    count yet.
    """

    harness: Harness
    budgets: Budgets
    host: str = LOOPBACK
    graded: bool = False
    most: int | None = None


class Harnesses:
    """One endpoint, and a harness for each episode, which has a key of its own."""

    def __init__(self, settings: HarnessSettings, model: Model) -> None:
        self._settings, self._model = settings, model
        self._endpoint = Endpoint(model)
        self._starting = asyncio.Lock()
        self._notice = SamplingNotice()
        self._room = contextlib.nullcontext() if settings.most is None else asyncio.Semaphore(settings.most)

    @classmethod
    def open(
        cls, recipe: Recipe, router: ServerEndpoint, address: str, tokenizer: Tokenizer, sight: Sight | None = None
    ) -> Harnesses:
        """Of a recipe that names a harness. address: of this node. sight: of a model that sees images.

        Raises UserError where a function does not import.
        """
        agent = recipe.agent
        assert agent is not None
        parser = None if agent.tool_parser is None else CallParser(router, agent.tool_parser)
        budgets = Budgets(recipe.data.max_prompt_tokens, agent.max_turns, agent.turn_tokens, agent.timeout_s)
        host = LOOPBACK if agent.listen == "loopback" else address
        settings = HarnessSettings(
            open_harness(agent),
            budgets,
            host,
            graded=bool(recipe.reward.by_name()),
            most=None if agent.command is None else agent.processes,
        )
        return cls(settings, Model(agent.served_as, tokenizer, parser, Observer.open(recipe, tokenizer, sight)))

    async def play(self, attempt: Attempt, asker: Asker) -> Sample:
        """One episode. What its harness does wrong makes it a sample of Status.FAILED, as a server's failure does."""
        async with self._starting:
            if not self._endpoint.url:
                await self._endpoint.start(self._settings.host)
        session = EpisodeSession(attempt, asker, self._model, self._settings.budgets, self._notice)
        key = self._endpoint.open(session)
        try:
            async with self._room:
                return await self._played(session, key, attempt, asker)
        finally:
            self._endpoint.end(key)

    async def close(self) -> None:
        """Listen no more."""
        await self._endpoint.close()
        await self._model.close()

    async def _played(self, session: EpisodeSession, key: str, attempt: Attempt, asker: Asker) -> Sample:
        settings, tally = self._settings, session.tally
        task = asyncio.ensure_future(self._run(session, key, episode_row(attempt)))
        try:
            await self._in_time(task, session)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        tally.environment_s = session.own_s()
        self._endpoint.end(key)  # nothing is added any more
        if session.failure:
            return tally.failed(session.failure)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EnvironmentFailedError):
            raise error
        if error is not None and session.over is None:
            return tally.failed(str(error), error.trace, by_environment=True)
        sample = session.sample(asker.decode, rewards=session.rewarded or not settings.graded)
        if sample is None:
            why = "agent.timeout_s had passed before" if session.over == "time" else "the harness ended without"
            return tally.failed(f"{why} a first answer of the model", by_environment=True)
        if session.over is None and not session.rewarded and not settings.graded:
            return tally.failed(
                "the harness ended without a reward: it reports one to OPENAI_BASE_URL/episode/reward, or the recipe names "
                "graders in `reward`",
                by_environment=True,
            )
        return sample

    async def _run(self, session: EpisodeSession, key: str, row: EpisodeRow) -> None:
        """Have the harness play. Raises EnvironmentFailedError."""
        session.begin()
        done = await self._settings.harness.play(self._endpoint.url, key, row)
        if done is None:
            return
        try:
            metrics = {name: float(value) for name, value in done.metrics.items()}
            await session.reward(RewardReport(reward=float(done.reward), metrics=metrics))
        except (ValidationError, RefusedError) as error:
            raise EnvironmentFailedError(f"the harness gave a wrong reward: {error}") from error

    async def _in_time(self, task: asyncio.Future[None], session: EpisodeSession) -> None:
        """Wait for the harness, or until the episode's seconds are used up: those at the servers, and its own."""
        while not task.done():
            left = self._settings.budgets.timeout_s - session.own_s() - session.tally.generation_s
            if left <= 0:
                session.over = session.over or "time"
                return
            await asyncio.wait({task}, timeout=max(LOOK_S, left))
