"""One episode behind the endpoint: requests that extend its conversation become the turns of its transcript.

The run's own rules hold: its sampling, its seeds, its budgets. What an agent says of these beyond that is in docs/endpoint.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megarl.agents.endpoint.asking import EpisodeAsker, SamplingNotice
from megarl.agents.endpoint.forms import ChatMessage, ChatRequest, CompletionRequest, RewardReport
from megarl.agents.endpoint.matching import Seen, continued, seen, seen_choice
from megarl.agents.endpoint.model import Model, as_told
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Answered, Choice
from megarl.agents.endpoint.text_matching import KnownText
from megarl.agents.environment import Message
from megarl.agents.observations import shown_text
from megarl.agents.tally import Budget, Tally
from megarl.agents.template import ChatTemplate
from megarl.agents.tools import ToolCall
from megarl.agents.transcript import Transcript
from megarl.core.errors import UserError
from megarl.core.types import Image, Prompt, Sample, TokenArray
from megarl.data.image_places import PLACE
from megarl.rollout.asking import Asker, RequestFailedError
from megarl.rollout.attempt import Attempt
from megarl.rollout.pictures import EpisodePictures
from megarl.serving.answers import Generation

Kind = Literal["chat", "completions"]


@dataclass(frozen=True)
class Budgets:
    """The recipe's, of an episode."""

    max_prompt_tokens: int
    max_turns: int
    turn_tokens: int | None
    timeout_s: float


@dataclass(frozen=True)
class _Said:
    """What stands before a turn, told by the agent: its token ids, [T], and what is shown of it.

    text: of the first. seen: the messages, by which a later request is known. images: that stand in it.
    """

    ids: TokenArray
    messages: Sequence[Message]
    text: str = ""
    seen: Sequence[Seen] = ()
    images: tuple[Image, ...] = ()


