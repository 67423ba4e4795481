"""Ragged batches for the tests beside this: some sequences empty, some without a trained token, some with gaps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Ragged(NamedTuple):
    """T positions, S sequences, and columns of random numbers, which are not finite outside of the mask."""

    mask: np.ndarray
    cu_seqlens: np.ndarray
    columns: tuple[np.ndarray, ...]

    @property
    def sequences(self) -> list[list[int]]:
        """Positions of the trained tokens of each sequence."""
        bounds = zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)
        return [[t for t in range(start, stop) if self.mask[t]] for start, stop in bounds]


def make(lengths: list[int], share: float, seed: int, num_columns: int = 2) -> Ragged:
    """A batch of sequences of these lengths, of which about that share of positions is trained on."""
    random = np.random.default_rng(seed)
    num = sum(lengths)
    mask = (random.random(num) < share).astype(np.float32)
    columns = tuple(np.where(mask, random.normal(size=num), np.nan).astype(np.float32) for _ in range(num_columns))
    return Ragged(mask, np.cumsum([0, *lengths]).astype(np.int32), columns)


batches = st.builds(
    make,
    st.lists(st.integers(0, 60), max_size=5),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.integers(0, 2**32 - 1),
)
