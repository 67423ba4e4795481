"""What messages show, as environments and tools give it: text, and images in any of a few ways, which become bytes of files.

This is done where the environment or the tool runs, which may be a process of its own. Not for what the policy sees of them
(observer.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.agents.environment import Message, Turn
from megarl.core.words import shortened
from megarl.data.image_places import PLACE

IMAGE, IMAGE_URL, TEXT = "image", "image_url", "text"
MOST_BYTES = 2**26  # of an image's file
WANTED = (
    'wanted are parts {"type": "text", "text": "..."}, {"type": "image", "image": ...}, with the bytes of a file, its path or an '
    'image of PIL, and {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
)


def in_parts(messages: Sequence[Message]) -> bool:
    """Whether the content of some is in parts."""
    return any(isinstance(each["content"], list) for each in messages)


def sendable(messages: Sequence[Message]) -> list[Message]:
    """Messages that have each image as `{"type": "image", "image": bytes}`. It reads files. Raises ValueError."""
    return [
        {**each, "content": sendable_parts(each["content"])} if isinstance(each["content"], list) else each
        for each in messages
    ]


def sendable_answer(given: Any) -> Any:
    """The same of what `start` or `step` gave, where that is messages or a Turn of some: others are looked at later."""
    if isinstance(given, Turn):
        return replace(given, messages=sendable_answer(given.messages))
    if isinstance(given, list | tuple) and all(isinstance(each, dict) and "content" in each for each in given):
        return sendable(given)
    return given


def sendable_parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """The same of a message's content. Raises ValueError for a part that is neither text nor an image."""
    found: list[dict[str, Any]] = []
    for part in parts:
        kind = kind_of(part)
        if kind == TEXT and isinstance(part.get("text"), str):
            found.append({"type": TEXT, "text": part["text"]})
        elif kind == IMAGE and part.get("image") is None and len(part) == 1:
            found.append({"type": IMAGE})  # the row's next
        elif kind in (IMAGE, IMAGE_URL):
            found.append({"type": IMAGE, "image": _file(_given(part))})
        else:
            raise ValueError(f"a part of a message is {shortened(repr(part), 120)}; {WANTED}")
    return found


def as_parts(value: Any) -> list[dict[str, Any]] | None:
    """What a tool gave as content in parts, where images are in it: such parts, an image of PIL, or texts and images of PIL in
    their order; else None. Raises ValueError.
    """
    if _is_pillow(value):
        value = [value]
    if isinstance(value, list | tuple) and any(map(_is_pillow, value)):
        value = [_as_part(each) for each in value]
    if not is_shown(value) or not all(kind_of(part) == TEXT or _has_its_image(part) for part in value):
        return None  # JSON of some other kind
    return sendable_parts(value)


def _as_part(value: Any) -> Any:
    """Of what stands beside images of PIL, as a part. What is none is refused where parts are read."""
    if _is_pillow(value):
        return {"type": IMAGE, "image": value}
    return {"type": TEXT, "text": value} if isinstance(value, str) else value


def in_json(value: Any) -> str:
    """What JSON has for a value that it knows no form of. Raises ValueError for an image, of which it would show nothing."""
    if _is_pillow(value):
        raise ValueError(f"there is an image of PIL within what it gave; {WANTED}")
    return str(value)


def identified(content: Any) -> str:
    """Content as text that tells its images from others."""
    if isinstance(content, str):
        return content
    digests = (
        f"<image {hashlib.blake2b(each['image'], digest_size=8).hexdigest()}>" for each in content if "image" in each
    )
    return "".join(part["text"] if part["type"] == TEXT else next(digests) for part in content)


def shown_text(content: Any, place: str = PLACE) -> str:
    """Content as text, in which `<image>` stands for each image; empty where there is none."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part["text"] if part["type"] == TEXT else place for part in content)


def is_shown(content: Any) -> bool:
    """Whether it is content in parts of which some are images."""
    return isinstance(content, list) and any(kind_of(part) in (IMAGE, IMAGE_URL) for part in content)


def kind_of(part: Any) -> Any:
    """Of a part; None of what is none."""
    return part.get("type") if isinstance(part, Mapping) else None


def _has_its_image(part: Any) -> bool:
    return kind_of(part) in (IMAGE, IMAGE_URL) and part["type"] in part


def _given(part: Mapping[str, Any]) -> Any:
    """What a part has for its image."""
    given = part.get(part["type"])
    return given.get("url") if part["type"] == IMAGE_URL and isinstance(given, Mapping) else given


def _file(given: Any) -> bytes:
    """The bytes of an image's file. Raises ValueError."""
    if isinstance(given, bytes | bytearray):
        found = bytes(given)
    elif _is_pillow(given):
        written = io.BytesIO()
        (given if given.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else given.convert("RGB")).save(
            written, "PNG", compress_level=1
        )
        found = written.getvalue()
    elif isinstance(given, str) and given.startswith("data:"):
        try:
            found = base64.b64decode("".join(given.partition(",")[2].split()), validate=True)
        except binascii.Error as error:
            raise ValueError(f"an image is a data URL whose content is no base64 ({error}); {WANTED}") from error
    elif isinstance(given, str) and given.startswith(("http://", "https://")):
        raise ValueError(f"an image is the address {shortened(given, 120)}, and none is fetched; {WANTED}")
    elif isinstance(given, str | os.PathLike):
        found = _read(Path(given))
    else:
        raise ValueError(f"an image is {shortened(repr(given), 120)}; {WANTED}")
    check_size(len(found))
    return found


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError(f"an image is the path {shortened(str(path), 300)}, and there is no such file")
        check_size(path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"an image is the path {shortened(str(path), 300)}, which cannot be read: {error}") from error


def check_size(num_bytes: int) -> None:
    """Raises ValueError for an image's file that is too large."""
    if num_bytes > MOST_BYTES:
        raise ValueError(f"an image has {num_bytes} bytes, and {MOST_BYTES} at most are taken: make it smaller")


def _is_pillow(value: Any) -> bool:
    """Whether it is an image of PIL, which is not loaded to find that out."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
