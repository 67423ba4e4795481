"""Demonstrations for supervised training: whole chats, or prompts with responses; only the assistant's tokens train.

The prompt's part of a chat is encoded on its own, exactly as prompts.py encodes it for generation, so that what is
learned here is what the servers will be asked. Not for packing (pack.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.core.types import IntArray
from megarl.data.chat import Message, Tokenizer, check_messages, encode, has_chat_template, load_tokenizer, render
from megarl.data.cursor import Cursor
from megarl.data.rows import Row, json_type, read_rows
from megarl.recipe.supervised import SftData

# Enough rows at once to keep the tokenizer's threads busy.
ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class Demonstration:
    """One row, tokenised. `id` is `<file name>:<row number>`."""

    id: str
    token_ids: IntArray  # [T]
    loss_mask: NDArray[np.uint8]  # [T]: 1 where the token is the assistant's, its end-of-turn token included


@dataclass(frozen=True)
class DemonstrationSet:
    """The demonstrations of one file, in the file's order."""

    demonstrations: tuple[Demonstration, ...]
    num_dropped: int  # over the length limit

    def __len__(self) -> int:
        return len(self.demonstrations)


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is either all the assistant's or not at all."""

    text: str
    trained: bool = False
    special_tokens: bool = False  # the tokenizer adds what it puts around plain text
    append_eos: bool = False


def parse_demonstration(row: Row, data: SftData) -> tuple[str | list[Message], str | None]:
    """(chat ending with the assistant, None), or (prompt, response). Raises UserError naming file, line and field."""
    if row.has(data.messages_key):
        messages = check_messages(row.get(data.messages_key, "the chat"), row, data.messages_key)
        if messages[-1]["role"] != "assistant":
            raise UserError(
                f"{row.where}, field {data.messages_key!r}: the last message is the {messages[-1]['role']}'s. "
                "A demonstration ends with the assistant's message."
            )
        if len(messages) == 1:
            raise UserError(
                f"{row.where}, field {data.messages_key!r}: the assistant's message stands alone. "
                "Put the user's before it."
            )
        return messages, None
    if not row.has(data.prompt_key):
        raise row.missing(data.prompt_key, f"data.prompt_key; nor is there a chat under {data.messages_key!r}")
    prompt = row.get(data.prompt_key, "data.prompt_key")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(
                f"{row.where}, field {data.prompt_key!r}: the prompt is empty. Fill it, or leave the row out."
            )
    elif isinstance(prompt, list):
        check_messages(prompt, row, data.prompt_key)
    else:
        raise UserError(
            f"{row.where}, field {data.prompt_key!r}: the prompt is a {json_type(prompt)}; "
            "wanted is a string or a list of chat messages."
        )
    response = row.get(data.response_key, "the response, data.response_key")
    if not isinstance(response, str) or not response.strip():
        found = "empty" if isinstance(response, str) else f"a {json_type(response)}"
        raise UserError(f"{row.where}, field {data.response_key!r}: the response is {found}; wanted is some text.")
    return prompt, response


def check_demonstrations(path: Path, data: SftData, limit: int | None = None) -> int:
    """Check the rows of a file, or the first `limit`, without a tokenizer; returns how many were checked.

    Raises UserError for the first row that is wrong.
    """
    count = 0
    for row in islice(read_rows(path), limit):
        parse_demonstration(row, data)
        count += 1
    return count


def load_demonstrations(model_folder: Path, data: SftData) -> DemonstrationSet:
    """Read and tokenise a whole file with the model's tokenizer; rows over data.max_tokens are counted and dropped.

    Raises UserError: a malformed row, or nothing left.
    """
    tokenizer = load_tokenizer(model_folder)
    kept: list[Demonstration] = []
    num_dropped = 0
    rows = read_rows(data.train)
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        for demonstration in tokenise(batch, tokenizer, data):
            if len(demonstration.token_ids) <= data.max_tokens:
                kept.append(demonstration)
            else:
                num_dropped += 1
    if not kept:
        raise UserError(
            f"{data.train}: all {num_dropped} demonstrations are over data.max_tokens={data.max_tokens}. "
            "Raise the limit."
        )
    return DemonstrationSet(tuple(kept), num_dropped)


