"""The model as the endpoint knows it: its name, its chat template for whichever tools, and how its answers are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from megarl.agents.endpoint.forms import ChatMessage
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Choice, Finish
from megarl.agents.environment import EnvironmentFailedError, Message
from megarl.agents.observations import in_parts
from megarl.agents.observer import Observer
from megarl.agents.template import STAND_IN, ChatTemplate
from megarl.agents.tool_use import Parser, named, read_calls
from megarl.agents.tools import ToolCall
from megarl.core.errors import TemplateRefusalError
from megarl.core.types import Image, Prompt, TokenArray
from megarl.data.chat import Tokenizer, encode, encode_behind
from megarl.serving.answers import Generation

MOST_TEMPLATES = 64  # sets of tools that are remembered
# Whoever asks places its own images, and none of the row's stand anywhere.
NO_ROW = Prompt("", np.zeros(0, np.int32), "", "")


class Model:
    """name: that requests have to give. parser: of calls of tools; without one, requests with tools are refused.

    observer: how the model sees messages.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, parser: Parser | None, observer: Observer | None = None
    ) -> None:
        self.name = name
        self.observer = observer or Observer()
        self._tokenizer, self._parser = tokenizer, parser
        self._templates: dict[bytes, ChatTemplate] = {}

    def check_name(self, name: str) -> None:
        """Raises RefusedError for another model's name."""
        if name != self.name:
            raise RefusedError(
                f"The model {name!r} is not served here: it is called {self.name!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    def template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """The chat template that tells of these tools. Raises RefusedError."""
        tools = tools or ()
        if tools and self._parser is None:
            raise RefusedError(
                "Tools are not supported here: nobody was told how this model writes calls. Set agent.tool_parser in the "
                "recipe, or give megarl serve --tool-parser.",
                code="unsupported_parameter",
                param="tools",
            )
        try:
            key = orjson.dumps(tools)
        except orjson.JSONEncodeError as error:  # JSON may be read that is nested too deeply to be written
            raise RefusedError(f"tools: they cannot be written as JSON: {error}.", param="tools") from error
        if key not in self._templates:
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.clear()
            try:
                template = ChatTemplate(self._tokenizer, [dict(tool) for tool in tools])
                if untold := template.untold([tool["function"]["name"] for tool in tools]):
                    raise RefusedError(
                        f"The model's chat template tells it nothing of the tool {untold!r}. Leave tools out of the request, or "
                        "take a model whose template knows them.",
                        code="unsupported_parameter",
                        param="tools",
                    )
            except TemplateRefusalError as error:
                raise RefusedError(f"{error}", param="messages") from error
            self._templates[key] = template
        return self._templates[key]

    def prompt(
        self, template: ChatTemplate, messages: Sequence[ChatMessage]
    ) -> tuple[TokenArray, str, tuple[Image, ...]]:
        """A conversation from its beginning up to where the policy's turn begins: ids, text, images. Raises RefusedError."""
        if messages[-1].role == "assistant":
            raise RefusedError(
                "The last message is the assistant's, and that is what the model is to write: end with another one.",
                param="messages",
            )
        reasons = []
        for told in _forms(messages):
            self._check_seen(told)
            try:
                observed = self.observer.first(told, NO_ROW, "messages")
                ids, text = template.prompt(observed.messages)
                left_out = template.left_out(observed.messages, text)
                images = tuple(observed.sized(NO_ROW))
                ids = self.observer.expanded(ids, images, "messages")
            except TemplateRefusalError as error:
                reasons.append(str(error))
                continue
            except EnvironmentFailedError as error:  # of images
                raise RefusedError(str(error), param="messages") from error
            if not left_out:
                return ids, text, images
            reasons.append(
                f"The model's chat template leaves out {left_out}. Leave them out of the messages, or take a model whose "
                "template shows them."
            )
        raise RefusedError(reasons[0], param="messages")

    def following(
        self, template: ChatTemplate, told: Sequence[Message], last: Sequence[int], calls: Sequence[ToolCall]
    ) -> tuple[TokenArray, tuple[Image, ...]]:
        """What stands between two turns, with its images, as of `ChatTemplate.following`. Raises RefusedError."""
        self._check_seen(told)
        try:
            observed = self.observer.later(told, "messages")
            images = tuple(observed.sized(NO_ROW))
            ids = template.following(observed.messages, last, calls)
            return self.observer.expanded(ids, images, "messages"), images
        except (TemplateRefusalError, EnvironmentFailedError) as error:
            raise RefusedError(str(error), param="messages") from error

    def _check_seen(self, told: Sequence[Message]) -> None:
        """Raises RefusedError for images where none are seen."""
        if self.observer.blind and in_parts(told):
            raise RefusedError(f"There is an image in the messages, and {self.observer.blind}.", param="messages")

    def check_without_places(self, token_ids: TokenArray) -> None:
        """Raises RefusedError for a place of an image in a prompt that brings none: the model would see nothing there."""
        if (token := self.observer.first_place(token_ids)) is not None:
            raise RefusedError(
                f"The prompt has the token {token}, which stands for an image or a video, and completions carry none. Leave it "
                "out, or send images by /chat/completions.",
                param="prompt",
            )

    def first_ids(self, prompt: str | list[int]) -> TokenArray:
        """A first prompt without template: a text, or token ids. Raises RefusedError for ids that the model does not have."""
        if isinstance(prompt, str):
            return self.encode(prompt, first=True)
        self.check_ids(prompt)
        return np.array(prompt, np.int32)

    def encode(self, text: str, *, first: bool) -> TokenArray:
        """A text without template. first: it is the beginning, where the tokenizer may put tokens and a blank of its own."""
        if first:
            return encode(self._tokenizer, [text], special_tokens=True)[0]
        return encode_behind(self._tokenizer, [(STAND_IN, text)])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """What ids stand for, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises RefusedError for ids that the model does not have."""
        most = len(self._tokenizer)
        if wrong := [token for token in ids if not 0 <= token < most]:
            raise RefusedError(f"prompt: {wrong[0]} is no token: they are 0 to {most - 1}.", param="prompt")

    async def choice(
        self,
        generation: Generation,
        *,
        logprobs: bool,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        turn: int = 0,
    ) -> Choice:
        """What the policy wrote, as it is told. template, tools: where calls are to be read. turn: its number, from 1.

        Raises RequestFailedError where no server reads calls.
        """
        finish: Finish = "stop" if generation.finish == "stop" else "length"
        tokens = tuple(self._tokenizer.decode([token]) for token in generation.token_ids.tolist()) if logprobs else None
        choice = Choice(generation, generation.text, finish, tokens=tokens)
        if not tools or template is None or self._parser is None:
            return choice
        text = template.text_with_marks(generation.token_ids.tolist())
        said = template.behind_thinking(text)
        parsed = await read_calls(self._parser, said, tools)
        if parsed.unread:
            return replace(choice, text=text)  # what nobody can read is shown as it was written
        if not parsed.calls:
            return choice
        whole: Finish = "tool_calls" if finish == "stop" else "length"
        beside = text[: len(text) - len(said)] + parsed.text
        return replace(choice, text=beside, calls=named(parsed, turn, said), finish=whole)

    async def close(self) -> None:
        """Close the parser's connections."""
        if self._parser is not None:
            await self._parser.close()


def _forms(messages: Sequence[ChatMessage]) -> Iterator[list[Message]]:
    """Messages as templates want them: most calls as objects; DeepSeek's as they came, and beside null for no text."""
    told = [as_told(message) for message in messages]
    yield told
    if any(message.tool_calls for message in messages):
        came = [{"content": message.content or None, "tool_calls": message.tool_calls} for message in messages]
        yield [one | calls if calls["tool_calls"] else one for one, calls in zip(told, came, strict=True)]


def as_told(message: ChatMessage) -> Message:
    """A message as templates have it: what is not given is left out, and arguments of calls are objects."""
    told: Message = {name: value for name, value in message.model_dump().items() if value is not None}
    told.setdefault("content", "")
    if calls := told.get("tool_calls"):
        told["tool_calls"] = [_as_object(call) for call in calls]
    return told


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = {}  # as of calls of the policy itself: the tool has said so
    return {**call, "function": {**function, "arguments": arguments}}
