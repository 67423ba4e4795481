"""Log-probs of labels and entropy from logits whose vocabulary is split over tensor-parallel ranks.

Full logits are never gathered: two collectives of a few numbers per token replace them. No second `[T, V]` float32
tensor lives longer than one chunk of tokens: the backward pass computes the softmax again instead of keeping it.

Notation, for one token with logits x, temperature c and z = x / c:

    lse  = log sum_j exp(z_j)          log p_y = z_y - lse          H = lse - sum_j p_j z_j
    d log p_y / d x_j = (1[j = y] - p_j) / c                        d H / d x_j = -p_j (log p_j + H) / c

A token may have a set S of further labels; all others together are one more class, of probability R = sum of p_j outside S:

    log R = log sum_(j not in S) exp(z_j) - lse                     d log R / d x_j = (1[j not in S] p_j / R - p_j) / c
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

# float32 elements of a temporary, 4 MiB each; `Platform.chunk_elements` knows what suits a device.
CHUNK_ELEMENTS = 2**20
# Nats: a rest of the vocabulary that is less likely counts as this, without a gradient. So has one of no entries a logarithm.
LEAST_LOG_REST = -60.0


class TokenScores(NamedTuple):
    """What the policy says of each label."""

    logprobs: Tensor  # [T] float32, natural log
    entropy: Tensor | None  # [T] float32, nats; None where it was not asked for
    top: Tensor | None = None  # [T, k + 1] float32, log-probs of k given entries and of all others together; likewise


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    overwrite_logits: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    top_ids: Tensor | None = None,
) -> TokenScores:
    """Log-probs of `labels`, and the entropy, under softmax(logits / temperature).

    logits: [T, V / tp], any float dtype: this rank's slice of the vocabulary; rank r starts at entry r V / tp.
    labels: [T] int64 in [0, vocab_size). vocab_size: entries from there on are padding and get no probability.
    temperature: divides the logits, > 0. group: the tensor-parallel ranks; None is one rank.
    with_entropy: also compute the entropy. entropy_grad: let gradients flow through it (an entropy bonus needs that).
    overwrite_logits: the backward pass writes the gradient of the logits over them and takes no other [T, V / tp]; nobody
    may read them any more then, and a second backward pass raises torch's RuntimeError.
    top_ids: [T, k] int64 in [0, vocab_size), those of a token distinct: also the log-probs of these, and of the rest.

    Computes in float32 (float64 for float64 logits). The result is the same on every rank of the group; so must be the
    gradient that comes back. Raises ValueError for shapes that do not agree or a temperature that is not positive.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be [T, V / tp] and labels [T]; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    part = _slice(logits.shape[1], vocab_size, group)
    settings = _Settings(
        part, temperature, group, with_entropy, with_entropy and entropy_grad, overwrite_logits, chunk_elements
    )
    ids = labels[:, None] if top_ids is None else torch.cat([labels[:, None], top_ids], dim=1)
    logprobs, entropy, top = _VocabParallelLogprob.apply(logits, ids, settings)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropy if with_entropy else None, None if top_ids is None else top)


