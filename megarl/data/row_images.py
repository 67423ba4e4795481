"""PNGs of the images of rows that are trained on: made by threads, those of a step while the step before it is learned from.

Not for what a PNG of an image is (images.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megarl.data.images import pngs
from megarl.data.sft import Demonstration

NUM_THREADS = 8  # PIL decodes and writes beside other threads


class RowImages:
    """Holds what was begun last, and nothing else: a step's PNGs may be gigabytes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")
        self._begun: dict[int, Future[tuple[bytes, ...]]] = {}

    def begin(self, rows: Sequence[Demonstration]) -> None:
        """Make those of rows that will be asked for, and which the caller holds until then; forget those begun before."""
        self._begun = self._asked(rows)

    def of(self, rows: Sequence[Demonstration]) -> list[tuple[bytes, ...]]:
        """Those of each row; of a row that is there twice, and of the answers of a pair, which share them, the same ones.

        Raises UserError for an image that is damaged.
        """
        found = self._begun | self._asked([row for row in rows if id(row.images) not in self._begun])
        return [found[id(row.images)].result() if row.images else () for row in rows]

    def _asked(self, rows: Sequence[Demonstration]) -> dict[int, Future[tuple[bytes, ...]]]:
        each = {id(row.images): row for row in rows if row.images}
        return {key: self._pool.submit(pngs, row.images, row.id) for key, row in each.items()}
