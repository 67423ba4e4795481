"""Where buckets lie in one piece of memory that they take turns in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.parts import ALIGNMENT

MOST_BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Turn:
    """A bucket begins at byte `start`. after: the number of the newest bucket that lies there before it; None where none does."""

    start: int
    after: int | None


def turns(sizes: Sequence[int], num_bytes: int) -> list[Turn]:
    """The turns of buckets of these sizes, end to end and around. num_bytes: of the memory, as much as the largest or more."""
    assert max(sizes, default=0) <= num_bytes, (max(sizes), num_bytes)
    found: list[Turn] = []
    lying: list[tuple[int, int, int]] = []  # number, start, stop; the oldest first
    at = 0
    for number, size in enumerate(sizes):
        if at + size > num_bytes:
            at = 0
        stop = at + size
        under = [other for other, start, end in lying if start < stop and at < end]
        # They are read in their order: whatever is older than one that must be done is done as well.
        after = under[-1] if under else None
        lying = [each for each in lying if after is None or each[0] > after]
        lying.append((number, at, stop))
        found.append(Turn(at, after))
        at = -(-stop // ALIGNMENT) * ALIGNMENT
    return found


def bucket_limit(bucket_bytes: int) -> int:
    """The size of the buckets that take turns in memory of two buckets of `bucket_bytes`, which four do.

    One is written while the server loads another and has a third to go on with. Large enough that a bucket's calls cost little
    beside its bytes, small enough that the first and the last, which nothing overlaps, are a small part of a sync.
    """
    return max(1, min(bucket_bytes // 2, MOST_BUCKET_BYTES))


def ring_bytes(largest: int, bucket_bytes: int) -> int:
    """Shared memory that a sync takes.

    largest: bytes of the largest bucket, or of the model's largest tensor, which is sent whole. bucket_bytes: as `bucket_limit`
    takes them.
    """
    return max(2 * (largest + ALIGNMENT), 4 * bucket_limit(bucket_bytes))