class EpisodeSession:
    """The conversation of an episode. One request at a time: others wait."""

    def __init__(
        self, attempt: Attempt, asker: Asker, model: Model, budgets: Budgets, notice: SamplingNotice | None = None
    ) -> None:
        """notice: of all episodes of a run together."""
        self.tally = Tally(attempt)
        self.over: Budget | None = None
        self.failure = ""  # why no server answers
        self.metrics: dict[str, float] = {}
        self.rewarded = False
        self._attempt, self._model, self._budgets = attempt, model, budgets
        self._pictures = EpisodePictures(attempt.pictures or model.observer.pictures(attempt.prompt), prompts=False)
        self._asking = EpisodeAsker(attempt, asker)
        self._notice = notice or SamplingNotice()
        self._began = time.monotonic()
        self._lock = asyncio.Lock()
        self._kind: Kind | None = None
        self._prompt: Prompt | None = None
        self._transcript: Transcript | None = None
        # The last turn is no part of the transcript until it is known which of its choices the conversation goes on with.
        self._choices: Sequence[Choice] = ()
        self._bounded = False  # whether it was the run that bounded that turn's tokens, and not the agent
        self._template: ChatTemplate | None = None
        self._tools: list[dict[str, Any]] = []
        self._known: list[Seen] = []
        self._text = KnownText()
        self._calls: tuple[ToolCall, ...] = ()  # of the last turn
        self._answered: tuple[bytes, Answered] | None = None
        self._reported: bytes | None = None  # the last reward since the last turn

    def own_s(self) -> float:
        """Seconds that the agent itself has taken so far."""
        return time.monotonic() - self._began - self._asking.seconds()

    def begin(self) -> None:
        """The agent begins now."""
        self._began = time.monotonic()

    async def chat(self, request: ChatRequest, retried: bytes | None, body: bytes) -> Answered:
        """The policy's next turn. retried: the body, where the client says that it asks again. Raises RefusedError."""
        async with self._lock:
            if (same := self._same(retried)) is not None:
                return same
            self._check_open("chat")
            template = self._template_of(request)
            said = self._said(template, request.messages)
            turn = self.tally.turns + 1
            tools = request.tools if request.tool_choice != "none" else None

            async def read(generation: Generation) -> Choice:
                return await self._model.choice(
                    generation, logprobs=request.wants_logprobs, template=template, tools=tools, turn=turn
                )

            return self._keep(body, await self._turn(said, request, read))

    async def complete(self, request: CompletionRequest, retried: bytes | None, body: bytes) -> Answered:
        """As `chat`, of a prompt that is text or token ids."""
        async with self._lock:
            if (same := self._same(retried)) is not None:
                return same
            self._check_open("completions")
            prompt = request.text_or_ids
            extension = self._text.extended(prompt, self._choices, self._model)
            self._model.check_without_places(extension.ids)
            if self._choices:
                self._commit(self._choices[extension.chosen])
            said = _Said(extension.ids, [{"role": "user", "content": extension.shown}], extension.shown)
            if self._transcript is None:
                self._check_prompt(said.ids)

            async def read(generation: Generation) -> Choice:
                return await self._model.choice(generation, logprobs=request.wants_logprobs)

            answered = await self._turn(said, request, read)
            self._text.told(prompt)
            return self._keep(body, answered)

    async def reward(self, report: RewardReport, retried: bytes | None = None, body: bytes = b"") -> None:
        """What the last turn was worth; several add up. retried: see `chat`. Raises RefusedError before the first turn."""
        if retried is not None and retried == self._reported:
            return  # it was taken, and only the answer was lost
        tally = self.tally
        if not tally.turns:
            raise RefusedError("There is nothing to reward yet: the model was asked nothing.", code="no_turn")
        tally.rewards += [0.0] * (tally.turns - len(tally.rewards))
        tally.rewards[-1] += report.reward
        self.metrics |= report.metrics
        self.rewarded, self._reported = True, body

    def sample(self, decode: Callable[[Sequence[int]], str], *, rewards: bool) -> Sample | None:
        """The episode as a sample; None where nothing was asked. rewards: whether the agent's are a part of the reward."""
        if self._choices:
            self._commit(self._choices[0])
        if self._transcript is None or self._prompt is None:
            return None
        tally = self.tally
        tally.rewards += [0.0] * (tally.turns - len(tally.rewards))
        sample = tally.ended(
            self._prompt,
            self._transcript,
            decode,
            over=self.over,
            metrics=self.metrics,
            rewards=rewards,
            more={"tool_calls": float(tally.num_calls)} if self._tools else None,
        )
        sample.shown = self._pictures.shown
        return sample

    async def _with(self, images: Sequence[Image]) -> EpisodePictures:
        """With those that are told now; they count once the policy has answered. Raises RefusedError."""
        try:
            return await self._pictures.with_more(images, "messages")
        except UserError as error:
            raise RefusedError(str(error), param="messages") from error

    def _keep(self, body: bytes, answered: Answered) -> Answered:
        self._answered = (body, answered)
        return answered

    def _same(self, retried: bytes | None) -> Answered | None:
        """The last answer, where a client asks again because that did not reach it."""
        if retried is not None and self._answered is not None and self._answered[0] == retried:
            return self._answered[1]
        return None

    def _check_open(self, kind: Kind) -> None:
        """Raises RefusedError where the policy writes nothing any more."""
        if self.failure:
            raise _no_server(self.failure)
        if self.over is None and self.tally.turns >= self._budgets.max_turns:
            self.over = "turns"
        if self.over is None and self.own_s() + self.tally.generation_s > self._budgets.timeout_s:
            self.over = "time"
        if self.over is not None:
            raise _is_over(self.over)
        if self._kind is not None and self._kind != kind:
            raise RefusedError(
                f"This episode began with {self._kind}, and is one conversation: go on with {self._kind}.", code="kind"
            )

    def _template_of(self, request: ChatRequest) -> ChatTemplate:
        """Of the episode's tools: they stand in its prompt, which is written once."""
        tools = request.tools or []
        if self._template is None:
            return self._model.template(tools)
        if tools != self._tools:
            raise RefusedError(
                "The tools are others than in the episode's first request, and stand in its prompt, which is not written anew. "
                "Give all tools with each request.",
                code="tools_changed",
                param="tools",
            )
        return self._template

    def _said(self, template: ChatTemplate, messages: Sequence[ChatMessage]) -> _Said:
        """What is new of a conversation. Raises RefusedError where it is another conversation, or too long."""
        if self._transcript is None:
            most = self._budgets.max_prompt_tokens
            if template.exceeds([*map(as_told, messages)], most):
                raise _too_long("far more", most)
            ids, text, images = self._model.prompt(template, messages)
            self._check_prompt(ids)
            self._check_places(messages, images)
            return _Said(ids, [*map(as_told, messages)], text, [*map(seen, messages)], images)
        found = continued(messages, self._known, self._choices)
        if self._choices:
            self._commit(self._choices[found.chosen])
        names = {call.id: call.name for call in self._calls}
        told = [self._named(as_told(message), names) for message in found.new]
        if template.exceeds(told, self._attempt.sampling.max_tokens - self._transcript.num_response):
            self.over = "tokens"
            raise _is_over("tokens")
        last = self._transcript.context[-1:].tolist()
        ids, images = self._model.following(template, told, last, self._calls)
        return _Said(ids, told, seen=[*map(seen, found.new)], images=images)

    def _named(self, told: Message, names: Mapping[str, str]) -> Message:
        """A tool's result with the tool's name, which some templates want, and clients leave out."""
        name = names.get(str(told.get("tool_call_id")))
        return {**told, "name": name} if told["role"] == "tool" and name and "name" not in told else told

    def _check_places(self, messages: Sequence[ChatMessage], images: Sequence[Image]) -> None:
        """Raises RefusedError for a row's messages as they are, in which places of images would be text."""
        places = any(PLACE in shown_text(message.content or "", "") for message in messages)
        if self._attempt.prompt.images and not images and places:
            raise RefusedError(
                f"The row has images, and the messages have {PLACE} as text, which shows the model none: send each image in its "
                'place as a part {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}.',
                param="messages",
            )

    def _check_prompt(self, ids: TokenArray) -> None:
        most = self._budgets.max_prompt_tokens
        if not len(ids):
            raise RefusedError("The prompt has no tokens.", param="prompt")
        if len(ids) > most:
            raise _too_long(str(len(ids)), most)

    async def _turn(
        self, said: _Said, request: ChatRequest | CompletionRequest, read: Callable[[Generation], Awaitable[Choice]]
    ) -> Answered:
        """Have the policy write; what is told it and what it wrote count once it has. Raises RefusedError."""
        if self.over is not None:  # the choice that it goes on with was cut off
            raise _is_over(self.over)
        transcript = self._transcript
        before = 0 if transcript is None else transcript.num_response + len(said.ids)
        left = self._attempt.sampling.max_tokens - before
        if left <= 0:
            self.over = "tokens"
            raise _is_over("tokens")
        self._notice.look(request, self._attempt.sampling)
        context = said.ids if transcript is None else np.concatenate([transcript.context, said.ids])
        bound = min(left, self._budgets.turn_tokens or left)
        pictures = await self._with(said.images)
        most = min(bound, request.most_tokens or bound)
        try:
            generations = await self._asking.ask(context, request, self.tally, most_tokens=most, pictures=pictures)
            choices = [await read(generation) for generation in generations]
        except RequestFailedError as error:
            self.failure = str(error)
            raise _no_server(self.failure) from error
        if transcript is None:
            self._transcript = Transcript(said.ids)
            self._prompt = replace(self._attempt.prompt, token_ids=said.ids, text=said.text, images=())
            self._kind = "chat" if isinstance(request, ChatRequest) else "completions"
            if isinstance(request, ChatRequest):
                self._tools = request.tools or []
                self._template = self._model.template(self._tools)
        else:
            transcript.told(said.ids)
        self._reported, self._pictures = None, pictures
        self.tally.turns += 1
        self.tally.say(said.messages, len(said.ids))
        self._known += said.seen
        self._choices = choices
        self._bounded = bound <= (request.most_tokens or bound)
        if self._bounded and all(choice.generation.finish == "length" for choice in choices):
            self.over = "tokens"
        return Answered(choices, len(context))

    def _commit(self, choice: Choice) -> None:
        """The conversation goes on with this choice of the last turn."""
        assert self._transcript is not None
        self._transcript.wrote(choice.generation)
        self._choices = ()
        if self._bounded and choice.generation.finish == "length":
            self.over = self.over or "tokens"
        self._known.append(seen_choice(choice))
        self._calls = choice.calls
        self._text.wrote(choice)
        self.tally.num_calls += len(choice.calls)
        said = {"role": "assistant", "content": choice.generation.text}
        self.tally.say([said], len(choice.generation.token_ids))


def _too_long(tokens: str, most: int) -> RefusedError:
    return RefusedError(
        f"The first messages have {tokens} tokens, and data.max_prompt_tokens is {most}.",
        code="context_length_exceeded",
        param="messages",
    )


def _is_over(budget: Budget) -> RefusedError:
    whose = {
        "turns": "agent.max_turns",
        "tokens": "rollout.max_response_tokens or agent.turn_tokens",
        "time": "agent.timeout_s",
    }
    return RefusedError(
        f"The episode is over: {whose[budget]} of the run's recipe is used up. It is trained on as far as it came.",
        code="context_length_exceeded" if budget == "tokens" else "episode_over",
    )


def _no_server(why: str) -> RefusedError:
    return RefusedError(f"No server answers, and the episode has failed: {why}", status=500, kind="server_error")
