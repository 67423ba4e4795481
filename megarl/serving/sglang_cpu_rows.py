"""A copy of the running requests' keys and values, a row each: what decode attention on a CPU reads (sglang_cpu_attention.py).

Which request has which row, and how rows are grouped for one call; and attention with sinks, of one request. It knows no SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ROOM = 256  # tokens of a row, at least
UNEVEN = 64  # rows whose lengths differ by no more are attended to together, or by a quarter


@dataclass(frozen=True)
class Fill:
    """A row whose tokens have to be collected from the pool: those of a request, `length` of them."""

    row: int
    request: int
    length: int


class Rows:
    """Which request has which row, and how many tokens the row holds. Rows in use are the first ones, without gaps.

    A request is known by its place in SGLang's table of requests.
    """

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.lengths: list[int] = []
        self._row: dict[int, int] = {}

    def forget(self, requests: Sequence[int]) -> list[tuple[int, int]]:
        """Take the rows of these requests away. Rows (source, target) that have to be moved for it, in order."""
        moves = []
        for request in requests:
            row = self._row.pop(request, None)
            if row is None:
                continue
            last = len(self.requests) - 1
            moved, length = self.requests.pop(), self.lengths.pop()
            if row != last:
                self.requests[row], self.lengths[row], self._row[moved] = moved, length, row
                moves.append((last, row))
        return moves

    def step(self, requests: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[Fill]]:
        """The row of each request in a decode step, and those to be filled. lengths: with the step's token.

        Others than these have to be forgotten before.
        """
        rows, fills = [], []
        for request, length in zip(requests, lengths, strict=True):
            row = self._row.get(request)
            if row is None:
                row = self._row[request] = len(self.requests)
                self.requests.append(request)
                self.lengths.append(0)
            if self.lengths[row] != length - 1 or length == 1:
                fills.append(Fill(row, request, length))
            self.lengths[row] = length
            rows.append(row)
        return rows, fills

    def clear(self) -> None:
        """Forget all."""
        self.__init__()  # type: ignore[misc]


def even_runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of neighbouring rows whose lengths are about the same."""
    first, low, high = 0, 0, 0
    for row, length in enumerate(lengths):
        shortest, longest = (min(low, length), max(high, length)) if row > first else (length, length)
        if longest - shortest > max(UNEVEN, longest // 4):
            yield first, row
            first, shortest, longest = row, length, length
        low, high = shortest, longest
    if lengths:
        yield first, len(lengths)


@dataclass(frozen=True)
class Run:
    """Rows first to last of one call. longest: tokens of its longest row. bias: [rows, 1, 1, longest], None where all are."""

    first: int
    last: int
    longest: int
    bias: Tensor | None


@dataclass(frozen=True)
class Step:
    """A decode step: the row of each request of the batch, [B], where that is not its place; its new token's place, [B]."""

    rows: Tensor
    positions: Tensor
    permuted: bool
    fills: list[Fill]
    runs: list[Run]


class Copy:
    """Keys and values of the running requests by layer: [rows, heads, tokens, dim] each, so that a head's lie together."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self.num_rows = self.num_tokens = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy rows onto others, as far as `length`."""
        for source, target in moves:
            for pair in self.layers.values():
                for each in pair:
                    each[target, :, :length] = each[source, :, :length]

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Make room; False where that would take more memory than the pool itself."""
        if num_rows <= self.num_rows and num_tokens <= self.num_tokens:
            return True
        rows = max(num_rows, self.num_rows)
        tokens = max(2 * num_tokens, ROOM, self.num_tokens)
        if rows * tokens > self._most_tokens:
            rows, tokens = num_rows, self._most_tokens // num_rows
        if tokens < num_tokens:
            return False
        self.layers = {
            layer: (_grown(k, rows, tokens), _grown(v, rows, tokens)) for layer, (k, v) in self.layers.items()
        }
        self.num_rows, self.num_tokens = rows, tokens
        return True

    def layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a layer, made as the pool's are where there are none yet."""
        if number not in self.layers:
            # Zeros: what is masked counts nothing only where it is a number.
            rows, tokens = self.num_rows, self.num_tokens
            k, v = (part.new_zeros(rows, part.shape[1], tokens, part.shape[2]) for part in (keys, values))
            self.layers[number] = k, v
        return self.layers[number]


def _grown(part: Tensor, rows: int, tokens: int) -> Tensor:
    grown = part.new_zeros(rows, part.shape[1], tokens, part.shape[3])
    rows, tokens = min(rows, part.shape[0]), min(tokens, part.shape[2])
    grown[:rows, :, :tokens] = part[:rows, :, :tokens]
    return grown


def make_run(lengths: Sequence[int], first: int, last: int) -> Run:
    """The call for rows first to last - 1 of these lengths."""
    mine = torch.tensor(lengths[first:last])
    longest = int(mine.max())
    if int(mine.min()) == longest:
        return Run(first, last, longest, None)
    beyond = torch.arange(longest)[None] >= mine[:, None]
    bias = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    return Run(first, last, longest, bias[:, None, None])


class Decoder:
    """Attention of decode steps over the copy. Each step: `begin`, then `append` and `attend` for each layer."""

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: of the copy, rows times their room."""
        self._rows, self._copy = Rows(), Copy(most_tokens)

    def forget(self, requests: Sequence[int]) -> None:
        """Give up what is held of these requests."""
        longest = max(self._rows.lengths, default=0)
        self._copy.move(self._rows.forget(requests), longest)

    def begin(self, requests: Sequence[int], lengths: Sequence[int]) -> Step | None:
        """What all layers of a step share; None where the copy has no room. lengths: with the step's token."""
        running = set(requests)
        self.forget([each for each in self._rows.requests if each not in running])
        if not self._copy.fits(len(requests), max(lengths)):
            self._rows.clear()
            return None
        rows, fills = self._rows.step(requests, lengths)
        runs = [make_run(self._rows.lengths, *ends) for ends in even_runs(self._rows.lengths)]
        return Step(torch.tensor(rows), torch.tensor(lengths) - 1, rows != list(range(len(rows))), fills, runs)

    def append(
        self,
        step: Step,
        layer: int,
        pool_keys: Tensor,
        pool_values: Tensor,
        table: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Take a step's new keys and values, [B, KV heads x dim] each, and what is missing from the pool.

        pool_keys, pool_values: [slots, KV heads, dim], the new ones among them. table: [requests, tokens] slots.
        """
        fills = step.fills
        if layer not in self._copy.layers:
            everything = enumerate(zip(self._rows.requests, self._rows.lengths, strict=True))
            fills = [Fill(row, request, length) for row, (request, length) in everything]
        held = self._copy.layer(layer, pool_keys, pool_values)
        for part, new, source in zip(held, (keys, values), (pool_keys, pool_values), strict=True):
            part[step.rows, :, step.positions] = new.view(-1, part.shape[1], part.shape[3]).to(part.dtype)
            for fill in fills:
                slots = table[fill.request, : fill.length]
                part[fill.row, :, : fill.length] = source.index_select(0, slots).transpose(0, 1)
                part[fill.row, :, fill.length :] = 0

    def attend(self, step: Step, layer: int, query: Tensor, scaling: float) -> Tensor:
        """query: [B, heads, dim] -> [B, heads, dim of values]."""
        keys, values = self._copy.layers[layer]
        grouped = query.unflatten(1, (keys.shape[1], -1)).to(keys.dtype)
        in_rows = torch.empty_like(grouped).index_copy_(0, step.rows, grouped) if step.permuted else grouped
        parts = [_attend(in_rows, keys, values, run, scaling) for run in step.runs]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (output[step.rows] if step.permuted else output).flatten(1, 2).to(query.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, run: Run, scaling: float) -> Tensor:
    """query: [rows, KV heads, queries a KV head, dim], keys, values: [rows, KV heads, tokens, dim] -> as query."""
    rows, tokens = slice(run.first, run.last), slice(run.longest)
    asked, k, v = query[rows], keys[rows, :, tokens], values[rows, :, tokens]
    if query.dtype != torch.float32:  # sums of the others need float32, which the fused kernel takes within
        bias = None if run.bias is None else run.bias.to(query.dtype)
        return scaled_dot_product_attention(asked, k, v, attn_mask=bias, scale=scaling)
    # For so few queries two products take a third of the fused kernel's time.
    scores = torch.matmul(asked * scaling, k.transpose(-1, -2))
    if run.bias is not None:
        scores += run.bias
    return torch.matmul(scores.softmax(-1), v)


def attend_with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor, window: int | None
) -> Tensor:
    """[n, heads, dim], the last n of t tokens. keys, values: [t, KV heads, dim]. sinks: [heads], one more logit of each.

    window: how many tokens each sees, itself among them. Sums in float32.
    """
    count, total = len(query), len(keys)
    grouped = query.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3).float()
    scores = grouped @ keys.permute(1, 2, 0)[:, None].float() * scaling  # [KV heads, queries a KV head, n, t]
    distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
    hidden = (distance < 0) | (distance >= (window or total))
    sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores.masked_fill(hidden, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    found = weights @ values.permute(1, 0, 2)[:, None].float()
    return found.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
