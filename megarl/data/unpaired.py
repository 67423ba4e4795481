"""Answers that are labelled one by one, desirable or not, tokenised as demonstrations are (sft.py).

Answers are texts or single messages beside a prompt, or whole chats, of which the last message is the answer: its tokens are
the trained ones. Not for packing (pack_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.errors import UserError
from megarl.data.chat import Tokenizer, load_tokenizer
from megarl.data.digests import TEMPLATE
from megarl.data.exchanges import Exchange, parse_exchange, with_images, with_text
from megarl.data.images import Sight
from megarl.data.row_set import RowSet, count_rows, load_rows
from megarl.data.rows import Row, json_type
from megarl.data.sft import Demonstration, tokenise
from megarl.recipe.supervised import UnpairedData

FEWEST_ROWS = 2


@dataclass(frozen=True)
class Unpaired:
    """One row, tokenised."""

    answer: Demonstration
    desirable: bool


@dataclass(frozen=True)
class LabelledExchange:
    """One row, as text."""

    exchange: Exchange
    desirable: bool

    @property
    def texts(self) -> dict[str, Any]:
        """What digests are made of."""
        return {"ids": self.exchange.row.id, "texts": [*self.exchange.texts["texts"], self.desirable]}


def parse_labelled(
    row: Row, data: UnpairedData, sight: Sight | None = None, *, parts: bool = False
) -> LabelledExchange:
    """The row's answer with its images, and its label. Raises UserError naming file, line and field.

    sight, parts: see `parse_demonstration`.
    """
    if not row.has(data.response_key) and row.has("chosen") and row.has("rejected"):
        raise UserError(
            f"{row.where}: the row is a pair, 'chosen' and 'rejected', as `megarl dpo` takes it. For KTO write its two answers "
            f"as two rows, each with {data.label_key!r}, and leave data.shuffle on: they have the same prompt."
        )
    row = with_text(row, [data.prompt_key, data.response_key], data, sight, parts=parts)
    exchange = parse_exchange(row, data.response_key, data.prompt_key, "the answer, data.response_key")
    [exchange] = with_images([exchange], data, sight)
    return LabelledExchange(exchange, _label(row, data.label_key))


def _label(row: Row, key: str) -> bool:
    label = row.get(key, "whether the answer is desirable, data.label_key")
    if isinstance(label, bool) or (isinstance(label, int | float) and label in (0, 1)):
        return bool(label)
    found = repr(label) if isinstance(label, str | int | float) else json_type(label)
    raise UserError(
        f"{row.where}, field {key!r}: the label is {found}; wanted is true or 1 where the answer is desirable, false or 0 where "
        "it is not."
    )


def check_unpaired(path: Path, data: UnpairedData) -> int:
    """Check the rows of a file without a tokenizer, and without their images; returns how many there are.

    Raises UserError for the first row that is wrong.
    """
    return count_rows(path, partial(parse_labelled, data=data, parts=True))


def load_unpaired(path: Path, model_folder: Path, data: UnpairedData, sight: Sight | None = None) -> RowSet[Unpaired]:
    """Read and tokenise a whole file with the model's tokenizer; rows over data.max_tokens are counted and dropped.

    sight: see `parse_demonstration`. Raises UserError: a malformed row, or too few left.
    """
    options = data.chat_template_kwargs
    tokenizer = load_tokenizer(model_folder, options)
    rows = load_rows(
        path,
        lambda row: parse_labelled(row, data, sight),
        lambda batch: _tokenise(batch, tokenizer, sight),
        lambda row: len(row.answer.token_ids),
        data.max_tokens,
        lambda labelled: {**labelled.texts, TEMPLATE: options},
        lambda labelled: labelled.exchange.row.fields.get(data.mix_key),
    )
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"{path} has {len(rows)} row within data.max_tokens={data.max_tokens}. The KL of KTO is estimated from prompts "
            f"before the answers of other rows: give at least {FEWEST_ROWS}."
        )
    return rows


def _tokenise(labelled: list[LabelledExchange], tokenizer: Tokenizer, sight: Sight | None) -> list[Unpaired]:
    answers = tokenise([each.exchange for each in labelled], tokenizer, sight)
    return [Unpaired(answer, each.desirable) for answer, each in zip(answers, labelled, strict=True)]


def mismatched(rows: Sequence[Unpaired], max_tokens: int) -> list[Unpaired]:
    """Each row's prompt, with its images, before the answer of the next row, the last one's before the first's.

    Cut at max_tokens, which no prompt reaches: each was within it with an answer of its own.
    From these KTO estimates how far the policy is from its reference (arXiv 2402.01306, section 4.1).
    """
    following = [*rows[1:], *rows[:1]]
    return [
        replace(row, answer=_joined(row.answer, other.answer, max_tokens))
        for row, other in zip(rows, following, strict=True)
    ]


def _joined(asked: Demonstration, answered: Demonstration, max_tokens: int) -> Demonstration:
    prompt, first = int(np.argmax(asked.loss_mask)), int(np.argmax(answered.loss_mask))
    ids = np.concatenate([asked.token_ids[:prompt], answered.token_ids[first:]])
    mask = np.concatenate([asked.loss_mask[:prompt], answered.loss_mask[first:]])
    return Demonstration(asked.id, ids[:max_tokens], mask[:max_tokens], asked.images)
