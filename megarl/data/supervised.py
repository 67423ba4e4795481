"""Rows of supervised runs of any kind: demonstrations, pairs or labelled answers, as the recipe's data section says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.core.types import IntArray
from megarl.data.images import Sight
from megarl.data.mix import named_rows
from megarl.data.pairs import Pair, check_pairs, load_pairs
from megarl.data.row_set import RowSet
from megarl.data.sft import Demonstration, check_demonstrations, load_demonstrations
from megarl.data.unpaired import Unpaired, check_unpaired, load_unpaired
from megarl.recipe.supervised import PairData, SftData, UnpairedData

AnyData = SftData | PairData | UnpairedData
AnyRow = Demonstration | Pair | Unpaired
Rows = RowSet[Demonstration] | RowSet[Pair] | RowSet[Unpaired]


def check_supervised(path: Path, data: AnyData) -> int:
    """Check the rows of a file without a tokenizer; returns how many there are. Raises UserError naming the place."""
    if isinstance(data, UnpairedData):
        return check_unpaired(path, data)
    return check_pairs(path, data) if isinstance(data, PairData) else check_demonstrations(path, data)


def load_supervised(path: Path, model_folder: Path, data: AnyData, sight: Sight | None = None) -> Rows:
    """Read and tokenise a whole file; rows over data.max_tokens are counted and dropped. Raises UserError.

    sight: how the model sees images of rows; without, none is looked at.
    """
    if isinstance(data, PairData):
        return load_pairs(path, model_folder, data, sight)
    if isinstance(data, UnpairedData):
        return load_unpaired(path, model_folder, data, sight)
    return load_demonstrations(path, model_folder, data, sight)


def rows_by_set(rows: Rows, data: AnyData) -> dict[str, IntArray]:
    """The rows of each set with a share, as `mix.named_rows` has them. Raises UserError."""
    each: Sequence[AnyRow] = rows.rows
    named = ((demonstrations_of(row)[0].id, name) for row, name in zip(each, rows.set_names, strict=True))
    return named_rows(named, data)


def demonstrations_of(row: AnyRow) -> tuple[Demonstration, ...]:
    """The tokenised texts of a row: one, or the chosen and the rejected one."""
    if isinstance(row, Unpaired):
        return (row.answer,)
    return (row.chosen, row.rejected) if isinstance(row, Pair) else (row,)
