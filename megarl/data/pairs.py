"""Preferences: a better and a worse answer to the same prompt, tokenised as demonstrations are (sft.py).

Answers are texts or single messages beside a prompt, or whole chats that are alike but for the last message. Only that
message is compared: its tokens are the trained ones. Images of the prompt are both answers'. Not for packing (pack.py).
"""

from __future__ import annotations

from dataclasses import dataclass
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
from megarl.recipe.supervised import PairData

MAX_MARGIN = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Pair:
    """One row, tokenised. margin: how far the chosen answer shall be ahead."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float


@dataclass(frozen=True)
class Preference:
    """One row, as text."""

    chosen: Exchange
    rejected: Exchange
    margin: float

    @property
    def texts(self) -> dict[str, Any]:
        """What digests are made of."""
        said = [self.chosen.texts["texts"], self.rejected.response, self.margin]
        return {"ids": self.chosen.row.id, "texts": said}


def parse_preference(row: Row, data: PairData, sight: Sight | None = None, *, parts: bool = False) -> Preference:
    """The row's two answers, their margin, and the images of their prompt. Raises UserError naming file, line and field.

    sight, parts: see `parse_demonstration`.
    """
    row = with_text(row, [data.prompt_key, data.chosen_key, data.rejected_key], data, sight, parts=parts)
    chosen, rejected = (
        parse_exchange(row, key, data.prompt_key, "one of the two answers of a pair")
        for key in (data.chosen_key, data.rejected_key)
    )
    if chosen.prompt != rejected.prompt:
        raise UserError(
            f"{row.where}: the chats under {data.chosen_key!r} and {data.rejected_key!r} differ before their last "
            "message. A pair compares two answers to the same prompt."
        )
    if chosen.response == rejected.response:
        raise UserError(
            f"{row.where}: {data.chosen_key!r} and {data.rejected_key!r} are the same answer, and nothing can be "
            "learned from that. Leave the row out."
        )
    chosen, rejected = with_images([chosen, rejected], data, sight)
    return Preference(chosen, rejected, _margin(row, data))


def _margin(row: Row, data: PairData) -> float:
    if not row.has(data.margin_key):
        return 0.0
    margin = row.get(data.margin_key, "data.margin_key")
    # Losses are computed in float32; and a whole number may be too large for any float.
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= MAX_MARGIN:
        found = f"{json_type(margin)}" if not isinstance(margin, float) else str(margin)
        raise UserError(f"{row.where}, field {data.margin_key!r}: the margin is {found}; wanted is a finite number.")
    return float(margin)


def check_pairs(path: Path, data: PairData) -> int:
    """Check the rows of a file without a tokenizer, and without their images; returns how many there are.

    Raises UserError for the first row that is wrong.
    """
    return count_rows(path, partial(parse_preference, data=data, parts=True))


def load_pairs(path: Path, model_folder: Path, data: PairData, sight: Sight | None = None) -> RowSet[Pair]:
    """Read and tokenise a whole file with the model's tokenizer; a pair with a side over data.max_tokens is dropped.

    sight: see `parse_demonstration`. Raises UserError: a malformed row, or nothing left.
    """
    options = data.chat_template_kwargs
    tokenizer = load_tokenizer(model_folder, options)
    return load_rows(
        path,
        lambda row: parse_preference(row, data, sight),
        lambda batch: _tokenise(batch, tokenizer, sight),
        _longest,
        data.max_tokens,
        lambda preference: {**preference.texts, TEMPLATE: options},
        lambda preference: preference.chosen.row.fields.get(data.mix_key),
    )


def _tokenise(preferences: list[Preference], tokenizer: Tokenizer, sight: Sight | None) -> list[Pair]:
    sides = tokenise([each for pair in preferences for each in (pair.chosen, pair.rejected)], tokenizer, sight)
    for pair, chosen, rejected in zip(preferences, sides[::2], sides[1::2], strict=True):
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise UserError(
                f"{pair.chosen.row.where}: the two answers are the same tokens to the model, however they differ as text, and "
                "nothing can be learned from that. Leave the row out."
            )
    return [
        Pair(chosen, rejected, pair.margin)
        for pair, chosen, rejected in zip(preferences, sides[::2], sides[1::2], strict=True)
    ]


def _longest(pair: Pair) -> int:
    return max(len(pair.chosen.token_ids), len(pair.rejected.token_ids))
