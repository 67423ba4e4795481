"""What the endpoint answers, as OpenAI's API writes it: whole, or as events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.agents.tools import ToolCall
from megarl.serving.answers import Generation

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Choice:
    """One answer of the policy. text: without the calls of tools in it. tokens: as texts, where log-probs are wanted."""

    generation: Generation
    text: str
    finish: Finish
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[str, ...] | None = None

    def chat_logprobs(self) -> dict[str, Any] | None:
        """Of a chat: token by token."""
        if self.tokens is None:
            return None
        pairs = zip(self.tokens, self.generation.logprobs.tolist(), strict=True)
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": _bytes(token), "top_logprobs": []}
                for token, logprob in pairs
            ],
            "refusal": None,
        }

    def text_logprobs(self) -> dict[str, Any] | None:
        """Of a completion: in columns."""
        if self.tokens is None:
            return None
        offsets = [0]
        for token in self.tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": list(self.tokens),
            "token_logprobs": self.generation.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }


@dataclass(frozen=True)
class Answered:
    """What came of a request. prompt_tokens: that it was asked with."""

    choices: Sequence[Choice]
    prompt_tokens: int

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        written = sum(len(choice.generation.token_ids) for choice in self.choices)
        cached = max(choice.generation.cached_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Reply:
    """An answer in one of the two forms. chat: of a chat, or of a completion."""

    def __init__(self, model: str, answered: Answered, *, chat: bool) -> None:
        self._answered, self._chat = answered, chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._about = {"id": self._id, "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """In one piece."""
        choices = [self._choice(number, choice) for number, choice in enumerate(self._answered.choices)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices, "usage": self._answered.usage()}

    def chunks(self, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """As the events of a stream: of each choice its text, its calls, and how it ended; then how many tokens there were."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        about = {**self._about, "object": kind}
        for number, choice in enumerate(self._answered.choices):
            for part in self._parts(choice):
                yield {**about, "choices": [{"index": number, **part}]}
        if with_usage:
            yield {**about, "choices": [], "usage": self._answered.usage()}

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        if not self._chat:
            return {
                "index": number,
                "text": choice.text,
                "finish_reason": choice.finish,
                "logprobs": choice.text_logprobs(),
            }
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        if choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {
            "index": number,
            "message": message,
            "finish_reason": choice.finish,
            "logprobs": choice.chat_logprobs(),
        }

    def _parts(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if not self._chat:
            yield {"text": choice.text, "finish_reason": None, "logprobs": choice.text_logprobs()}
            yield {"text": "", "finish_reason": choice.finish, "logprobs": None}
            return
        first = {"role": "assistant", "content": choice.text}
        yield {"delta": first, "finish_reason": None, "logprobs": choice.chat_logprobs()}
        for number, call in enumerate(choice.calls):
            yield {"delta": {"tool_calls": [{"index": number, **_call(call)}]}, "finish_reason": None, "logprobs": None}
        yield {"delta": {}, "finish_reason": choice.finish, "logprobs": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _bytes(token: str) -> list[int] | None:
    """Nothing where the token is a part of a character."""
    return None if "�" in token else list(token.encode())
