"""What messages spell of special tokens is text: whoever is told something may have it from anybody, and ends no turn with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megarl.core.types import TokenArray
from megarl.data.chat import Message, Tokenizer, encode, encode_behind, special_texts

APART = "\ue0a7\ue05b"  # of a private area: where a text is tokenised in two pieces


class Spelled:
    """How a tokenizer's special tokens are spelled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        longest_first = sorted((text for text in special_texts(tokenizer) if len(text) > 1), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages, to be rendered and then given to `encode`, in which what they spell of special tokens is text."""

        def apart(found: re.Match[str]) -> str:
            return found[0][0] + APART + found[0][1:]

        def plain(key: str, value: Any) -> Any:
            if key == "content" and isinstance(value, list):  # of parts
                return [
                    {name: plain(name, part[name]) if name == "text" else part[name] for name in part} for part in value
                ]
            return self._spelled.sub(apart, value) if isinstance(value, str) and key != "role" else value

        return [{key: plain(key, value) for key, value in message.items()} for message in messages]

    def encode(self, text: str) -> TokenArray:
        """Token ids of a rendered conversation, tokenised in its pieces."""
        pieces = text.split(APART)
        behind = encode_behind(self._tokenizer, list(pairwise(pieces)))
        return np.concatenate([*encode(self._tokenizer, pieces[:1], special_tokens=False), *behind])
