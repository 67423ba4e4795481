"""Whether a chat template shows what messages say: templates leave out what they do not know, without a word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.core.words import shortened
from megarl.data.answers import THINKING
from megarl.data.calls import CALLS
from megarl.data.chat import Message
from megarl.data.image_places import PLACE
from megarl.data.rows import Row

# What reasoning stands under in a message, by its writer; and what ends it within the content.
REASONING = ("reasoning_content", "reasoning", "thinking")
CLOSES = tuple(ends for _, ends in THINKING)
SHOWN = 60  # characters of what a message says
INSTEAD = "something-else"  # is said in the place of a part, or beside it
Shown = Callable[[Sequence[Message]], str]
Part = tuple[str, object, Message]  # what to call it, what is said, and the message that says something else


class Hearing:
    """Asks of the rows of a file, by what each part of a message changes in the rendering: of parts of a kind, once."""

    def __init__(self) -> None:
        self._known: set[tuple[object, ...]] = set()
        self._shows_tools = False

    def check(
        self, text: str, messages: Sequence[Message], shown: Shown, row: Row, *, learned: Collection[int] = ()
    ) -> None:
        """Raise UserError for a message of which the template leaves out a part.

        text: the messages as the template has them. shown: renders others; may raise UserError. learned: indices of the
        assistant's messages that are trained on; of its other ones a template may leave out what it likes, as Qwen3's does with
        earlier reasoning.
        """
        before = ""
        for index, message in enumerate(messages):
            role, is_learned = message["role"], index in learned
            # What a template may look at before it shows a part.
            marks = (mark in message["content"] for mark in (*CLOSES, PLACE))
            form = *sorted(message), len(message.get(CALLS, ())), *marks
            for what, said, otherwise in _parts(message) if is_learned or role != "assistant" else ():
                kind = before, role, is_learned, index + 1 == len(messages), what, *form
                if kind in self._known:
                    continue
                if _renders_as(text, [*messages[:index], otherwise, *messages[index + 1 :]], shown):
                    raise UserError(
                        f"{row.where}, message {index + 1} ({role}): the model's chat template leaves out {what}, "
                        f"{_short(said)}. Say it where the template shows it, leave it out of the row, or mend the template in "
                        "the model's folder."
                    )
                self._known.add(kind)
            before = role

    def check_tools(self, text: str, without: Callable[[], str], row: Row) -> None:
        """Raise UserError where the template leaves out the tools that a row offers. without: renders it without them."""
        if not self._shows_tools and without() == text:
            raise UserError(
                f"{row.where}: the model's chat template leaves out the tools that the row offers. Leave them out of the row, or "
                "take a model whose template shows tools."
            )
        self._shows_tools = True


def _renders_as(text: str, messages: Sequence[Message], shown: Shown) -> bool:
    try:
        return shown(messages) == text
    except UserError:  # the template looks at what is said
        return False


def _parts(message: Message) -> Iterator[Part]:
    yield from _in_content(message)
    heard: list[object] = []
    for key in REASONING:
        thoughts = message.get(key)
        if (thoughts.strip() if isinstance(thoughts, str) else thoughts) and thoughts not in heard:
            yield f"its {key}", thoughts, {name: value for name, value in message.items() if name != key}
            heard.append(thoughts)  # the same under another key is for another template
    for number, call in enumerate(message.get(CALLS, ())):
        calls = [*message[CALLS]]
        calls[number] = _another(call)
        what = "a call of a tool" if number == 0 else f"call {number + 1} of a tool"
        yield what, call.get("function", call).get("name"), message | {CALLS: calls}


def _in_content(message: Message) -> Iterator[Part]:
    """The content: what it begins with, thoughts and answer, each with more said at its end, or at its beginning."""
    content = message["content"]
    closes = next((each for each in CLOSES if each in content), "")
    opens = closes.replace("/", "")
    before, _, answer = content.rpartition(closes) if closes else ("", "", content)
    if closes and opens in before and (first := before.partition(opens)[0].strip()):
        yield f"what stands before {opens}", first, message | {"content": INSTEAD + content}
    if thoughts := before.strip().removeprefix(opens).strip():
        more = f"{before.rstrip()} {INSTEAD}{closes}{answer}"
        yield f"what stands before {closes}", thoughts, message | {"content": more}
    if answer.strip():
        yield "its content", answer.strip(), message | {"content": f"{content.rstrip()} {INSTEAD}"}


def _another(call: dict[str, Any]) -> dict[str, Any]:
    """Kimi-K2's template shows a call's id, with the name in it, in the place of the name."""
    function = {**call.get("function", call), "name": INSTEAD, "arguments": {INSTEAD: INSTEAD}}
    return call | {"id": INSTEAD, "function": function} if "function" in call else function | {"id": INSTEAD}


def _short(said: object) -> str:
    return repr(shortened(said if isinstance(said, str) else repr(said), SHOWN))
