"""A deterministic walk over rows, epoch after epoch, whose place can be saved. Not for the rows themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.core.errors import UserError
from megarl.core.types import IntArray
from megarl.data.digests import NO_DIGESTS, Digests, differing


class Cursor:
    """Hands out row indices. The order of an epoch depends on (seed, epoch) alone, so a saved place is two numbers."""

    def __init__(
        self,
        num_rows: int,
        seed: int,
        *,
        shuffle: bool,
        what: str,
        digests: Digests = NO_DIGESTS,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        """num_rows: rows of an epoch, at least 1. what: the rows' name, for messages. digests: of what the rows say.

        mix: shares of sets of rows, where the order has such (mix.py).
        """
        if num_rows < 1:
            raise ValueError(f"{what}: a cursor needs at least one row; got {num_rows}")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._what = what
        self._digests = dict(digests)
        self._mix = None if mix is None else dict(mix)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> float:
        """Passes handed out so far, the one under way as a fraction."""
        return self._epoch + self._position / self._num_rows

    def take(self, count: int) -> IntArray:
        """The next `count` row indices, [count]; crosses into as many further epochs as it takes. A copy goes on by itself."""
        parts = [np.zeros(0, np.int64)]
        while count > 0:
            if self._position == self._num_rows:
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + count]
            parts.append(part)
            self._position += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def state(self) -> dict[str, Any]:
        """The place, and what it is a place in; plain numbers, for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self._num_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "digests": self._digests,
            "mix": self._mix,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place. Raises UserError where rows, seed or shuffling have changed since."""
        now = self.state()
        keys = [key for key in ("num_rows", "seed", "shuffle", "mix") if state.get(key) != now[key]]
        changed = [f"{key} was {state.get(key)} and is {now[key]}" for key in keys]
        if changed := changed or [f"other {name}" for name in differing(state, self._digests)]:
            detail = ", ".join(changed)
            raise UserError(
                f"{self._what}: the order of the rows is not the one that the checkpoint was made with ({detail}). "
                "Resume with the same data and seed, or start a new run."
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(self._num_rows, dtype=np.int64)
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_rows).astype(np.int64)
