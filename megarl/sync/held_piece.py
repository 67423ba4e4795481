"""Parts of HF's tensors, as ranks of a server hold them (held.py, held_tower.py). Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_PADDING = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
MLP_PADDING = 32  # DEFAULT_MOE_PADDING_SIZE, for a rank's share of any MLP


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of an HF tensor, of these columns: (first, behind the last); None is all.

    below: rows of zeros behind them. beside: zeros behind each row. expert: of a tensor of all experts the one whose matrix, as
    [out, in], or vector is meant; where it is None, rows of such a tensor are those of all experts.
    """

    tensor: str
    start: int
    stop: int
    columns: tuple[int, int] | None = None
    below: int = 0
    beside: int = 0
    expert: int | None = None


def share(size: int, padded: int, tp: int, rank: int) -> tuple[int, int, int]:
    """[start, stop) that a rank has of what is cut, and the zeros behind it. padded: the whole size with them."""
    each, rest = divmod(padded, tp)
    assert rest == 0, (size, padded, tp)
    start, stop = min(rank * each, size), min((rank + 1) * each, size)
    return start, stop, each - (stop - start)


def vocabulary_size(size: int, tp: int) -> int:
    """What a table of embeddings is filled up to."""
    once = up(size, VOCAB_PADDING)
    return once if once % tp == 0 else up(size, VOCAB_PADDING * tp)


def up(size: int, multiple: int) -> int:
    """The next multiple that is no less."""
    return -(-size // multiple) * multiple
