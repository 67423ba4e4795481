"""Plays an episode: the policy and its environment take turns until it is done or a budget has run out.

What becomes of tokens is transcript.py's and template.py's; what an environment may answer, environment.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megarl.agents.environment import (
    Done,
    Environment,
    EnvironmentFailedError,
    Message,
    Response,
    Turn,
    check_reward,
    check_start,
    check_step,
)
from megarl.agents.environment_processes import EnvironmentProcesses
from megarl.agents.loading import REWARD, Make, has_step, open_environment
from megarl.agents.observations import in_parts, sendable
from megarl.agents.observer import Observer
from megarl.agents.patience import NEVER_S, within
from megarl.agents.renderings import Renderings
from megarl.agents.rows import episode_row
from megarl.agents.tally import Budget, Tally
from megarl.agents.template import ChatTemplate
from megarl.agents.tool_sources import SharedTools
from megarl.agents.tool_use import ToolUse
from megarl.agents.tools import MOST_SHOWN, Result, ToolCall, apart
from megarl.agents.transcript import Transcript
from megarl.core.errors import TemplateRefusalError, UserError
from megarl.core.log import get_logger
from megarl.core.types import Image, Prompt, Sample
from megarl.data.chat import Tokenizer
from megarl.data.images import Sight
from megarl.recipe.schema import Recipe
from megarl.rollout.asking import Asker, Request, RequestFailedError
from megarl.rollout.attempt import Attempt
from megarl.rollout.pictures import EpisodePictures
from megarl.serving.answers import Generation
from megarl.serving.client import ServerEndpoint

log = get_logger(__name__)

T = TypeVar("T")

CLOSE_S = 10.0  # who cancels an episode waits for this


@dataclass(frozen=True)
class EpisodeSettings:
    """What all episodes of a run have in common; the budgets are the recipe's. rewards: whether the environment does.

    processes: that environments are made in, in the place of `make`; None: in this one. close: what environments have in common.
    split: whether another sequence begins where the template rewrites earlier turns. has_step: whether environments answer a turn
    without a call; else it ends the episode, and `reward` says what that was worth. observer: how the policy sees messages.
    """

    make: Make
    template: ChatTemplate
    max_prompt_tokens: int
    max_turns: int
    turn_tokens: int | None
    timeout_s: float
    step_timeout_s: float
    tools: ToolUse | None = None
    rewards: bool = True
    processes: EnvironmentProcesses | None = None
    close: Callable[[], Awaitable[None]] | None = None
    split: bool = False
    has_step: bool = True
    observer: Observer = field(default_factory=Observer)


class Episodes:
    """The Player of recipes with an agent."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        router: ServerEndpoint,
        tokenizer: Tokenizer,
        sight: Sight | None = None,
        shared: SharedTools | None = None,
    ) -> Episodes:
        """Of a recipe that has an agent. sight: of a model that sees images. shared: tools that somebody else closes.

        Raises UserError where its environment or a tool does not import.
        """
        agent = recipe.agent
        assert agent is not None
        tools = ToolUse.open(agent, router, shared) if agent.has_tools else None
        processes = EnvironmentProcesses(agent) if agent.workers is not None else None
        maker = open_environment(agent)
        return cls(
            EpisodeSettings(
                make=maker,
                close=maker.close,
                template=ChatTemplate(tokenizer, [] if tools is None else tools.schemas),
                max_prompt_tokens=recipe.data.max_prompt_tokens,
                max_turns=agent.max_turns,
                turn_tokens=agent.turn_tokens,
                timeout_s=agent.timeout_s,
                step_timeout_s=agent.step_timeout_s,
                tools=tools,
                rewards=agent.rewards,
                processes=processes,
                split=agent.rewritten == "split",
                has_step=has_step(agent),
                observer=Observer.open(recipe, tokenizer, sight),
            )
        )

    async def play(self, attempt: Attempt, asker: Asker) -> Sample:
        """One episode. What the environment does wrong makes it a sample of Status.FAILED, as a server's failure does."""
        episode = _Episode(self._settings, attempt, asker)
        try:
            return await episode.play()
        except EnvironmentFailedError as error:
            return episode.tally.failed(f"the environment failed: {error}", error.trace, by_environment=True)
        except RequestFailedError as error:
            return episode.tally.failed(str(error))
        finally:
            await episode.close()

    async def close(self) -> None:
        """Close what tools need and environments share, and end environments' processes."""
        if self._settings.close is not None:
            try:
                await within(self._settings.close, CLOSE_S, "close")
            except EnvironmentFailedError as error:  # a user's: the rest is closed all the same
                log.warning("what environments share: %s\n%s", error, error.trace)
        if self._settings.processes is not None:
            await self._settings.processes.close()
        if self._settings.tools is not None:
            await self._settings.tools.close()


