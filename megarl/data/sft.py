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
from megarl.core.types import Image, TokenArray
from megarl.data.chat import (
    QUESTION,
    Message,
    Tokenizer,
    behind_turn,
    check_unrendered,
    encode,
    encode_behind,
    has_chat_template,
    load_tokenizer,
    render,
    row_template_kwargs,
    special_ids,
    turn_end,
    turn_mark,
)
from megarl.data.digests import TEMPLATE
from megarl.data.exchanges import Exchange, parse_demonstration
from megarl.data.heard import Hearing
from megarl.data.image_places import check_spelled, in_parts, num_places, spellings, token_counts
from megarl.data.images import Sight
from megarl.data.row_set import RowSet, count_rows, load_rows
from megarl.recipe.supervised import SftData


class RewrittenTurnError(UserError):
    """A chat template renders a turn otherwise than the model would have written it."""


@dataclass(frozen=True)
class Demonstration:
    """One exchange, tokenised. `id` is `<file name>:<row number>`."""

    id: str
    token_ids: TokenArray  # [T]
    loss_mask: NDArray[np.uint8]  # [T]: 1 where the token is the assistant's, its end-of-turn token included
    images: tuple[Image, ...] = ()  # in the order in which their tokens stand in token_ids


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is either all the assistant's or not at all."""

    text: str
    trained: bool = False
    special_tokens: bool = False  # the tokenizer adds what it puts around plain text
    append_eos: bool = False


def check_demonstrations(path: Path, data: SftData) -> int:
    """Check the rows of a file without a tokenizer, and without their images; returns how many there are.

    Raises UserError for the first row that is wrong.
    """
    return count_rows(path, partial(parse_demonstration, data=data, parts=True))


def load_demonstrations(
    path: Path, model_folder: Path, data: SftData, sight: Sight | None = None
) -> RowSet[Demonstration]:
    """Read and tokenise a whole file with the model's tokenizer; rows over data.max_tokens are counted and dropped.

    A chat whose turns cannot be learned together is several rows, see `apart`. sight: see `parse_demonstration`.
    Raises UserError: a malformed row, nothing left.
    """
    options = data.chat_template_kwargs
    tokenizer = load_tokenizer(model_folder, options)
    return load_rows(
        path,
        lambda row: parse_demonstration(row, data, sight),
        lambda batch: tokenise(batch, tokenizer, sight),
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
        return [
            replace(exchange, prompt=chat[:at], response=chat[at], images=exchange.images[: num_places(chat[:at])])
            for at in answers
        ]
    return [exchange]


def tokenise(exchanges: Sequence[Exchange], tokenizer: Tokenizer, sight: Sight | None = None) -> list[Demonstration]:
    """Exchanges as tokens and masks; each ends with the last token that is trained on. sight: of exchanges with images."""
    mark, spelled = turn_mark(tokenizer), spellings(tokenizer, sight) if sight is not None else []
    for each in exchanges:
        if isinstance(each.prompt, str):
            check_unrendered(each.prompt, mark, each.row)
        check_spelled(_messages(each), spelled, each.row)
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
    return [_join(each, sight, its_ids, its) for each, its_ids, its in zip(exchanges, ids, masks, strict=True)]


def _join(
    exchange: Exchange, sight: Sight | None, ids: list[TokenArray], masks: list[NDArray[np.uint8]]
) -> Demonstration:
    row, mask = exchange.row, np.concatenate(masks)
    trained = np.flatnonzero(mask)
    if not len(trained):
        raise UserError(f"{row.where}: the assistant's text has no tokens. Fill it, or leave the row out.")
    length = int(trained[-1]) + 1
    tokens, mask = np.concatenate(ids)[:length], mask[:length]
    if sight is None:
        return Demonstration(row.id, tokens, mask)
    counts = token_counts(tokens, exchange.images, sight, row)
    return Demonstration(row.id, np.repeat(tokens, counts), np.repeat(mask, counts), exchange.images)


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
    as_it_stands = isinstance(prompt, str) and not has_chat_template(tokenizer) and not exchange.tools
    if as_it_stands and _is_text(response) and not exchange.images:
        assert isinstance(prompt, str) and response is not None, prompt
        if tokenizer.eos_token_id is None:
            raise UserError(f"{row.where}: the model's tokenizer has no end-of-sequence token, which ends a response.")
        return [Piece(prompt, special_tokens=True), Piece(response["content"], trained=True, append_eos=True)]
    messages = _messages(exchange)
    first = 1 if response is None else len(messages) - 1
    pieces, text = _turns(exchange, messages, tokenizer, first=first)
    learned = {index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"}
    shown = partial(_shown, exchange, tokenizer, generation_prompt=False)
    hearing.check(text, messages, partial(shown, tools=exchange.tools), row, learned=learned)
    if exchange.tools:
        hearing.check_tools(text, partial(shown, messages), row)
    return pieces


def _messages(exchange: Exchange) -> list[Message]:
    prompt, response = exchange.prompt, exchange.response
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if response is None else [*messages, response]


def _shown(exchange: Exchange, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> str:
    """Messages as the chat template has them, images at their places. options: of `render`."""
    return render(tokenizer, in_parts(messages) if exchange.images else messages, exchange.row, **options)


def _is_text(message: Message | None) -> bool:
    return message is not None and message.keys() == {"role", "content"}


def _turns(exchange: Exchange, messages: list[Message], tokenizer: Tokenizer, *, first: int) -> tuple[list[Piece], str]:
    """A chat cut into pieces, and its rendering; the assistant's messages from index `first` on are trained on."""
    row, shown = exchange.row, partial(_shown, exchange, tokenizer, tools=exchange.tools)
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
