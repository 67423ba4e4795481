"""Sets of rows in given shares: which row comes when. A row's set is the text in one of its fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megarl.core.errors import UserError
from megarl.core.types import IntArray, Prompt
from megarl.core.words import did_you_mean
from megarl.data.cursor import Cursor
from megarl.data.digests import NO_DIGESTS, Digester, Digests
from megarl.recipe.schema import Data
from megarl.recipe.supervised import RowData

RowsBySet = Mapping[str, IntArray]  # indices of the rows of each set, in their order


def rows_by_set(prompts: Sequence[Prompt], data: Data) -> dict[str, IntArray]:
    """As `named_rows`, of prompts."""
    return named_rows(((prompt.id, prompt.metadata.get(data.mix_key)) for prompt in prompts), data)


def named_rows(rows: Iterable[tuple[str, object]], data: Data | RowData) -> dict[str, IntArray]:
    """The rows of each set that data.mix gives a share above 0, by name; nothing where there is no mix.

    rows: the id of each, and what its field data.mix_key has. Raises UserError for a row that names no set of the mix, and for a
    set of the mix that has no rows.
    """
    if not data.mix:
        return {}
    found: dict[str, list[int]] = {name: [] for name in data.mix}
    for index, (row, name) in enumerate(rows):
        if not isinstance(name, str) or name not in found:
            hint = did_you_mean(str(name), found, quoted=True)
            raise UserError(
                f"{row}: its field {data.mix_key!r}, which data.mix_key names, is {name!r}, and data.mix has the sets "
                f"{', '.join(map(repr, found))}.{hint} Give the set a share in data.mix (0 leaves its rows out)."
            )
        found[name].append(index)
    if empty := [name for name, places in found.items() if not places and data.mix[name] > 0]:
        raise UserError(
            f"data.mix: no row to train on is of the set {', '.join(map(repr, empty))} (field {data.mix_key!r}). Correct the "
            "name, or remove it."
        )
    return {name: np.array(places, np.int64) for name, places in found.items() if data.mix[name] > 0}


def shares_of(data: Data | RowData) -> dict[str, float] | None:
    """The sets that are trained on, with their shares; None without a mix."""
    return {name: share for name, share in data.mix.items() if share > 0} or None


def with_sets(digests: Digests, sets: RowsBySet) -> dict[str, str]:
    """The digests of rows, and where they are mixed one of which row is of which set: the order goes by that, too."""
    digester = Digester()
    for name in sorted(sets):
        digester.add({"sets": [name, np.asarray(sets[name]).tolist()]})
    return {**digests, **digester.digests()}


class MixedCursor(Cursor):
    """Hands out rows so that each set has its share of every epoch; an epoch is as many rows as all sets have together.

    A set goes through all of its own rows, in an order of its own, before one of them comes again: one with a large share comes
    several times within an epoch, one with a small share takes several epochs.
    """

    def __init__(
        self,
        sets: RowsBySet,
        shares: Mapping[str, float],
        seed: int,
        *,
        shuffle: bool,
        what: str,
        digests: Digests = NO_DIGESTS,
    ) -> None:
        """sets: as of `rows_by_set`, in whatever order. shares: of each of them, in any unit. The rest: as of Cursor."""
        names = sorted(sets)  # a recipe that names them in another order is the same
        self._sets = [np.asarray(sets[name]) for name in names]
        total = sum(map(len, self._sets))
        self._counts = _rounded([shares[name] for name in names], total)
        mix = {name: shares[name] for name in names}
        super().__init__(total, seed, shuffle=shuffle, what=what, digests=with_sets(digests, sets), mix=mix)

    def _order_of(self, epoch: int) -> IntArray:
        parts = [self._part(at, epoch) for at in range(len(self._sets))]
        together = np.concatenate(parts)
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(together))
        else:  # each set's rows evenly among the others'
            places = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
            order = np.argsort(np.concatenate(places), kind="stable")
        mixed: IntArray = together[order]
        return mixed

    def _part(self, at: int, epoch: int) -> IntArray:
        """A set's rows of an epoch, in its own order."""
        rows, count = self._sets[at], self._counts[at]
        first, end = epoch * count, (epoch + 1) * count  # of all that it ever hands out
        places: IntArray = np.arange(first, end) % len(rows)
        if self._shuffle:
            begun = first // len(rows)
            passes = range(begun, -(-end // len(rows)))
            orders = [np.random.default_rng((self._seed, each, at)).permutation(len(rows)) for each in passes]
            places = np.concatenate(orders)[first - begun * len(rows) :][:count]
        found: IntArray = rows[places]
        return found


def _rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that add up to the total, by the largest remainders; at least 1 each."""
    exact = [share / sum(shares) * total for share in shares]
    counts = [max(1, math.floor(each)) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda at: (counts[at] - exact[at], at))
    for at in by_rest[: max(0, total - sum(counts))]:
        counts[at] += 1
    while sum(counts) > total:  # where many sets are rounded up to 1
        counts[counts.index(max(counts))] -= 1
    return counts
