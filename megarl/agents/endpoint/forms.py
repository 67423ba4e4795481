"""What the endpoint can be asked, as OpenAI's API writes it; whatever would not be honoured is refused by name.

Not for what becomes of a request (session.py, free.py), nor for what is answered (replies.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.observations import IMAGE_URL, is_shown, sendable_parts
from megarl.algorithms.limits import MAX_REWARD
from megarl.core.words import did_you_mean

MOST_CHOICES = 64
MOST_STOPS = 16

# What changes nothing that is generated, and has no effect here.
NO_EFFECT = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
# Known to OpenAI, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}

# What may be of several kinds: pydantic names one of them, which need not be the one that was meant.
WANTED: Mapping[str, str] = {
    "prompt": "one text, or the token ids of one, which are whole numbers from 0; several prompts are several requests",
    "stop": f"a text, or a list of up to {MOST_STOPS}, each of at least 1 character",
}

# An empty one would end every choice at once.
Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Form):
    """include_usage: whether the last chunk says how many tokens there were."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(_Form):
    """What both kinds of request have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stop | Stops | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a choice."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def count(self) -> int:
        """How many choices are wanted."""
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        """Of a choice."""
        return self.max_tokens


class ChatMessage(BaseModel):
    """A message of the conversation; what templates may know beyond these fields is kept."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        """Parts of text are one text; those with images are as `sendable_parts` has them."""
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == IMAGE_URL:
                given = part.get(IMAGE_URL)
                url = given.get("url") if isinstance(given, dict) else given
                if not isinstance(url, str) or not url.startswith("data:"):
                    raise ValueError(
                        "an image that is no data URL: wanted is data:image/png;base64,..., and none is fetched"
                    )
                parts += sendable_parts([{"type": IMAGE_URL, IMAGE_URL: url}])
                continue
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                raise ValueError(f"a part of type {kind!r}: the model reads text and images alone")
            parts.append({"type": "text", "text": part[kind]})
        return parts if is_shown(parts) else "".join(part["text"] for part in parts)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Others no server's parser takes, and calls of them would be read as text."""
        for number, tool in enumerate(tools or (), 1):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(
                    f'tool {number} is no function with a name: wanted is {{"type": "function", "function": {{"name": "...", '
                    '"parameters": {...}}}'
                )
            for key, kind, wanted in (("description", str, "a text"), ("parameters", dict, "a JSON schema, an object")):
                if not isinstance(function.get(key), kind | None):
                    raise ValueError(
                        f"tool {number} ({function['name']}): its {key} is {function[key]!r}; wanted is {wanted}"
                    )
        return tools

    @property
    def most_tokens(self) -> int | None:
        """Of a choice, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether those of what was sampled are wanted."""
        return bool(self.logprobs)


class CompletionRequest(_Request):
    """POST /v1/completions. prompt: a text, or token ids. logprobs: 0 and 1 both give those of what was sampled, alone."""

    prompt: (
        str | list[Annotated[int, Field(strict=True, ge=0)]] | Annotated[list[str], Field(max_length=1, min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def text_or_ids(self) -> str | list[int]:
        """The one prompt."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            return prompt[0]
        return prompt  # type: ignore[return-value]

    @property
    def wants_logprobs(self) -> bool:
        """Whether those of what was sampled are wanted."""
        return self.logprobs is not None


class RewardReport(_Form):
    """POST /v1/episode/reward: what the last turn was worth, and numbers for `agent/by/NAME`."""

    reward: Reward
    metrics: dict[str, Reward] = {}

    @field_validator("metrics")
    @classmethod
    def _names(cls, metrics: dict[str, float]) -> dict[str, float]:
        for name in metrics:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"the metric {name!r}: its name may have letters, digits and `_` only")
        return metrics


R = TypeVar("R", bound=BaseModel)


def read(form: type[R], told: Any) -> R:
    """A request's body as a form. told: what its JSON says. Raises RefusedError."""
    if not isinstance(told, dict):
        raise RefusedError(f"The body is {type(told).__name__}; wanted is a JSON object.")
    kept = {}
    for name, value in told.items():
        if name not in form.model_fields and issubclass(form, _Request):
            if name in NO_EFFECT or value is None:
                continue
            if name in NEUTRAL:
                _check_neutral(name, value)
                continue
        kept[name] = value
    try:
        return form.model_validate(kept)
    except ValidationError as error:
        raise _refusal(form, error) from error


def _check_neutral(name: str, value: Any) -> None:
    if value in NEUTRAL[name]:
        return
    only = " or ".join(str(each) for each in NEUTRAL[name])
    raise RefusedError(
        f"{name} is not supported here" + (f", other than {only}." if only else ".") + " Leave it out of the request.",
        code="unsupported_parameter",
        param=name,
    )


def _refusal(form: type[BaseModel], error: ValidationError) -> RefusedError:
    """The first thing that is wrong."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    # Of a union, pydantic names the kind that it tried last.
    known = [part for part in place if not re.search(r"[\[\]()]|^(constrained-)?(str|int|float|list|bool)$", part)]
    param = ".".join(known)
    if first["type"] == "extra_forbidden":
        names: Sequence[str] = [*form.model_fields, *NO_EFFECT]
        hint = did_you_mean(place[-1], names)
        return RefusedError(
            f"Unknown parameter: {param}.{hint} What is not honoured is refused: leave it out.",
            code="unknown_parameter",
            param=param,
        )
    if place[0] in WANTED and first["type"] != "missing":
        return RefusedError(f"{place[0]}: wanted is {WANTED[place[0]]}.", code="invalid_value", param=place[0])
    missing = first["type"] == "missing"
    message = f"Missing parameter: {param}." if missing else f"{param}: {first['msg'].removeprefix('Value error, ')}."
    return RefusedError(message, code="missing_required_parameter" if missing else "invalid_value", param=param)
