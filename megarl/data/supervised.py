"""Rows of supervised runs of any kind: demonstrations or pairs, as the recipe's data section says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.core.types import IntArray
from megarl.data.mix import named_rows
from megarl.data.pairs import Pair, check_pairs, load_pairs
from megarl.data.row_set import RowSet
from megarl.data.sft import Demonstration, check_demonstrations, load_demonstrations
from megarl.recipe.supervised import PairData, SftData

Rows = RowSet[Demonstration] | RowSet[Pair]


def check_supervised(path: Path, data: SftData | PairData) -> int:
    """Check the rows of a file without a tokenizer; returns how many there are. Raises UserError naming the place."""
    return check_pairs(path, data) if isinstance(data, PairData) else check_demonstrations(path, data)


def load_supervised(path: Path, model_folder: Path, data: SftData | PairData) -> Rows:
    """Read and tokenise a whole file; rows over data.max_tokens are counted and dropped. Raises UserError."""
    if isinstance(data, PairData):
        return load_pairs(path, model_folder, data)
    return load_demonstrations(path, model_folder, data)


def rows_by_set(rows: Rows, data: SftData | PairData) -> dict[str, IntArray]:
    """The rows of each set with a share, as `mix.named_rows` has them. Raises UserError."""
    each: Sequence[Demonstration | Pair] = rows.rows
    named = ((demonstrations_of(row)[0].id, name) for row, name in zip(each, rows.set_names, strict=True))
    return named_rows(named, data)


def demonstrations_of(row: Demonstration | Pair) -> tuple[Demonstration, ...]:
    """The tokenised texts of a row: one, or the chosen and the rejected one."""
    return (row.chosen, row.rejected) if isinstance(row, Pair) else (row,)