def vocab_parallel_top(
    logits: Tensor,
    k: int,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """The k likeliest entries of each token, likeliest first: [T, k] int64, the same on every rank of the group.

    logits: [T, V / tp], as for `vocab_parallel_logprobs`. Each rank chooses among its own entries, and all among what these
    chose: k logits and k ids of each token and rank are exchanged. Which of equal logits are chosen is left to torch. Raises
    ValueError where k is not from 1 to vocab_size.
    """
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k must be from 1 to the vocabulary of {vocab_size}, got {k}")
    part = _slice(logits.shape[1], vocab_size, group)
    here, step = min(k, part.width), max(1, chunk_elements // max(1, part.width))
    values = logits.new_full((logits.shape[0], k), float("-inf"))
    ids = torch.zeros((logits.shape[0], k), dtype=torch.int64, device=logits.device)
    for first in range(0, len(logits), step):  # without padding a slice is not contiguous, and topk copies it
        rows = slice(first, first + step)
        values[rows, :here], ids[rows, :here] = logits[rows, : part.width].topk(here, dim=1)
    ids += part.start
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return ids
    all_values, all_ids = ([torch.empty_like(mine) for _ in range(ranks)] for mine in (values, ids))
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_ids, ids, group=group)
    return torch.cat(all_ids, dim=1).gather(1, torch.cat(all_values, dim=1).topk(k, dim=1).indices)


class _Slice(NamedTuple):
    """This rank's part of the vocabulary: entries [start, start + width), without padding."""

    start: int
    width: int


class _Settings(NamedTuple):
    part: _Slice
    temperature: float
    group: dist.ProcessGroup | None
    with_entropy: bool
    entropy_grad: bool
    overwrite_logits: bool
    chunk_elements: int


def _slice(columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> _Slice:
    start = (dist.get_rank(group) if group is not None else 0) * columns
    return _Slice(start, min(max(vocab_size - start, 0), columns))


def _chunks(
    logits: Tensor, settings: _Settings, dtype: torch.dtype, num_temporaries: int
) -> Iterator[tuple[slice, Tensor]]:
    """Cuts of the tokens, each with temporaries [num_temporaries, rows, width]; none where a rank holds only padding.

    All cuts share the temporaries' memory: taking new memory may cost more than filling it.
    """
    num_tokens, width = logits.shape[0], settings.part.width
    if num_tokens == 0 or width == 0:
        return
    step = min(num_tokens, max(1, settings.chunk_elements // width))
    memory = torch.empty((num_temporaries, step, width), dtype=dtype, device=logits.device)
    for first in range(0, num_tokens, step):
        last = min(first + step, num_tokens)
        yield slice(first, last), memory[:, : last - first]


def _shifted(logits: Tensor, rows: slice, shift: Tensor, settings: _Settings, out: Tensor) -> Tensor:
    """One chunk of z - shift, without padding, in `out`: [rows, width]. shift: [T]."""
    x = logits[rows, : settings.part.width]
    return torch.add(-shift[rows, None], x, alpha=1.0 / settings.temperature, out=out)


def _local_labels(labels: Tensor, part: _Slice) -> tuple[Tensor, Tensor]:
    """Column of each label in this rank's slice (0 where it is elsewhere), and whether it is here: as labels, and bool."""
    column = labels - part.start
    here = (column >= 0) & (column < part.width)
    return torch.where(here, column, 0), here


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def _drop_(values: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """Put 0 in these columns of values [rows, width] that are not negative. column, here: [rows, k], of `_local_labels`."""
    zeros = torch.where(here, 0.0, float("inf")).to(values.dtype)
    return values.scatter_reduce_(1, column, zeros, "amin")


class _VocabParallelLogprob(torch.autograd.Function):
    """labels: [T, 1 + k]. Gives log-probs of the first [T], the entropy [T], and log-probs of the others and of the rest.

    The last are [T, k + 1]; what is not asked for is empty.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        (num_tokens, num_labels), part = labels.shape, settings.part
        with_top = num_labels > 1
        column, here = _local_labels(labels, part)
        peak = torch.full((num_tokens,), float("-inf"), dtype=dtype, device=logits.device)
        if part.width:
            # The maximum needs no float32 copy: rounding keeps the order.
            peak = logits[:, : part.width].amax(dim=1).to(dtype) / settings.temperature
        _all_reduce(peak, dist.ReduceOp.MAX, settings.group)
        # Rows: sum exp(z - peak), the labels' z - peak, sum exp(z - peak) (z - peak), sum exp(z - peak) of the rest.
        num_rows = 1 + num_labels + settings.with_entropy + with_top
        sums = torch.zeros((num_rows, num_tokens), dtype=dtype, device=logits.device)
        for rows, memory in _chunks(logits, settings, dtype, 2 if settings.with_entropy else 1):
            shifted = _shifted(logits, rows, peak, settings, out=memory[0])
            sums[1 : 1 + num_labels, rows] = shifted.gather(1, column[rows]).where(here[rows], 0).T
            weights = torch.exp(shifted, out=memory[-1])
            sums[0, rows] = weights.sum(dim=1)
            if settings.with_entropy:
                sums[1 + num_labels, rows] = shifted.mul_(weights).sum(dim=1)
            if with_top:
                sums[-1, rows] = _drop_(weights, column[rows, 1:], here[rows, 1:]).sum(dim=1)
        _all_reduce(sums, dist.ReduceOp.SUM, settings.group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1 + num_labels] / sums[0] if settings.with_entropy else log_sum.new_empty(0)
        logprobs, top = (sums[1 : 1 + num_labels] - log_sum).T, log_sum.new_empty(0)
        if with_top:
            rest = (sums[-1].log() - log_sum).clamp(min=LEAST_LOG_REST)
            top = torch.cat([logprobs[:, 1:], rest[:, None]], dim=1)
        ctx.save_for_backward(logits, column, here, peak + log_sum, entropy, top)
        ctx.settings = settings
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs[:, 0].contiguous(), entropy, top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, here, lse, entropy, top = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        settings: _Settings = ctx.settings
        # What multiplies p in all formulas has this factor.
        of_logprobs, of_entropy, of_top = (grad / -settings.temperature for grad in grads)
        of_all = of_logprobs
        if with_top := column.shape[1] > 1:
            of_top[:, -1] = of_top[:, -1].where(top[:, -1] > LEAST_LOG_REST, 0)
            of_all, of_rest = of_logprobs + of_top.sum(dim=1), -of_top[:, -1] * torch.exp(-top[:, -1])
        result = logits.detach() if settings.overwrite_logits else torch.empty_like(logits)
        result[:, settings.part.width :] = 0
        for rows, memory in _chunks(logits, settings, lse.dtype, 2 if settings.entropy_grad else 1):
            logp = _shifted(logits, rows, lse, settings, out=memory[0])
            grad, outer = torch.exp(logp, out=memory[-1]), of_all[rows, None]
            if settings.entropy_grad:
                outer = logp.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(outer)
            if with_top:
                # The rest has a factor of its own, which may be so large that nothing of theirs would be left beside it.
                chosen, present = column[rows, 1:], here[rows, 1:]
                of_chosen = grad.gather(1, chosen) * (outer.gather(1, chosen) if settings.entropy_grad else outer)
                of_chosen = (of_chosen - of_top[rows, :-1]).where(present, 0)
                _drop_(grad, chosen, present)
                outer = outer.add_(of_rest[rows, None])  # in memory of this pass
            grad.mul_(outer)
            if with_top:
                grad.scatter_add_(1, chosen, of_chosen)
            grad.scatter_add_(1, column[rows, :1], (of_logprobs[rows] * -here[rows, 0].to(grad.dtype))[:, None])
            result[rows, : settings.part.width] = grad
        return result, None, None
