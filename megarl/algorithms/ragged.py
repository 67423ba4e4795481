"""Arithmetic over ragged sequences that lie end to end in one array, on numpy. No meaning is given to the numbers here.

A batch of S sequences with T positions in all is `cu_seqlens` [S + 1] (from 0 to T) and `mask` [T], which says what
positions count: those of labels that are trained on. Sequences may be empty, or have no position that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, IntArray

BLOCK = 32
PIECE = 1 << 18
Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.floating[Any] | np.integer[Any] | np.bool_]
Bounds = NDArray[np.integer[Any]]


class Trained(NamedTuple):
    """The positions that count, without the others: K of T.

    where: their indices, [K], or all of them as a slice. bounds: [S + 1], where each sequence starts among the K.
    last: index among the K of the last one of each sequence that has any.
    """

    where: IntArray | slice
    bounds: IntArray
    last: IntArray

    @property
    def num(self) -> int:
        """K."""
        return int(self.bounds[-1])

    @property
    def counts(self) -> IntArray:
        """Positions that count in each sequence: [S]."""
        return np.diff(self.bounds)


def check_ragged(mask: Mask, cu_seqlens: Bounds, **columns: Floats) -> None:
    """Raises ValueError where cu_seqlens does not rise from 0 to T, or a column is not [T]; T is the length of mask."""
    num = len(mask)
    if not len(cu_seqlens) or cu_seqlens[0] != 0 or cu_seqlens[-1] != num or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to {num}, the length of mask; got {list(cu_seqlens)[:8]}")
    for name, column in columns.items():
        if column.shape != (num,):
            raise ValueError(f"{name} must be [T] as mask is, {(num,)}; got {column.shape}")


def check_finite(mask: Mask, **columns: Floats) -> None:
    """Raises ValueError, with the place, where a column [T] is not finite inside of the mask."""
    for name, column in columns.items():
        bad = np.flatnonzero((mask != 0) & ~np.isfinite(column))
        if len(bad):
            raise ValueError(f"{name} must be finite where the mask is set; position {bad[0]} is {column[bad[0]]}")


def trained(mask: Mask, cu_seqlens: Bounds) -> Trained:
    """Where the mask is not 0."""
    chosen = mask != 0
    where: IntArray | slice = slice(None)
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    if not chosen.all():
        where = np.flatnonzero(chosen)
        bounds = np.searchsorted(where, bounds)
    ends = bounds[1:]
    return Trained(where, bounds, ends[ends > bounds[:-1]] - 1)


def pieces(cu_seqlens: Bounds) -> Iterator[tuple[slice, IntArray]]:
    """Whole sequences, about PIECE tokens at a time: their place in a column, and their own cu_seqlens from 0.

    Work on a piece stays in the processor's cache and in memory that is at hand: new pages cost more than arithmetic.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    first = 0
    while first < len(bounds) - 1:
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + PIECE, side="right")) - 1)
        yield slice(int(bounds[first]), int(bounds[stop])), bounds[first : stop + 1] - bounds[first]
        first = stop


def scatter(values: Floats, at: Trained, out: FloatArray) -> None:
    """Write values of the positions that count [K] to their places in `out` [T], and 0 elsewhere."""
    if not isinstance(at.where, slice):
        out[:] = 0
    out[at.where] = values


def sequence_sums(values: Floats, mask: Mask, cu_seqlens: Bounds) -> NDArray[np.float64]:
    """Sum of each sequence's values where the mask is set: [S] float64; 0 where there are none.

    The same to the bit whatever lies before and behind a sequence.
    """
    check_ragged(mask, cu_seqlens, values=values)
    at = trained(mask, cu_seqlens)
    sums = np.zeros(len(at.counts), np.float64)
    some = at.counts > 0
    if some.any():
        sums[some] = np.add.reduceat(values[at.where].astype(np.float64), at.bounds[:-1][some])
    return sums


def spread(per_sequence: Floats, mask: Mask, cu_seqlens: Bounds) -> FloatArray:
    """Each sequence's number [S] at its positions where the mask is set, 0 elsewhere: [T] float32."""
    check_ragged(mask, cu_seqlens)
    at = trained(mask, cu_seqlens)
    if len(per_sequence) != len(at.counts):
        raise ValueError(f"one number a sequence is needed: {len(at.counts)}; got {len(per_sequence)}")
    result = np.empty(len(mask), np.float32)
    scatter(np.repeat(np.asarray(per_sequence, np.float32), at.counts), at, result)
    return result


def reverse_scan(terms: Floats, decays: Floats) -> Floats:
    """y[t] = terms[t] + decays[t] * y[t + 1], from the end, with y = 0 behind it: [K], of the type of `terms`.

    All blocks of 32 positions are scanned at once, side by side, as if nothing followed them; the same scan over the
    blocks' first values then says what follows each. That keeps the work in numpy, and rounding errors within a block.
    """
    num = len(terms)
    if num <= BLOCK:
        return _scan_loop(terms, decays)
    blocks = -(-num // BLOCK)
    scanned = _side_by_side(terms, blocks)
    reach = _side_by_side(decays, blocks)  # becomes: by how much what follows a block counts at each position
    product = np.empty(blocks, scanned.dtype)
    for row in range(BLOCK - 2, -1, -1):
        np.multiply(reach[row], scanned[row + 1], out=product)
        scanned[row] += product
        reach[row] *= reach[row + 1]
    firsts = reverse_scan(scanned[0].astype(np.float64), reach[0].astype(np.float64))
    follows = np.append(firsts[1:], 0.0).astype(scanned.dtype)
    reach *= follows
    scanned += reach
    return scanned.T.reshape(-1)[:num]


def _side_by_side(values: Floats, blocks: int) -> Floats:
    """[BLOCK, blocks]: column b holds block b; the last is filled up with zeros."""
    whole = len(values) // BLOCK
    table = np.empty((BLOCK, blocks), values.dtype)
    table[:, :whole] = values[: whole * BLOCK].reshape(whole, BLOCK).T
    if whole < blocks:
        rest = values[whole * BLOCK :]
        table[: len(rest), whole] = rest
        table[len(rest) :, whole] = 0
    return table


def _scan_loop(terms: Floats, decays: Floats) -> Floats:
    result = np.empty_like(terms)
    following = 0.0
    for index in range(len(terms) - 1, -1, -1):
        following = float(terms[index]) + float(decays[index]) * following
        result[index] = following
    return result
