"""Sums over sequences on tensors: against a loop, and the same when sequences are cut over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.sequences import sequence_index, sequence_log_ratio, sequence_sums, spread_means
from tests.algorithms.ragged_cases import Ragged, batches


def tensors(batch: Ragged) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(array) for array in (*batch.columns, batch.mask, batch.cu_seqlens))


def test_hand_computed() -> None:
    mask, bounds = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 3, 3, 4])
    logprobs = torch.tensor([-1.0, -2.0, float("nan"), -3.0])
    old = torch.tensor([-2.0, -5.0, 0.0, -1.0])
    assert sequence_index(bounds).tolist() == [0, 0, 0, 2]
    assert sequence_log_ratio(logprobs, old, mask, bounds).tolist() == [2, 2, 2, -2]


@given(batches)
def test_equals_the_loop(batch: Ragged) -> None:
    result = sequence_log_ratio(*tensors(batch))
    for number, sequence in enumerate(batch.sequences):
        total = sum(float(batch.columns[0][t]) - float(batch.columns[1][t]) for t in sequence)
        start, stop = batch.cu_seqlens[number : number + 2]
        assert result[start:stop].tolist() == pytest.approx([total / max(1, len(sequence))] * (stop - start), abs=1e-4)


@given(batches, st.integers(0, 99))
def test_parts_of_sequences_add_up(batch: Ragged, seed: int) -> None:
    logprobs, old, mask, bounds = tensors(batch)
    difference, index, num = (logprobs - old).where(mask > 0, 0), sequence_index(bounds), len(bounds) - 1
    parts = torch.randint(0, 2, index.shape, generator=torch.Generator().manual_seed(seed)) > 0
    sums, counts = (
        sequence_sums(values[parts], index[parts], num) + sequence_sums(values[~parts], index[~parts], num)
        for values in (difference, mask)
    )
    whole = sequence_log_ratio(logprobs, old, mask, bounds)
    torch.testing.assert_close(spread_means(sums, counts, index[parts]), whole[parts], rtol=1e-4, atol=1e-5)


def test_sums_are_differentiable_and_not_in_half_precision() -> None:
    values = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    sums = sequence_sums(values, torch.tensor([0, 1, 1]), 3)
    assert sums.dtype == torch.float32 and sums.tolist() == [1, 2, 0]
    sums.square().sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2, 4, 4]
