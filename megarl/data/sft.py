"""Demonstrations for supervised training: whole chats, or prompts with responses; only the assistant's tokens train.

The prompt's part of a chat is encoded on its own, exactly as prompts.py encodes it for generation, so that what is
learned here is what the servers will be asked. Not for packing (pack.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.core.types import TokenArray
from megarl.data.calls import CALLS
from megarl.data.chat import (
    QUESTION,
    ROW_KWARGS,
    Message,
    Tokenizer,
    behind_turn,
    check_messages,
    check_unrendered,
    encode,
    encode_behind,
    has_chat_template,
    load_tokenizer,
    render,
    row_template_kwargs,
    row_tools,
    special_ids,
    turn_end,
    turn_mark,
)
from megarl.data.digests import TEMPLATE
from megarl.data.heard import Hearing
from megarl.data.row_set import RowSet, count_rows, load_rows
from megarl.data.rows import Row, json_type
from megarl.recipe.supervised import SftData


class RewrittenTurnError(UserError):
    """A chat template renders a turn otherwise than the model would have written it."""


@dataclass(frozen=True)
class Exchange:
    """What a row demonstrates: a prompt and its response; or, without one, a chat that ends with the assistant.

    response: the assistant's whole message, with its reasoning and its calls of tools where it has some.
    """

    row: Row
    prompt: str | list[Message]
    response: Message | None
    tools: list[dict[str, Any]]  # JSON schemas of functions that the assistant may call

    @property
    def texts(self) -> dict[str, Any]:
        """What digests are made of."""
        given = self.row.fields.get(ROW_KWARGS)
        return {"ids": self.row.id, "texts": [self.prompt, self.response, self.tools, *([given] if given else ())]}


@dataclass(frozen=True)
class Demonstration:
    """One exchange, tokenised. `id` is `<file name>:<row number>`."""

    id: str
    token_ids: TokenArray  # [T]
    loss_mask: NDArray[np.uint8]  # [T]: 1 where the token is the assistant's, its end-of-turn token included


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is either all the assistant's or not at all."""

    text: str
    trained: bool = False
    special_tokens: bool = False  # the tokenizer adds what it puts around plain text
    append_eos: bool = False


def parse_demonstration(row: Row, data: SftData) -> Exchange:
    """The row's chat, or its prompt and response. Raises UserError naming file, line and field."""
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


def check_demonstrations(path: Path, data: SftData) -> int:
    """Check the rows of a file without a tokenizer; returns how many there are.

    Raises UserError for the first row that is wrong.
    """
    return count_rows(path, lambda row: parse_demonstration(row, data))


def load_demonstrations(path: Path, model_folder: Path, data: SftData) -> RowSet[Demonstration]:
    """Read and tokenise a whole file with the model's tokenizer; rows over data.max_tokens are counted and dropped.

    A chat whose turns cannot be learned together is several rows, see `apart`. Raises UserError: a malformed row, nothing left.
    """
    options = data.chat_template_kwargs
    tokenizer = load_tokenizer(model_folder, options)
    return load_rows(
        path,
        lambda row: parse_demonstration(row, data),
        lambda batch: tokenise(batch, tokenizer),
        lambda item: len(item.token_ids),
        data.max_tokens,
        lambda exchange: {**exchange.texts, TEMPLATE: options},
        lambda exchange: exchange.row.fields.get(data.mix_key),
        lambda exchange: apart(exchange, tokenizer),
    )


def apart(exchange: Exchange, tokenizer: Tokenizer) -> list[Exchange]:
    """The exchange as it is; of a chat whose earlier turns the template renders otherwise behind later ones, each turn's own.

    Such templates, Qwen3's among them, leave out earlier reasoning. A turn is then learned behind what the model would have seen
    when it wrote it, and the chat's beginning is in several rows.
    """
    chat = exchange.prompt
    answers = [at for at, each in enumerate(chat) if isinstance(each, dict) and each["role"] == "assistant" and at]
    if exchange.response is not None or isinstance(chat, str) or len(answers) < 2:
        return [exchange]
    try:
        _turns(exchange, chat, tokenizer, first=1)
    except RewrittenTurnError:
        return [replace(exchange, prompt=chat[:at], response=chat[at]) for at in answers]
    return [exchange]


def tokenise(exchanges: Sequence[Exchange], tokenizer: Tokenizer) -> list[Demonstration]:
    """Exchanges as tokens and masks; each ends with the last token that is trained on."""
    mark = turn_mark(tokenizer)
    for each in exchanges:
        if isinstance(each.prompt, str):
            check_unrendered(each.prompt, mark, each.row)
    hearing = Hearing()
    cut = [_pieces(each, tokenizer, hearing) for each in exchanges]
    pieces = [(index, piece) for index, each in enumerate(cut) for piece in each]
    ids: list[list[TokenArray]] = [[] for _ in exchanges]
    masks: list[list[NDArray[np.uint8]]] = [[] for _ in exchanges]
    special, behind = sorted(special_ids(tokenizer)), behind_turn(tokenizer)
    if behind is not None and not np.isin(behind, special).any():
        special = []  # no such token ends a turn: those that are there are the assistant's words
    end = turn_end(tokenizer) if special else None
    for (index, piece), tokens in zip(pieces, _encode_pieces(cut, tokenizer), strict=True):
        mask = np.zeros(len(tokens), np.uint8)
        if piece.trained:
            mask[: _turn_length(tokens, special, end)] = 1
        ids[index].append(tokens)
        masks[index].append(mask)
    return [_join(each.row, its_ids, its) for each, its_ids, its in zip(exchanges, ids, masks, strict=True)]


