"""What rows demonstrate, as text: whole chats, or prompts with responses, and the images in them.

Not for tokens, nor for which of them are trained on (sft.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.core.errors import UserError
from megarl.core.types import Image
from megarl.data.calls import CALLS
from megarl.data.chat import ROW_KWARGS, Message, check_messages, row_tools
from megarl.data.image_places import PLACE, as_text, placed
from megarl.data.images import Sight, identity, row_images
from megarl.data.rows import Row, field_of, json_type
from megarl.recipe.supervised import RowData, SftData


@dataclass(frozen=True)
class Exchange:
    """What a row demonstrates: a prompt and its response; or, without one, a chat that ends with the assistant.

    response: the assistant's whole message, with its reasoning and its calls of tools where it has some.
    """

    row: Row
    prompt: str | list[Message]
    response: Message | None
    tools: list[dict[str, Any]]  # JSON schemas of functions that the assistant may call
    images: tuple[Image, ...] = ()  # of which each has its place in the prompt, in their order

    @property
    def texts(self) -> dict[str, Any]:
        """What digests are made of."""
        given = self.row.fields.get(ROW_KWARGS)
        beside = (*([given] if given else ()), *map(identity, self.images))
        return {"ids": self.row.id, "texts": [self.prompt, self.response, self.tools, *beside]}


def parse_demonstration(row: Row, data: SftData, sight: Sight | None = None, *, parts: bool = False) -> Exchange:
    """The row's chat, or its prompt and response, with its images. Raises UserError naming file, line and field.

    sight: how the model sees images; without, none is looked at. parts: messages may have places of images all the same.
    """
    keys = [data.messages_key] if row.has(data.messages_key) else [data.prompt_key, data.response_key]
    [found] = with_images([_parse(with_text(row, keys, data, sight, parts=parts), data)], data, sight)
    return found


def with_text(row: Row, keys: Sequence[str], data: RowData, sight: Sight | None, *, parts: bool) -> Row:
    """The row, whose messages in these fields have text for content in parts.

    Only where images are looked at, or `parts` says that there may be places of them all the same. Raises UserError.
    """
    if not parts and (sight is None or data.images_key is None):
        return row
    messages = {key: value for key in keys if isinstance(value := field_of(row.fields, key), list)}
    texts = {key: as_text(value, f"{row.where}, field {key!r}") for key, value in messages.items()}
    return replace(row, fields=row.fields | texts)


def with_images(exchanges: Sequence[Exchange], data: RowData, sight: Sight | None) -> list[Exchange]:
    """Exchanges of one row, which has one prompt, with its images in their places; all share the same images.

    sight: see `parse_demonstration`. Raises UserError naming file, line and field.
    """
    if sight is None or data.images_key is None:
        return list(exchanges)
    for each in exchanges:
        _check_unwritten(each)
    row, prompt = exchanges[0].row, exchanges[0].prompt
    images = row_images(row, data.images_key, sight)
    prompt = placed(prompt, len(images), row, data.images_key)
    return [replace(each, prompt=prompt, images=images) for each in exchanges]


def _check_unwritten(found: Exchange) -> None:
    """Raises UserError where the assistant writes an image."""
    said = [found.response] if found.response is not None else []
    for message in [*(found.prompt if isinstance(found.prompt, list) else ()), *said]:
        if message["role"] == "assistant" and PLACE in message["content"]:
            raise UserError(
                f"{found.row.where}: the assistant's text has a place of an image ({PLACE}), and a model writes none. Leave it "
                "out; images stand in the user's messages. With data.images_key null no image is read, and the places are text."
            )


def _parse(row: Row, data: SftData) -> Exchange:
    if row.has(data.messages_key):
        chat = parse_chat(row, data.messages_key)
        for number, message in enumerate(chat[1:], 2):
            if message["role"] == "assistant" and _is_empty(message):
                raise UserError(
                    f"{row.where}, field {data.messages_key!r}, message {number}: the assistant says nothing, and each of its "
                    "messages is learned. Fill it, or leave it out with what it answers."
                )
        return Exchange(row, chat, None, row_tools(row))
    if not row.has(data.prompt_key):
        raise row.missing(data.prompt_key, f"data.prompt_key; nor is there a chat under {data.messages_key!r}")
    prompt = parse_prompt(row, data.prompt_key)
    response = parse_answer(
        row,
        data.response_key,
        "the response, data.response_key",
        "stands whole in one field: name it in data.messages_key",
    )
    return Exchange(row, prompt, response, row_tools(row))


def parse_chat(row: Row, key: str) -> list[Message]:
    """A field with a chat of two messages or more, the last the assistant's. Raises UserError naming the place."""
    messages = check_messages(row.get(key, "the chat"), row, key)
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{row.where}, field {key!r}: the last message is the {messages[-1]['role']}'s. "
            "A demonstration ends with the assistant's message."
        )
    if len(messages) == 1:
        raise UserError(f"{row.where}, field {key!r}: the assistant's message stands alone. Put the user's before it.")
    _check_filled(messages[-1], row, key)
    return messages


