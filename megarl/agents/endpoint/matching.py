"""Whether a conversation that comes goes on where an earlier one ended: message by message, as their senders write them.

What the policy wrote is compared, and never tokenised: its tokens are the transcript's. White space around it is not looked at,
because clients strip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from megarl.agents.endpoint.forms import ChatMessage
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Choice
from megarl.agents.observations import identified
from megarl.core.words import shortened

SHOWN = 80  # characters of a message that an error shows

# Whose message it is, what it says, calls as (id, name, arguments), and which call it answers.
Seen = tuple[str, str, tuple[tuple[str, str, str], ...], str]


@dataclass(frozen=True)
class Continued:
    """chosen: which of the policy's choices the conversation goes on with. new: the messages after it."""

    chosen: int
    new: list[ChatMessage]


def seen(message: ChatMessage) -> Seen:
    """What of a message makes it the same."""
    text = identified(message.content or "")
    calls = []
    for call in message.tool_calls or ():
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        calls.append((str(call.get("id")), str(function.get("name")), _canonical(function.get("arguments"))))
    return message.role, text.strip() if message.role == "assistant" else text, tuple(calls), message.tool_call_id or ""


def seen_choice(choice: Choice) -> Seen:
    """Of what the policy wrote."""
    calls = tuple((call.id, call.name, _canonical(call.arguments)) for call in choice.calls)
    return "assistant", choice.text.strip(), calls, ""


def continued(messages: Sequence[ChatMessage], known: Sequence[Seen], choices: Sequence[Choice]) -> Continued:
    """How messages go on after the known ones and the policy's last turn, of which there are these choices.

    There are none where a request after that turn came to nothing, such as one whose client hung up: then the turn is known.
    Raises RefusedError where they do not go on.
    """
    number, chosen = len(known), 0
    for at, had in enumerate(known):
        if at >= len(messages):
            raise _refused(f"it ends after message {at}, and went on already")
        if (got := seen(messages[at])) != had:
            raise _refused(f"message {at + 1} was {_shown(had)}, and now is {_shown(got)}", at)
    if choices:
        if len(messages) <= number:
            raise _refused(
                f"it was answered already, and has to go on after that answer, which is message {number + 1}"
            )
        answer = seen(messages[number])
        found = [at for at, choice in enumerate(choices) if seen_choice(choice) == answer]
        if not found:
            had = seen_choice(choices[0])
            raise _refused(f"message {number + 1} was {_shown(had)}, and now is {_shown(answer)}", number)
        number, chosen = number + 1, found[0]
    new = list(messages[number:])
    if not new:
        raise _refused("nothing was added to what the model said last")
    if any(message.role == "assistant" for message in new):
        raise _refused("a message of the assistant's was added that the model did not write")
    return Continued(chosen, new)


def _refused(why: str, at: int | None = None) -> RefusedError:
    return RefusedError(
        f"This request does not extend the episode's conversation: {why}. An episode is trained on as one sequence of tokens: "
        "each request has all messages before it, as they were, the model's answer, and new ones. Conversations beside it, "
        "shortened ones and second tries belong into episodes of their own.",
        code="conversation_not_extended",
        param="messages" if at is None else f"messages.{at}",
    )


def _canonical(arguments: object) -> str:
    """JSON in one form; what is none, or nested too deeply to be written, as it is."""
    if not isinstance(arguments, str):
        return str(arguments)
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments


def _shown(message: Seen) -> str:
    role, text, calls, _ = message
    called = f" calling {', '.join(name for _, name, _ in calls)}" if calls else ""
    return f"the {role}'s {shortened(text, SHOWN)!r}{called}"