def tokenise(rows: Sequence[Row], tokenizer: Tokenizer, data: SftData) -> list[Demonstration]:
    """Rows as tokens and masks; each ends with the last token that is trained on."""
    pieces = [(index, piece) for index, row in enumerate(rows) for piece in _pieces(row, data, tokenizer)]
    ids: list[list[IntArray]] = [[] for _ in rows]
    masks: list[list[NDArray[np.uint8]]] = [[] for _ in rows]
    for (index, piece), tokens in zip(pieces, _encode_pieces([piece for _, piece in pieces], tokenizer), strict=True):
        mask = np.zeros(len(tokens), np.uint8)
        if piece.trained:
            mask[: _turn_length(tokens, tokenizer)] = 1
        ids[index].append(tokens)
        masks[index].append(mask)
    return [_join(row, row_ids, row_masks) for row, row_ids, row_masks in zip(rows, ids, masks, strict=True)]


class SftSource:
    """Deals out demonstrations, epoch after epoch; its place can be saved."""

    def __init__(self, demonstrations: DemonstrationSet, seed: int, *, shuffle: bool = True) -> None:
        self._demonstrations = demonstrations.demonstrations
        self._cursor = Cursor(len(demonstrations), seed, shuffle=shuffle, what="demonstrations")

    @property
    def epoch(self) -> int:
        """Whole passes dealt out so far."""
        return self._cursor.epoch

    def take(self, count: int) -> list[Demonstration]:
        """The next `count` demonstrations, crossing epochs where needed."""
        return [self._demonstrations[index] for index in self._cursor.take(count)]

    def state(self) -> dict[str, Any]:
        """The place, for a checkpoint."""
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place. Raises UserError where the data or the seed have changed."""
        self._cursor.load_state(state)


def _join(row: Row, ids: list[IntArray], masks: list[NDArray[np.uint8]]) -> Demonstration:
    mask = np.concatenate(masks)
    trained = np.flatnonzero(mask)
    if not len(trained):
        raise UserError(f"{row.where}: the assistant's text has no tokens. Fill it, or leave the row out.")
    length = int(trained[-1]) + 1
    return Demonstration(row.id, np.concatenate(ids)[:length], mask[:length])


def _encode_pieces(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[IntArray]:
    """Token ids of each piece; those that need the same treatment go to the tokenizer at once."""
    encoded = {
        special: iter(
            encode(tokenizer, [p.text for p in pieces if p.special_tokens == special], special_tokens=special)
        )
        for special in (False, True)
    }
    for piece in pieces:
        tokens = next(encoded[piece.special_tokens])
        yield np.append(tokens, tokenizer.eos_token_id) if piece.append_eos else tokens


def _pieces(row: Row, data: SftData, tokenizer: Tokenizer) -> list[Piece]:
    """The row's text, cut where the assistant begins and ends to speak."""
    chat, response = parse_demonstration(row, data)
    if isinstance(chat, str) and not has_chat_template(tokenizer):
        assert response is not None, chat
        if tokenizer.eos_token_id is None:
            raise UserError(f"{row.where}: the model's tokenizer has no end-of-sequence token, which ends a response.")
        return [Piece(chat, special_tokens=True), Piece(response, trained=True, append_eos=True)]
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    if response is None:
        return _turns(row, messages, tokenizer, first=1)
    return _turns(row, [*messages, {"role": "assistant", "content": response}], tokenizer, first=len(messages))


def _turns(row: Row, messages: list[Message], tokenizer: Tokenizer, *, first: int) -> list[Piece]:
    """A chat cut into pieces; the assistant's messages from index `first` on are trained on."""
    whole = render(tokenizer, messages, row, generation_prompt=False)
    pieces = []
    done = 0
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], row, generation_prompt=True)
        after = render(tokenizer, messages[: index + 1], row, generation_prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"{row.where}, message {index + 1}: the model's chat template renders this turn differently "
                "inside a longer chat (templates that strip earlier reasoning do), so it cannot be trained on as the "
                "model would write it. Give each assistant turn a row of its own, with prompt and response."
            )
        pieces += [
            Piece(whole[done : len(before)], trained=False),
            Piece(whole[len(before) : len(after)], trained=True),
        ]
        done = len(after)
    return pieces


def _turn_length(tokens: IntArray, tokenizer: Tokenizer) -> int:
    """Tokens of an assistant's turn up to its end-of-turn token; what a template adds after that is not generated."""
    special = np.flatnonzero(np.isin(tokens, tokenizer.all_special_ids))
    return int(special[-1]) + 1 if len(special) else len(tokens)