def parse_prompt(row: Row, key: str) -> str | list[Message]:
    """A field with a prompt: text, or chat messages. Raises UserError naming the place."""
    prompt = row.get(key, "data.prompt_key")
    if isinstance(prompt, list):
        return check_messages(prompt, row, key)
    if not isinstance(prompt, str):
        raise UserError(
            f"{row.where}, field {key!r}: the prompt is {json_type(prompt)}; "
            "wanted is a string or a list of chat messages."
        )
    if not prompt.strip():
        raise UserError(f"{row.where}, field {key!r}: the prompt is empty. Fill it, or leave the row out.")
    return prompt


def parse_answer(row: Row, key: str, purpose: str, longer: str) -> Message:
    """A field with the assistant's text, or with one message of the assistant's (as TRL's conversational rows have it).

    purpose: which recipe key asks. longer: what is said of a longer chat. Raises UserError naming the place.
    """
    value = row.get(key, purpose)
    if isinstance(value, list):
        answer = _only_answer(value, row, key, longer)
    elif isinstance(value, str):
        answer = {"role": "assistant", "content": value}
    else:
        raise UserError(f"{row.where}, field {key!r}: the response is {json_type(value)}; wanted is some text.")
    _check_filled(answer, row, key)
    return answer


def parse_exchange(row: Row, key: str, prompt_key: str, purpose: str) -> Exchange:
    """One answer as prompt and response: a whole chat under its key, or what follows on the row's prompt.

    A prompt beside a whole chat is what that begins with. purpose: as of `parse_answer`. Raises UserError naming the place.
    """
    value = row.get(key, purpose)
    if isinstance(value, list) and not (len(value) == 1 and row.has(prompt_key)):
        *prompt, last = parse_chat(row, key)
        if row.has(prompt_key):
            _check_begins(prompt, row, key, prompt_key)
        return Exchange(row, prompt, last, row_tools(row))
    answer = parse_answer(row, key, purpose, "stands whole there, its prompt in it")
    return Exchange(row, parse_prompt(row, prompt_key), answer, row_tools(row))


def _check_begins(before: list[Message], row: Row, key: str, prompt_key: str) -> None:
    """Whether a whole chat begins with the row's prompt. before: its messages without the last."""
    prompt = row.get(prompt_key, "data.prompt_key")
    if isinstance(prompt, list):
        asked = check_messages(prompt, row, prompt_key)
        begins = asked in (before[: len(asked)], before[-len(asked) :])
    else:  # the user's text, which a chat has among its messages
        begins = before[0]["role"] in ("system", "user")
    if not begins:
        raise UserError(
            f"{row.where}, field {key!r}: the chat does not begin with the row's prompt, field {prompt_key!r}. Several messages "
            "are a whole chat, whose last one is the answer: put the prompt in front of them, or leave it out of the row."
        )


def _check_filled(answer: Message, row: Row, key: str) -> None:
    if _is_empty(answer):
        raise UserError(f"{row.where}, field {key!r}: the response is empty; wanted is some text.")


def _is_empty(answer: Message) -> bool:
    return not answer["content"].strip() and CALLS not in answer


def _only_answer(value: list[Any], row: Row, key: str, longer: str) -> Message:
    messages = check_messages(value, row, key)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"{row.where}, field {key!r}: messages of {roles}; wanted is some text, or one message of the assistant's. A "
            f"longer chat {longer}."
        )
    return messages[0]