class _Episode:
    def __init__(self, settings: EpisodeSettings, attempt: Attempt, asker: Asker) -> None:
        self._settings, self._attempt, self._asker = settings, attempt, asker
        self._environment: Environment | None = None
        self.tally = Tally(attempt)
        self._renderings: Renderings | None = None  # where episodes are split
        self._calls: tuple[ToolCall, ...] = ()  # of the last turn
        self._pictures = EpisodePictures(attempt.pictures or settings.observer.pictures(attempt.prompt))

    async def play(self) -> Sample:
        prompt = await self._start()
        transcript = Transcript(prompt.token_ids)
        while True:
            answer = await self._ask(transcript)
            if answer.finish == "length":
                return await self._over(prompt, transcript, "tokens")
            outcome = await self._use_tools(answer) or await self._step(answer)
            self.tally.rewards.append(float(outcome.reward))
            if isinstance(outcome, Done):
                return self._ended(prompt, transcript, metrics=outcome.metrics)
            over = await self._told(transcript, outcome, answer.token_ids.tolist())
            if over is not None:
                return await self._over(prompt, transcript, over)

    async def close(self) -> None:
        """Close the environment; what goes wrong there is told, and costs nothing."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            await within(environment.close, min(CLOSE_S, self._settings.step_timeout_s), "close")
        except EnvironmentFailedError as error:
            log.warning("episode %s: the environment failed: %s", self._attempt.sample_id, error)

    async def _start(self) -> Prompt:
        """The first messages as a prompt."""
        attempt, settings = self._attempt, self._settings
        told = episode_row(attempt)
        remote = None if settings.processes is None else settings.processes.make()
        if remote is not None:
            await remote.ready()  # no deadline is for the start of a process

        async def start() -> list[Message]:
            self._environment = remote or settings.make()
            return await self._sendable(check_start(await self._environment.start(told)), "start")

        observed = settings.observer.first(await self._of_environment(start, "start"), attempt.prompt)
        first, images = observed.messages, observed.images
        most = settings.max_prompt_tokens
        if settings.template.exceeds(first, most):
            raise EnvironmentFailedError(f"start gave messages far over data.max_prompt_tokens={most}")
        try:
            ids, text = settings.template.prompt(first)
        except TemplateRefusalError as error:
            raise EnvironmentFailedError(f"start: {error}") from error
        ids = settings.observer.expanded(ids, observed.sized(attempt.prompt), "start")
        if len(ids) > most:
            raise EnvironmentFailedError(
                f"start gave messages of {len(ids)} tokens, over data.max_prompt_tokens={most}"
            )
        await self._show(images, "start")
        if settings.split:
            self._renderings = Renderings(settings.template, first)
        self.tally.say(first, len(ids))
        return replace(attempt.prompt, token_ids=ids, text=text)

    async def _ask(self, transcript: Transcript) -> Generation:
        """The policy's next turn."""
        attempt = self._attempt
        sampling = attempt.seeded(self.tally.turns)
        left = sampling.max_tokens - transcript.num_response
        sampling = replace(sampling, max_tokens=min(left, self._settings.turn_tokens or left))
        request = Request(transcript.context, sampling, pictures=self._pictures)
        try:
            answer = await self._asker.ask(request, step=attempt.step, expected_tokens=attempt.expected_tokens)
        finally:
            self.tally.generation_s += request.seconds
        transcript.wrote(answer)
        self.tally.turns += 1
        self.tally.say([{"role": "assistant", "content": answer.text}], len(answer.token_ids))
        return answer

    async def _step(self, answer: Generation) -> Turn | Done:
        environment = self._environment
        assert environment is not None
        if not self._settings.has_step:
            return await self._reward()
        response = Response(answer.text, tuple(answer.token_ids.tolist()), self.tally.turns - 1)

        async def step() -> Turn | Done:
            outcome = check_step(
                await environment.step(response)
            )  # it looks at what is a user's as well, and may raise
            if isinstance(outcome, Done):
                return outcome
            return replace(outcome, messages=await self._sendable(outcome.messages, "step"))

        timed = getattr(environment, "timed", False)  # it ends in time by itself, and waits for others meanwhile
        return await self._of_environment(step, "step", NEVER_S if timed else None)

    async def _reward(self) -> Done:
        """What an environment without step says that the episode was worth."""
        environment: Any = self._environment
        return await self._of_environment(lambda: apart(environment.reward, {}, check_reward), REWARD)

    async def _use_tools(self, answer: Generation) -> Turn | Done | None:
        """Results of the tools that the policy has called, if it has called any; an end where one of them gave it."""
        self._calls = ()
        settings = self._settings
        if settings.tools is None:
            return None
        template, began = settings.template, time.monotonic()
        try:
            said = template.behind_thinking(template.text_with_marks(answer.token_ids.tolist()))
            used = await settings.tools.use(said, self.tally.turns, self._environment)
        finally:
            self.tally.tools_s += time.monotonic() - began
        if used is None:
            return None
        self._calls = used.calls
        results = [self._told_as_seen(result) for result in used.results]
        self.tally.num_calls += len(results)
        self.tally.num_call_failures += sum(result.failed for result in results)
        self.tally.num_cut_results += sum(result.cut for result in results)
        worths = [result.worth for result in results if result.worth is not None]
        for worth in worths:
            self.tally.metrics.update(worth.metrics)
        reward = sum(float(worth.reward) for worth in worths)
        if any(isinstance(worth, Done) for worth in worths):
            return Done(reward)
        return Turn([result.message for result in results], reward)

    def _told_as_seen(self, result: Result) -> Result:
        """The policy is told of an image that cannot be shown, as of whatever else goes wrong in a call."""
        why = self._settings.observer.unfit(result.message)
        if not why:
            return result
        return replace(result, message={**result.message, "content": f"error: {why[:MOST_SHOWN]}"}, failed=True)

    async def _told(self, transcript: Transcript, turn: Turn, wrote: list[int]) -> Budget | None:
        """Append what the environment said; which budget ran out, if one did. wrote: what the policy wrote before it."""
        if self.tally.turns >= self._settings.max_turns:
            return "turns"
        if self.tally.seconds > self._settings.timeout_s:
            return "time"
        template, observer, anew = self._settings.template, self._settings.observer, None
        observed = observer.later(turn.messages)
        messages = observed.messages
        if template.exceeds(messages, self._attempt.sampling.max_tokens - transcript.num_response):
            return "tokens"
        try:
            ids = template.following(messages, wrote[-1:], self._calls)
            if self._renderings is not None:
                anew = self._renderings.next(template.text_with_marks(wrote), messages)
        except TemplateRefusalError as error:
            raise EnvironmentFailedError(f"step: {error}") from error
        ids = observer.expanded(ids, observed.sized(self._attempt.prompt), "step")
        added = len(ids if anew is None else anew)
        if transcript.num_response + added >= self._attempt.sampling.max_tokens:
            return "tokens"  # the policy could write nothing after it
        await self._show(observed.images, "step")  # decoded now: their tokens have room
        if anew is None:
            transcript.told(ids)
        else:
            transcript.begin(anew, ids)
        self.tally.say(messages, len(ids))
        return None

    async def _sendable(self, messages: Sequence[Message], where: str) -> list[Message]:
        """With images as bytes. Those of another process came so, and no path that it names is read here."""
        if self._settings.processes is not None or not in_parts(messages):
            return list(messages)
        try:
            return await asyncio.to_thread(sendable, messages)
        except ValueError as error:
            raise EnvironmentFailedError(f"{where}: {error}") from error

    async def _show(self, images: Sequence[Image | None], where: str) -> None:
        """Have their PNGs. Raises EnvironmentFailedError for one that is damaged."""
        began = time.monotonic()
        try:
            self._pictures = await self._pictures.with_more(images, where)
        except UserError as error:
            raise EnvironmentFailedError(str(error)) from error
        finally:
            self.tally.environment_s += time.monotonic() - began

    async def _over(self, prompt: Prompt, transcript: Transcript, over: Budget) -> Sample:
        """The end by a budget. An environment without step says of it, too, what it was worth: the last turn has that."""
        if self._settings.has_step:
            return self._ended(prompt, transcript, over=over)
        done, rewards = await self._reward(), self.tally.rewards
        rewards += [0.0] * (self.tally.turns - len(rewards))  # a turn that is cut off has none of its own
        rewards[-1] += float(done.reward)
        return self._ended(prompt, transcript, over=over, metrics=done.metrics)

    def _ended(
        self, prompt: Prompt, transcript: Transcript, *, over: Budget | None = None, metrics: Any = None
    ) -> Sample:
        settings, tally = self._settings, self.tally
        more: dict[str, float] = {}
        if settings.tools is not None:
            more |= {
                "tools_s": tally.tools_s,
                "tool_calls": float(tally.num_calls),
                "tool_failures": float(tally.num_call_failures),
                "tool_results_cut": float(tally.num_cut_results),
            }
        if settings.split:
            more["sequences"] = 1.0 + len(transcript.starts)
        sample = tally.ended(
            prompt,
            transcript,
            self._asker.decode,
            over=over,
            metrics=metrics,
            rewards=settings.rewards,
            more=more,
        )
        sample.shown = self._pictures.shown
        return sample

    async def _of_environment(self, call: Callable[[], Awaitable[T]], what: str, seconds: float | None = None) -> T:
        began = time.monotonic()
        try:
            return await within(call, seconds or self._settings.step_timeout_s, what)
        finally:
            self.tally.environment_s += time.monotonic() - began