def _join(row: Row, ids: list[TokenArray], masks: list[NDArray[np.uint8]]) -> Demonstration:
    mask = np.concatenate(masks)
    trained = np.flatnonzero(mask)
    if not len(trained):
        raise UserError(f"{row.where}: the assistant's text has no tokens. Fill it, or leave the row out.")
    length = int(trained[-1]) + 1
    return Demonstration(row.id, np.concatenate(ids)[:length], mask[:length])


def _encode_pieces(exchanges: Sequence[Sequence[Piece]], tokenizer: Tokenizer) -> Iterator[TokenArray]:
    """Token ids of each piece, exchange by exchange; those that need the same treatment go to the tokenizer at once."""
    first = [pieces[0] for pieces in exchanges]
    begun = {
        special: iter(encode(tokenizer, [p.text for p in first if p.special_tokens == special], special_tokens=special))
        for special in (False, True)
    }
    behind = iter(
        encode_behind(tokenizer, [(one.text, two.text) for pieces in exchanges for one, two in pairwise(pieces)])
    )
    for pieces in exchanges:
        for number, piece in enumerate(pieces):
            tokens = next(behind if number else begun[piece.special_tokens])
            ends = len(tokens) and tokens[-1] == tokenizer.eos_token_id  # the row has it already
            yield np.append(tokens, np.int32(tokenizer.eos_token_id)) if piece.append_eos and not ends else tokens


def _pieces(exchange: Exchange, tokenizer: Tokenizer, hearing: Hearing) -> list[Piece]:
    """The exchange's text, cut where the assistant begins and ends to speak."""
    row, prompt, response = exchange.row, exchange.prompt, exchange.response
    row_template_kwargs(row, tokenizer)  # without a template refused, as tools and reasoning are below
    if isinstance(prompt, str) and not has_chat_template(tokenizer) and not exchange.tools and _is_text(response):
        assert response is not None, prompt
        if tokenizer.eos_token_id is None:
            raise UserError(f"{row.where}: the model's tokenizer has no end-of-sequence token, which ends a response.")
        return [Piece(prompt, special_tokens=True), Piece(response["content"], trained=True, append_eos=True)]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    first = 1 if response is None else len(messages)
    messages = messages if response is None else [*messages, response]
    pieces, text = _turns(exchange, messages, tokenizer, first=first)
    learned = {index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"}
    shown = partial(render, tokenizer, row=row, generation_prompt=False)
    hearing.check(text, messages, partial(shown, tools=exchange.tools), row, learned=learned)
    if exchange.tools:
        hearing.check_tools(text, partial(shown, messages), row)
    return pieces


def _is_text(message: Message | None) -> bool:
    return message is not None and message.keys() == {"role", "content"}


def _turns(exchange: Exchange, messages: list[Message], tokenizer: Tokenizer, *, first: int) -> tuple[list[Piece], str]:
    """A chat cut into pieces, and its rendering; the assistant's messages from index `first` on are trained on."""
    row, shown = exchange.row, partial(render, tokenizer, row=exchange.row, tools=exchange.tools)
    whole = shown(messages, generation_prompt=False)
    pieces = []
    done = 0
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = shown(messages[:index], generation_prompt=True)
        after = shown(messages[: index + 1], generation_prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            if index == first == len(messages) - 1 and (
                learned := _behind_a_question(messages[index], before, whole, shown)
            ):
                return [Piece(before), Piece(learned, trained=True)], whole
            raise RewrittenTurnError(
                f"{row.where}, message {index + 1}: the model's chat template renders this turn otherwise than as the prompt "
                "before it and what the assistant says, so it cannot be trained on as the model would write it. Mend the "
                "template in the model's folder; or leave it out there, and give rows as text, with prompt and response, in the "
                "form that the model is to learn."
            )
        pieces += [
            Piece(whole[done : len(before)], trained=False),
            Piece(whole[len(before) : len(after)], trained=True),
        ]
        done = len(after)
    return pieces, whole


def _behind_a_question(answer: Message, before: str, whole: str, shown: Callable[..., str]) -> str:
    """The last turn's text, of templates that render earlier turns otherwise behind it; empty where it may be another text.

    gpt-oss' and Kimi-K2-Thinking's show the reasoning before a call of a tool until an answer follows: the model wrote that
    answer behind what it saw until then. before: that, up to where the turn begins. whole: with the turn.
    """
    try:
        told, opened = (shown([QUESTION], generation_prompt=each) for each in (False, True))
        said = shown([QUESTION, answer], generation_prompt=False)
    except UserError:  # the template wants more before an answer
        return ""
    learned = said.removeprefix(opened)
    begins = opened.startswith(told) and before.endswith(opened.removeprefix(told))
    return learned if begins and said.startswith(opened) and whole.endswith(learned) else ""


def _turn_length(tokens: TokenArray, special: Sequence[int], end: int | None) -> int:
    """Tokens of an assistant's turn up to its end-of-turn token; what a template adds after that is not generated.

    end: what ends the last turn of a chat; an earlier one may end with another special token, as gpt-oss' do.
    """
    found = np.flatnonzero(tokens == end)
    if not len(found):
        found = np.flatnonzero(np.isin(tokens, special))
    return int(found[-1]) + 1 if len(found) else len(tokens)
