"""Whether a chat template shows what messages say: templates leave out what they do not know, without a word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.data.chat import CALLS, Message
from megarl.data.rows import Row

# What reasoning stands under in a message, by its writer; and what ends it within the content: of Qwen, DeepSeek, GLM and
# others; of Mistral.
REASONING = ("reasoning_content", "reasoning", "thinking")
CLOSES = ("</think>", "[/THINK]")
INSTEAD = "something-else"  # is shown where a text would be
LONG = 16  # characters that stand nowhere by chance
Shown = Callable[[Sequence[Message]], str]


class Hearing:
    """Asks of the rows of a file. Of short texts, which may stand elsewhere too, one of each kind is asked for."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str, bool]] = set()
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
            for what, said, otherwise in _said(message) if is_learned or role != "assistant" else ():
                kind = before, role, what, is_learned
                if kind in self._known or (len(said) >= LONG and said in text):
                    continue
                other = [*messages[:index], otherwise, *messages[index + 1 :]]
                if _renders_as(text, other, shown):
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


def _said(message: Message) -> Iterator[tuple[str, str, Message]]:
    """What a message says: what to call it, its text, and the message with another text in its place."""
    content = message["content"]
    closes = next((each for each in CLOSES if each in content), "")
    thoughts, _, answer = content.rpartition(closes) if closes else ("", "", content)
    opens = closes.replace("/", "")
    if thoughts := thoughts.strip().removeprefix(opens).strip():
        yield f"what stands before {closes}", thoughts, message | {"content": f"{opens}{INSTEAD}{closes}{answer}"}
    if answer.strip():
        yield "its content", answer.strip(), message | {"content": content.removesuffix(answer) + INSTEAD}
    for key in REASONING:
        if isinstance(said := message.get(key), str) and said.strip():
            yield f"its {key}", said.strip(), message | {key: INSTEAD}
    for number, call in enumerate(message.get(CALLS, ())):
        calls = [*message[CALLS]]
        calls[number] = _another(call)
        yield "a call of a tool", str(call.get("function", call).get("name")), message | {CALLS: calls}


def _another(call: dict[str, Any]) -> dict[str, Any]:
    """Kimi-K2's template shows a call's id, with the name in it, in the place of the name."""
    function = {**call.get("function", call), "name": INSTEAD, "arguments": {INSTEAD: INSTEAD}}
    return call | {"id": INSTEAD, "function": function} if "function" in call else function | {"id": INSTEAD}


def _short(said: str, most: int = 60) -> str:
    return repr(said if len(said) <= most else f"{said[:most]}...")
