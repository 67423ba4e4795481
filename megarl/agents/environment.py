"""What an environment is: three coroutines, and what goes in and out of them. The protocol for people: docs/agents.md.

Not for playing an episode (episode.py), nor for finding the class that a recipe names (loading.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megarl.algorithms.limits import MAX_REWARD
from megarl.core.errors import MegarlError
from megarl.core.words import shortened
from megarl.data.answers import Answer

# A chat message: `role` and `content`, both strings; with images the content is in parts (observations.py).
Message = dict[str, Any]


class EnvironmentFailedError(MegarlError):
    """An environment raised, took too long, or answered nonsense: it costs the episode. `trace`: of what it raised, or empty."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class EnvironmentBrokenError(EnvironmentFailedError):
    """Its process has ended, or one of its tools gave nonsense: no policy is told of that, and it costs the episode."""


@dataclass(frozen=True)
class EpisodeRow:
    """The row that an episode is about.

    id, answer: as of Prompt. messages: of the field data.prompt_key, a string as one message of the user. fields: all others. An
    answer is empty where the row has none. seed: for whatever is random; all episodes of a group have the same, so that they
    play the same game. images: of a model that sees, in the order of their places in the messages, which are `<image>`; files, or
    the bytes of some, as the row has them.
    """

    id: str
    messages: tuple[Message, ...]
    answer: Answer
    fields: Mapping[str, Any]
    seed: int
    images: tuple[Path | bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Response:
    """What the policy wrote in one turn.

    text: without special tokens. token_ids: all that were sampled. turn: its number, from 0, those with calls of tools counted.
    """

    text: str
    token_ids: tuple[int, ...]
    turn: int


@dataclass(frozen=True)
class Turn:
    """The episode goes on: what the policy is told next, and what this turn was worth."""

    messages: Sequence[Message]
    reward: float = 0.0


@dataclass(frozen=True)
class Done:
    """The episode has ended, and what its last turn was worth. metrics: numbers for `agent/by/NAME`, such as {"solved": 1.0}."""

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolResult:
    """What a method that the policy called gives where the call was worth something, or is counted; else its content will do.

    content: what the policy is told: text, an image of PIL, parts of both, or what becomes JSON. reward: of the call; those of a
    turn are added. metrics: as of Done; of several with one name in an episode the last counts.
    """

    content: Any
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Answers the policy in one episode; a new one is made for each, out of the recipe's `agent.settings`.

    Coroutines share one event loop with all other episodes of the process: what blocks has to go elsewhere, such as into the
    processes of `agent.workers`. One that has `timed = True` ends its steps in time by itself: they have no deadline.
    Methods that the policy calls (`agent.environment_tools`) are coroutines, or plain ones in threads; where there are some,
    `reward() -> float | Done`, of either kind, may stand in the place of `step`.
    """

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The first messages; the policy answers the last."""

    async def step(self, response: Response) -> Turn | Done:
        """What the policy's response leads to."""

    async def close(self) -> None:
        """Give back what the episode held. Called once, however it ended, also where `start` failed."""


def check_start(messages: object) -> list[Message]:
    """What `start` gave, if it is messages that a policy can answer. Raises EnvironmentFailedError."""
    found = _messages(messages, "start")
    if found[-1]["role"] == "assistant":
        raise EnvironmentFailedError(
            "start gave messages that end with the assistant's, which is what the policy is to write: end with the user's."
        )
    return found


def check_step(answer: object) -> Turn | Done:
    """What `step` gave, if it is one of the two. Raises EnvironmentFailedError."""
    if not isinstance(answer, Turn | Done):
        raise EnvironmentFailedError(
            f"step gave {_shown(answer)}; wanted is a Turn, with what the policy is told next, or Done."
        )
    if isinstance(answer, Done):
        return check_done(answer, "step")
    _number(answer.reward, "step", "a reward")
    for message in _messages(answer.messages, "step"):
        if message["role"] == "assistant":
            raise EnvironmentFailedError("step gave a message of the assistant's: only the policy writes these.")
    return answer


def check_result(answer: object, who: str) -> ToolResult | Done:
    """What a method that the policy called gave, if it can be that. who: the method. Raises EnvironmentBrokenError."""
    if isinstance(answer, Turn):
        raise EnvironmentBrokenError(
            f"{who} gave a Turn; wanted is what the policy is told, as text or as what becomes JSON, a ToolResult, or Done."
        )
    result = answer if isinstance(answer, ToolResult | Done) else ToolResult(answer)
    try:
        check_done(Done(result.reward, result.metrics), who)
    except EnvironmentFailedError as error:
        raise EnvironmentBrokenError(str(error)) from error
    return result


def check_reward(answer: Any) -> Done:
    """What `reward` gave: a number, or Done. Raises EnvironmentFailedError."""
    return check_done(answer if isinstance(answer, Done) else Done(answer), "reward")


def check_done(done: Done, who: str) -> Done:
    """An end, if its numbers are some: of numpy and torch as well. who: gave it. Raises EnvironmentFailedError."""
    _number(done.reward, who, "a reward")
    if not isinstance(done.metrics, Mapping):
        raise EnvironmentFailedError(
            f"{who} gave {_shown(done.metrics)} as metrics; wanted are numbers by name, such as {{'solved': 1.0}}."
        )
    for name, value in done.metrics.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise EnvironmentFailedError(
                f"{who} gave a metric {name!r}: its name may have letters, digits and `_` only."
            )
        _number(value, who, f"the metric {name}")
    return done


def _messages(found: object, where: Literal["start", "step"]) -> list[Message]:
    wanted = 'wanted is a list of messages like {"role": "user", "content": "..."}'
    if not isinstance(found, list | tuple) or not found:
        raise EnvironmentFailedError(f"{where} gave {_shown(found)}; {wanted}.")
    for number, message in enumerate(found, 1):
        parts = isinstance(message, dict) and isinstance(message.get("content"), list) and bool(message["content"])
        texts = ("role",) if parts else ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in texts):
            raise EnvironmentFailedError(f"{where} gave as message {number} {_shown(message)}; {wanted}.")
    return list(found)


def _number(value: Any, who: str, what: str) -> None:
    try:
        finite = not isinstance(value, str | bytes) and abs(float(value)) <= MAX_REWARD  # nan is not
    except Exception:  # of a tensor with several numbers it is a RuntimeError
        finite = False
    if not finite:
        raise EnvironmentFailedError(
            f"{who} gave {_shown(value)} as {what}; wanted is a finite number, of at most {MAX_REWARD:g}."
        )


def _shown(value: object) -> str:
    return shortened(repr(value), 120)
