"""A stand-in for SGLang's batch-invariant kernels (`sglang.srt.batch_invariant_ops`), which are Triton's, on a CPU.

In deterministic mode a token's numbers must not depend on what else is in its batch. On a CPU they do in two ways. A matrix
product takes another kernel for few rows than for many; and functions such as log are computed for eight or sixteen numbers at
once, and a little differently for what is left over at the end of a tensor. So products run in blocks of rows whose results
were found to agree bit for bit, and tensors are filled up to whole vectors. The sampler, too, has rows draw by themselves.

Attention needs nothing: SGLang's torch_native backend computes each request alone. Written for one thread a process, as
the platform starts servers. For SGLang's deterministic mode on `cpu` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

# Rows of a block, and the numbers in a vector of any CPU, unrolled.
BLOCKS = (64, 32, 16, 8, 4, 2, 1)
VECTOR = 64
UNARY = ("exp", "log", "sigmoid", "silu", "tanh")


def row_blocks(num_rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, size) of blocks of these sizes, largest first, that cover the rows; the last may reach beyond them."""
    start = 0
    while start < num_rows:
        size = next((size for size in sizes if size <= num_rows - start), sizes[-1])
        yield start, size
        start += size


def agreeing_blocks(weight: Tensor) -> tuple[int, ...]:
    """Sizes of blocks that give a row the same bits, wherever it stands in one; descending, never empty.

    weight: [K, N]. Tried on random rows: another order of summation shows in some of the N x 64 sums.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(BLOCKS[0], weight.shape[0], generator=generator).to(weight.dtype)

    def by(size: int, shift: int) -> Tensor:
        shifted = rows.roll(shift, 0).contiguous()
        parts = [torch.mm(part, weight, out=part.new_empty(size, weight.shape[1])) for part in shifted.split(size)]
        return torch.cat(parts).roll(-shift, 0)

    [largest, *_] = (size for size in BLOCKS if torch.equal(by(size, 0), by(size, 1)))
    wanted = by(largest, 0)
    return tuple(size for size in BLOCKS if size <= largest and torch.equal(by(size, 0), wanted))


class Products:
    """Matrix products whose rows do not depend on each other's number."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def mm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows: [M, K], weight: [K, N] -> [M, N]."""
        kind = (weight.shape, weight.stride(), weight.dtype)
        if kind not in self._known:
            self._known[kind] = agreeing_blocks(weight)
        sizes = self._known[kind]
        num_rows = rows.shape[0]
        rows = _filled_up(rows.contiguous(), -num_rows % sizes[-1])
        output = rows.new_empty(rows.shape[0], weight.shape[1])
        for start, size in row_blocks(num_rows, sizes):
            torch.mm(rows[start : start + size], weight, out=output[start : start + size])
        return output[:num_rows]

    def addmm(self, bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * bias + alpha * rows @ weight."""
        return self.mm(rows, weight).mul_(alpha).add_(bias, alpha=beta)


def bmm(rows: Tensor, weight: Tensor) -> Tensor:
    """rows: [B, M, K], weight: [B, K, N] -> [B, M, N]: row by row, for latent attention and little else."""
    output = rows.new_empty(rows.shape[0], rows.shape[1], weight.shape[2])
    for row in range(rows.shape[1]):
        one = torch.bmm(rows[:, row : row + 1].contiguous(), weight, out=rows.new_empty(len(rows), 1, output.shape[2]))
        output[:, row : row + 1] = one
    return output


def elementwise(function: Callable[..., Tensor], values: Tensor, **options: Any) -> Tensor:
    """A function of each number, computed in whole vectors. function: takes `out`."""
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    if values.dim() and values.shape[-1] % VECTOR == 0:
        return function(values, **options, out=torch.empty_like(values))
    flat = _filled_up(values.contiguous().view(-1), -values.numel() % VECTOR)
    whole: Tensor = function(flat, **options, out=torch.empty_like(flat))
    return whole[: values.numel()].view(values.shape)


def drawn_by_row(simple: Callable[..., Tensor], filtered: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's seeded sampler of top-k and top-p, such that a row's token does not depend on what other rows ask for.

    One row that asks for a filter, or is greedy, has SGLang sort all rows by probability: the noise that else belongs to a token
    then belongs to a rank, and who draws from all tokens draws another one.

    simple, filtered: SGLang's samplers of batches in which no row, and in which some row, is filtered.
    """

    def draw(
        probs: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        need_min_p: bool,
        seed: Tensor | None,
        positions: Tensor,
        *,
        return_filtered_probs: bool = False,
    ) -> Tensor:
        if return_filtered_probs:  # which megarl's requests never ask for
            raise NotImplementedError("the tokens that filters leave are not told in deterministic mode on a CPU")
        found: Tensor = filtered(probs, top_ks, top_ps, min_ps, need_min_p, seed, positions)
        whole = (top_ks >= probs.shape[-1]) & (top_ps >= 1)
        found = torch.where(whole, simple(probs, seed, positions), found)
        return torch.where(top_ks == 1, probs.argmax(-1).to(found.dtype), found)

    return draw


def _filled_up(values: Tensor, count: int) -> Tensor:
    """With so many more rows of ones."""
    return torch.cat([values, values.new_ones(count, *values.shape[1:])]) if count else values


@cache
def _install() -> torch.library.Library:
    """Put these in the place of torch's own in this process; they end with the library that is returned."""
    library = torch.library.Library("aten", "IMPL")
    products = Products()
    operators: dict[str, Callable[..., Tensor]] = {"mm": products.mm, "addmm": products.addmm, "bmm": bmm}
    for name in UNARY:
        operators[name] = partial(elementwise, getattr(torch.ops.aten, name).out)
    operators["log_"] = lambda values: values.copy_(operators["log"](values))
    operators["gelu"] = lambda values, *, approximate="none": elementwise(
        torch.ops.aten.gelu.out, values, approximate=approximate
    )
    for name, operator in operators.items():
        library.impl(name, operator, "CPU", allow_override=True)
    return library


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Called by SGLang as the model loads, in deterministic mode."""
    _install()


def is_batch_invariant_mode_enabled() -> bool:
    """Whether it is on: this module is imported for nothing else."""
    return True


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sglang.srt.batch_invariant_ops.{name} has no stand-in on the CPU platform")

    missing.__name__ = name
    return missing
