"""Kernels of the deterministic mode on a CPU: a row's numbers do not depend on the other rows, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megarl.serving import sglang_cpu_invariant
from megarl.serving.sglang_cpu_invariant import (
    BLOCKS,
    VECTOR,
    Products,
    agreeing_blocks,
    bmm,
    elementwise,
    is_batch_invariant_mode_enabled,
    row_blocks,
)

ROWS = 70


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As the platform starts servers."""
    torch.set_num_threads(1)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rows_stand_alone(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """For every number of rows, and where a row stands; returns all of them."""
    everything = function(rows)
    for count in range(1, len(rows)):
        assert torch.equal(function(rows[:count]), everything[:count]), count
        assert torch.equal(function(rows[-count:].contiguous()), everything[-count:]), count
    return everything


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(64, 192), (48, 100), (300, 33), (1, 1)])
def test_products(width: int, columns: int, dtype: torch.dtype) -> None:
    weight = random(columns, width, dtype=dtype).t()
    products, rows = Products(), random(ROWS, width, dtype=dtype)
    found = assert_rows_stand_alone(lambda part: products.mm(part, weight), rows)
    torch.testing.assert_close(found, rows @ weight)
    bias = random(columns, dtype=dtype)
    added = assert_rows_stand_alone(lambda part: products.addmm(bias, part, weight, alpha=0.5), rows[:9])
    torch.testing.assert_close(added, bias + 0.5 * found[:9])


def test_batches_of_products() -> None:
    rows, weight = random(3, ROWS, 40), random(3, 40, 24)
    found = assert_rows_stand_alone(
        lambda part: bmm(part.transpose(0, 1), weight).transpose(0, 1), rows.transpose(0, 1)
    )
    torch.testing.assert_close(found.transpose(0, 1), rows @ weight)


@pytest.mark.parametrize("width", [16, 48, 64, 100])
@pytest.mark.parametrize("name", ["exp", "log", "sigmoid", "silu", "tanh", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_each_number(name: str, width: int, dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.aten, name)
    rows = random(ROWS, width, dtype=dtype).abs()
    found = assert_rows_stand_alone(partial(elementwise, operator.out), rows)
    torch.testing.assert_close(found, operator(rows))


def test_torchs_own_products_do_depend_on_the_number_of_rows_here() -> None:
    """What all this is for; a CPU on which it is not so may drop it."""
    rows, weight = random(64, 300), random(300, 33)
    assert any(not torch.equal(rows[:count] @ weight, (rows @ weight)[:count]) for count in range(1, 64))


def test_blocks_cover_the_rows_once() -> None:
    assert list(row_blocks(107, (64, 32, 8))) == [(0, 64), (64, 32), (96, 8), (104, 8)]
    assert list(row_blocks(0, (4,))) == []


def test_blocks_that_disagree_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def other_below_sixteen(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        product(rows, weight, out=out)
        return out.add_(1e-6 * (len(rows) < 16))

    monkeypatch.setattr(torch, "mm", other_below_sixteen)
    assert set(agreeing_blocks(random(64, 64))) <= {64, 32, 16}

    def by_place(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return product(rows, weight, out=out).add_(torch.arange(len(rows))[:, None])

    monkeypatch.setattr(torch, "mm", by_place)
    assert agreeing_blocks(random(64, 64)) == (1,), (
        "what a row is given by its place in a block, it has only in blocks of one"
    )


def test_the_stand_in_has_what_sglang_asks_for() -> None:
    assert is_batch_invariant_mode_enabled()
    with pytest.raises(NotImplementedError, match="rms_norm_batch_invariant has no stand-in"):
        sglang_cpu_invariant.rms_norm_batch_invariant()
    assert BLOCKS[-1] == 1 and VECTOR % 32 == 0
