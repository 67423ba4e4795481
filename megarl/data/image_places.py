"""Where images stand: in a prompt's text, in what the chat template makes of it, and in token ids.

In a text the place of an image is `<image>`; in token ids it is as many image tokens as the image has squares, between a start
and an end. Not for images themselves (images.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.core.errors import UserError
from megarl.core.types import Image, IntArray, TokenArray
from megarl.data.chat import Message, Tokenizer
from megarl.data.images import Sight
from megarl.data.rows import Row, json_type

PLACE = "<image>"
_OWN = ("image", "path", "url", "base64", "bytes", "image_url")  # where other systems' parts have an image itself
_WANTED = 'wanted are parts like {"type": "text", "text": "..."} and {"type": "image"}'


def as_text(prompt: object, where: str) -> object:
    """Messages whose content is in parts, with it as text that has `<image>` in the place of each image; all else as it is.

    where: the field, for errors. Raises UserError for a part that is neither text nor an image.
    """
    if not isinstance(prompt, list):
        return prompt
    return [
        {**message, "content": _joined(message["content"], f"{where}, message {number}")}
        if isinstance(message, dict) and isinstance(message.get("content"), list) and message["content"]
        else message
        for number, message in enumerate(prompt, 1)
    ]


def _joined(parts: Sequence[object], where: str) -> str:
    texts = []
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and isinstance(part, Mapping):
            if own := next((key for key in _OWN if part.get(key)), None):
                raise UserError(
                    f"{where}, part {number} of its content: it has its image in {own!r}. Images are read of the row's "
                    'field that data.images_key names: list it there, and leave the part as {"type": "image"}.'
                )
            texts.append(PLACE)
        elif kind == "text" and isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            found = f"of type {kind!r}" if isinstance(part, Mapping) else json_type(part)
            raise UserError(f"{where}, part {number} of its content: it is {found}; {_WANTED}.")
    return "".join(texts)


def num_places(prompt: str | Sequence[Message]) -> int:
    """Of images, in a prompt's text or its messages'."""
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return sum(content.count(PLACE) for content in contents)


def placed(prompt: str | list[Message], num_images: int, row: Row, key: str) -> str | list[Message]:
    """The prompt with a place for each of the row's images: where it has none, before the text of the user's first message.

    key: the recipe's key of images. Raises UserError where there are more or fewer places than images.
    """
    if (count := num_places(prompt)) == num_images:
        return prompt
    if count:
        raise UserError(
            f"{row.where}: the prompt has {count} places of images ({PLACE}), and the row {num_images} images in its field "
            f"{key!r} (data.images_key). Give it as many as there are places, or none of these: images then stand before the "
            "text. With data.images_key null no image is read, and the places are text."
        )
    places = PLACE * num_images
    if isinstance(prompt, str):
        return places + prompt
    first = next((at for at, message in enumerate(prompt) if message["role"] == "user"), len(prompt) - 1)
    message = {**prompt[first], "content": places + prompt[first]["content"]}
    return [*prompt[:first], message, *prompt[first + 1 :]]


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages as a chat template has them: content with places in parts, of which an image is `{"type": "image"}`."""
    return [
        {**message, "content": _parts(message["content"])} if PLACE in message["content"] else message
        for message in messages
    ]


def _parts(content: str) -> list[dict[str, Any]]:
    first, *others = content.split(PLACE)
    texts = [first, *(part for text in others for part in (None, text))]
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts if text != ""]


def spellings(tokenizer: Tokenizer, sight: Sight) -> list[str]:
    """How the tokens of images, and that of videos, are spelled."""
    tokens = (sight.image_token, sight.start_token, sight.end_token, sight.video_token)
    return [str(tokenizer.decode([token], skip_special_tokens=False)) for token in tokens if token is not None]


def check_spelled(messages: Sequence[Message], texts: Sequence[str], row: Row) -> None:
    """Raise UserError for text that spells a token of images: it would be taken for one. texts: `spellings`."""
    found = [text for text in texts if any(text in said for message in messages for said in _texts(message))]
    if found:
        raise UserError(
            f"{row.where}: the text spells {found[0]}, which the model takes for a place of an image or a video. "
            f"Write {PLACE} where an image of the row stands, and leave it out elsewhere."
        )


def _texts(message: object) -> Iterator[str]:
    """All in a message: its content, its reasoning, what calls of tools are given."""
    if isinstance(message, str):
        yield message
    elif isinstance(message, Mapping):
        for value in message.values():
            yield from _texts(value)
    elif isinstance(message, list):
        for value in message:
            yield from _texts(value)


def expanded(token_ids: TokenArray, images: Sequence[Image], sight: Sight, row: Row) -> TokenArray:
    """Token ids of a rendered prompt, which have one image token an image, with as many as each has squares.

    Raises UserError where the chat template writes images in another way.
    """
    found: TokenArray = np.repeat(token_ids, token_counts(token_ids, images, sight, row))
    return found


def token_counts(token_ids: TokenArray, images: Sequence[Image], sight: Sight, row: Row) -> IntArray:
    """How many tokens each of these becomes in `expanded`: [L]. Raises as it does."""
    counts = counts_of(token_ids, images, sight)
    if counts is None:
        whole = [sight.start_token, sight.image_token, sight.end_token]
        places = np.flatnonzero(token_ids == sight.image_token)
        raise UserError(
            f"{row.where}: the model's chat template does not write its {len(images)} images as start, image and end token "
            f"({', '.join(map(str, whole))}) each: it has {len(places)} image tokens. Place images in messages of the user, "
            "which every template shows, or take the template that the model was published with."
        )
    return counts


def counts_of(token_ids: TokenArray, images: Sequence[Image], sight: Sight) -> IntArray | None:
    """As `token_counts`; None where the chat template writes images in another way."""
    places = np.flatnonzero(token_ids == sight.image_token)
    whole = [sight.start_token, sight.image_token, sight.end_token]
    if len(places) != len(images) or any(token_ids[max(at - 1, 0) : at + 2].tolist() != whole for at in places):
        return None
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [sight.num_tokens(image.width, image.height) for image in images]
    return counts


def in_squares(token_ids: TokenArray, images: Sequence[Image], sight: Sight) -> TokenArray | None:
    """As `expanded`; None where the chat template writes images in another way."""
    counts = counts_of(token_ids, images, sight)
    found: TokenArray | None = None if counts is None else np.repeat(token_ids, counts)
    return found


def collapsed(token_ids: TokenArray, image_token: int) -> TokenArray:
    """Token ids with one image token in the place of each run of them: `expanded` undone."""
    again = token_ids == image_token
    again[1:] &= again[:-1].copy()
    again[:1] = False
    once: TokenArray = token_ids[~again]
    return once
