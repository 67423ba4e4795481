"""bench/peers_algorithms without verl: its own side, and that a number which differs is found."""

from __future__ import annotations

import numpy as np
import pytest

from bench.peers_algorithms import (
    DIFFERENCES,
    TOLERANCE,
    compare,
    factor,
)
from bench.support.our_algorithms import QUICK, Batch, make_batch, our_side


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(QUICK)


@pytest.fixture
def theirs(batch: Batch) -> dict[str, np.ndarray]:
    """What a verl would say that agrees."""
    found = {}
    for name, call in our_side(batch).items():
        result = call()
        for number, part in enumerate(result if isinstance(result, tuple) else (result,)):
            padded = batch.padded(part) if np.ndim(part) else part
            found[f"{name}/{number}"] = padded / factor(name, batch)
        found[f"{name}/seconds"] = np.float64(1.0)
    return found


def test_a_side_that_agrees_is_found_equal(batch: Batch, theirs: dict[str, np.ndarray]) -> None:
    rows = compare(batch, theirs, repeats=1)
    assert len(rows) == 26 and all(row["error"] < TOLERANCE for row in rows)


@pytest.mark.parametrize("name", ["GRPO/0", "GAE/0", "GSPO/1", "KL k3/0", "TIS and rejection/0"])
def test_a_number_that_differs_is_found(name: str, batch: Batch, theirs: dict[str, np.ndarray]) -> None:
    changed = theirs[name].copy()
    row, column = np.argwhere(batch.padded(batch.mask) > 0)[3]
    changed[row, column] += 0.01 * np.abs(changed).max()
    rows = compare(batch, {**theirs, name: changed}, repeats=1)
    assert [row["name"] for row in rows if row["error"] > TOLERANCE] == [name.partition("/")[0]]


def test_the_batch_has_what_tells_sides_apart(batch: Batch) -> None:
    spread = [np.ptp(batch.rewards[batch.groups == group]) for group in range(QUICK.groups)]
    assert min(spread) == 0 < max(spread)
    holes = batch.mask[:-1] - batch.mask[1:]
    assert (holes > 0).sum() > 1, "turns of an environment inside of responses"
    rejected = batch.lengths[np.add.reduceat(our_side(batch)["TIS and rejection"](), batch.cu_seqlens[:-1]) == 0]
    assert 0 < len(rejected) < len(batch.lengths)
    assert 0 < batch.mask.mean() < 1 and batch.lengths.sum() == batch.mask.sum()


def test_differences_are_of_functions_that_are_compared(batch: Batch) -> None:
    names = set(our_side(batch))
    assert {name for each in DIFFERENCES for name in each.of} <= names
    assert factor("GRPO", batch) == pytest.approx(np.sqrt(4 / 3)) and factor("Dr.GRPO", batch) == 1
