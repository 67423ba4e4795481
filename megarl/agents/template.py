"""The chat template by turns: the tokens of the first messages, and those that follow what the policy wrote.

What the policy wrote is never rendered or tokenised again. What follows it is rendered behind a turn that stands in for the
policy's, cut off there, and tokenised alone. What messages spell of special tokens stays text there: whoever tells the policy
something may have it from anybody, and ends no turn with it. Templates that would render earlier turns otherwise than they were
written are found by `rewritten`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megarl.agents.environment import Message
from megarl.agents.observations import shown_text
from megarl.agents.tools import ToolCall
from megarl.core.errors import TemplateRefusalError
from megarl.core.types import TokenArray
from megarl.data.answers import THINKING
from megarl.data.calls import parse_arguments
from megarl.data.chat import Tokenizer, apply_template, encode_behind, special_ids
from megarl.data.spelled import APART, Spelled

# Stands in for what the policy wrote. Templates trim a message, and look for their own marks in it.
STAND_IN = "what-the-policy-wrote"
ASKED: Message = {"role": "user", "content": "Go on."}
SHOWN = 60  # characters of a rendering
QUICK = 2**20  # characters that are tokenised in about a second

# A conversation that a template may rewrite: most leave thinking out of earlier turns, and Mistral's puts what the system says
# before the last question.
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_TALK = ("Name a colour.", "Blue.", "Another one.", "Red.", "The last one.")
_THOUGHTS = "<think>\nThe sky has one.\n</think>\n\n"


class ChatTemplate:
    """A tokenizer's chat template. tools: JSON schemas of functions that the policy may call.

    Raises TemplateRefusalError where the template renders no plain conversation.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._special = special_ids(tokenizer)
        self._spelled = Spelled(tokenizer)
        self._shown: set[str] = set()
        self._ended = self._after(self._text([ASKED, assistant(STAND_IN)], generation_prompt=False))
        end = self._end_of(self._ended)
        # gpt-oss' end an earlier turn as they end the user's, and the last one by a token of its own.
        earlier = self._end_of(self._after(self._text([ASKED, assistant(STAND_IN), ASKED], generation_prompt=False)))
        ends_users = self._end_of(self._text([ASKED], generation_prompt=False).rpartition(ASKED["content"])[2])
        self._ends = [end, *([earlier] if earlier == ends_users else [])] if end else []

    def prompt(self, messages: Sequence[Message]) -> tuple[TokenArray, str]:
        """The first messages up to where the policy's turn begins: ids [P], and their text. Raises TemplateRefusalError."""
        text = self._text(messages, generation_prompt=True)
        return self._spelled.encode(text), text.replace(APART, "")

    def untold(self, names: Sequence[str]) -> str:
        """The first tool that the template does not name to the policy; empty where it names all."""
        text = self._text([ASKED], generation_prompt=True) if names else ""
        return next((name for name in names if name not in text), "")

    def left_out(self, messages: Sequence[Message], text: str) -> str:
        """What the template shows of no message, calls of tools or their results, in words. text: `prompt`'s, of the messages."""
        for what, others in _otherwise(messages):
            if what in self._shown:
                continue
            if self._renders_as(text, others):
                return what
            self._shown.add(what)
        return ""

    def _renders_as(self, text: str, messages: Sequence[Message]) -> bool:
        try:
            return self._text(messages, generation_prompt=True) == text
        except TemplateRefusalError:  # it looks at what is missing
            return False

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages for `prompt`, in which what they spell of special tokens is text."""
        return self._spelled.as_text(messages)

    def exceeds(self, messages: Sequence[Message], most_tokens: int) -> bool:
        """Whether messages are certainly longer, told without tokenising: that of a hundred megabytes would take minutes."""
        size = sum(len(shown_text(message.get("content")).strip()) for message in messages)
        return size > QUICK and size > most_tokens * self._longest

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def following(
        self, messages: Sequence[Message], last: Sequence[int] = (), calls: Sequence[ToolCall] = ()
    ) -> TokenArray:
        """What stands between a turn of the policy and its next: the turn's end, the messages, the next one's beginning.

        last: the policy's last token, if there is one. Where it ended its turn by a special token, that is the turn's end,
        whichever the template has: only what comes after is given. Where the template has none, as GLM-4.5's, the next message's
        mark ends the turn, and is not given again. calls: of tools that it made, for templates that take results of calls alone.
        Raises TemplateRefusalError.
        """
        pieces = self.between(self.as_text(messages), calls).split(APART)
        ids = np.concatenate([self._encode_behind(piece) for piece in pieces])
        # The end is tokenised with the rest, and left out then: what comes after it may be tokenised by what stands before.
        for end in self._ends or [list(last)[-1:]]:
            if self._special.intersection(last) and ids[: len(end)].tolist() == end:
                return ids[len(end) :]
        return ids

    def _end_of(self, text: str) -> list[int]:
        """The special token that a text begins with, or none; some templates, such as Llama 2's, put a space before it."""
        ids = self._encode_behind(text).tolist()
        at = next((at for at, token in enumerate(ids) if token in self._special), None)
        return [] if at is None or self.shown(ids[:at]).strip() else ids[: at + 1]

    def as_written(self, content: str) -> str:
        """What a policy writes, as the template has it, to say `content`: gpt-oss' begins with its channel.

        The content itself where the template opens a turn to be written otherwise than one that was.
        """
        said = self._text([ASKED, assistant(content)], generation_prompt=False)
        opened = self._text([ASKED], generation_prompt=True)
        if not said.startswith(opened):
            return content
        marks, found, _ = said.removeprefix(opened).partition(content)
        return marks + content if found else content

    def rewritten(self) -> str:
        """How the template renders earlier turns otherwise than they were written; empty where it does not.

        Whatever it says of white space around a turn is not looked at.
        """
        found = self._rewritten([])
        try:
            moved = "" if found else self._rewritten([_SYSTEM])
        except TemplateRefusalError:  # it knows no system
            moved = ""
        return f"with a message of the system's, {moved}" if moved else found

    def _rewritten(self, opening: Sequence[Message]) -> str:
        for thoughts in ("", _THOUGHTS):
            talk = [
                assistant(f"{thoughts}{text}") if number % 2 else {"role": "user", "content": text}
                for number, text in enumerate(_TALK)
            ]
            for count in range(1, len(talk) - 1, 2):
                written = self._text([*opening, *talk[:count]], generation_prompt=True) + talk[count]["content"]
                again = self._text([*opening, *talk[: count + 2]], generation_prompt=True)
                if found := difference(written, again):
                    return found
        return ""

    def text_with_marks(self, ids: Sequence[int]) -> str:
        """What the policy wrote with its special tokens, but for the one that ended its turn: what parsers of calls read."""
        kept = ids[:-1] if len(ids) and int(ids[-1]) in self._special else ids
        return self.shown(kept)

    def behind_thinking(self, text: str) -> str:
        """What a turn of the policy's says behind the thinking that it begins with: calls within that are only thought of.

        Thinking without an end stays: as SGLang has it for Qwen's reasoning, a call may have ended it.
        """
        for opens, closes in THINKING:
            if self._opened.endswith(opens) or text.lstrip().startswith(opens):
                _, found, said = text.partition(closes)
                return said if found else text
        return text

    @cached_property
    def _opened(self) -> str:
        """How a turn of the policy's begins: some templates open its thinking."""
        return self._text([ASKED], generation_prompt=True).rstrip()

    def shown(self, ids: Sequence[int] | TokenArray) -> str:
        """What ids stand for, special tokens too."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def between(self, messages: Sequence[Message], calls: Sequence[ToolCall] = ()) -> str:
        """What `following` gives ids of, as text."""
        try:
            return self._after(self._text([ASKED, assistant(STAND_IN), *messages], generation_prompt=True))
        except TemplateRefusalError:
            if not calls:
                raise
        # Results are only rendered behind the calls that they are of: what both renderings have in common is left out.
        before = [ASKED, {"role": "assistant", "content": "", "tool_calls": [_as_message(call) for call in calls]}]
        head = self._text(before, generation_prompt=False)
        whole = self._text([*before, *messages], generation_prompt=True)
        if not whole.startswith(head):
            raise TemplateRefusalError(
                f"the model's chat template renders calls of tools otherwise once there are results: {difference(head, whole)}."
            )
        return self._ended + whole[len(head) :]

    def _after(self, text: str) -> str:
        _, found, after = text.partition(STAND_IN)
        if not found:
            raise TemplateRefusalError(
                f"the model's chat template leaves out what an assistant said: it renders {text[:SHOWN]!r}."
            )
        return after

    def _text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        text = apply_template(self._tokenizer, messages, generation_prompt=generation_prompt, tools=self._tools)
        # No tokenizer takes half a character, such as a tool may give that reads names of files.
        return text.encode("utf-8", "replace").decode()

    def _encode_behind(self, text: str) -> TokenArray:
        """Of text that stands behind what the policy wrote."""
        return encode_behind(self._tokenizer, [(STAND_IN, text)])[0]


def assistant(content: str) -> Message:
    """What an assistant says."""
    return {"role": "assistant", "content": content}


def _otherwise(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Kinds of what messages tell of tools, each with the messages without it."""
    if any(message.get("tool_calls") for message in messages):
        yield "calls of tools", [{key: each[key] for key in each if key != "tool_calls"} for each in messages]
    if any(message["role"] == "tool" and message["content"] for message in messages):
        yield "what tools gave", [each | {"content": STAND_IN} if each["role"] == "tool" else each for each in messages]


def _as_message(call: ToolCall) -> Message:
    """A call as templates have it: arguments as an object."""
    try:
        arguments = parse_arguments(call.arguments)
    except ValueError:  # the tool has said so
        arguments = {}
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


def difference(written: str, again: str) -> str:
    """Where a rendering does not begin as what was written, in words; empty where it does, but for white space."""
    # What both begin with is passed over first: it is nearly all of a long conversation, and characters one by one take long.
    most = min(len(written), len(again))
    same = bisect_left(range(most), True, key=lambda last: written[: last + 1] != again[: last + 1])
    found = (at for at in range(same, len(again)) if not again[at].isspace())
    for at in range(same, len(written)):
        character = written[at]
        if character.isspace():
            continue
        other = next(found, len(again))
        if again[other : other + 1] != character:
            before, had, has = written[max(0, at - 10) : at], written[at : at + SHOWN], again[other : other + SHOWN]
            return f"after {before!r} the policy had written {had!r}, and the template has {has!r}"
    return ""
