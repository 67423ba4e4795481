"""Calls of tools in chat messages: their arguments as an object, and as the text that some chat templates want.

Not for calls that a policy writes (agents/), nor for the rest of a message (chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from megarl.core.errors import UserError
from megarl.data.rows import json_type

CALLS = "tool_calls"  # of a message


def parsed_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls with arguments as an object: OpenAI's API has a JSON string. where: the message. Raises UserError."""
    want = 'wanted is a list like [{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
    if not isinstance(calls, list):
        raise UserError(f"{where}: {CALLS!r} is {json_type(calls)}; {want}.")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict):
            raise UserError(f"{where}: {CALLS!r} has {json_type(function)}; {want}.")
        if isinstance(text := function.get("arguments"), str):
            try:
                arguments = parse_arguments(text)
            except ValueError as error:
                raise UserError(f"{where}: the arguments of a call are no JSON object ({error}); {want}.") from error
            function = {**function, "arguments": arguments}
        parsed.append({**call, "function": function} if "function" in call else function)
    return parsed


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call of a tool, as OpenAI's API writes them; an empty text is none. Raises ValueError."""
    arguments = from_json(text or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"they are {json_type(arguments)}")
    return arguments


def with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, arguments of calls as JSON, in which transformers' `tojson` would write them too."""
    return [
        {**each, CALLS: [_as_text(call) for call in each[CALLS]]} if each.get(CALLS) else {**each} for each in messages
    ]


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _as_text(function)}
    if isinstance(arguments := call.get("arguments"), dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call
