"""What a loss reports beside its value, added up over micro-batches, mini-batches and data-parallel ranks.

Everything is kept as sums and counts until the end, so that neither micro-batching nor layout changes a reported mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import MegarlError


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's loss and what is reported of it; all tensors are scalars."""

    loss: Tensor  # sum(weights * per-token loss): its gradient is taken as it is
    num_tokens: Tensor  # labels trained on
    weighted: dict[str, Tensor] = field(default_factory=dict)  # sums of weights * x: a mean over mini-batches
    # What those weights sum to, which is then divided by: they are rounded, and a share of pairs is not above 1.
    weight: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # sums over trained labels: a mean over these labels
    # Sums of weights * x over some sequences, and of the weights of these: a mean over them, and nothing where there are none.
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)  # largest over trained labels


class MetricSums:
    """Adds up LossOutputs on one rank, then over the data-parallel ranks, with one collective."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._mini_batches = 0

    def add(self, output: LossOutput) -> None:
        """Take one micro-batch's numbers; nothing of its graph is kept."""
        self._add(("count", "num_tokens"), output.num_tokens)
        for name, value in output.weighted.items():
            self._add(("weighted", name), value)
        if output.weight is not None:
            self._add(("weight", ""), output.weight)
        for name, value in output.sums.items():
            self._add(("sum", name), value)
        for name, (value, weight) in output.means.items():
            self._add(("mean", name), value)
            self._add(("mean's weight", name), weight)
        for name, value in output.maxima.items():
            key, value64 = ("max", name), value.detach().double()
            self._sums[key] = torch.maximum(self._sums.get(key, value64), value64)

    def end_mini_batch(self) -> None:
        """All micro-batches of a mini-batch have been added; a rank may have had none."""
        self._mini_batches += 1

    def _add(self, key: tuple[str, str], value: Tensor) -> None:
        # float64: sums over many micro-batches must not depend on how they were cut.
        total = value.detach().double()
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Means and maxima over all ranks of the data-parallel group; the same on each. Every rank calls it.

        Without any trained token, as where all samples are masked, there is nothing that a mean or a maximum over them could be.
        """
        if not self._sums:
            raise MegarlError(
                "An update saw no micro-batch on this rank: give every data-parallel rank at least one sample."
            )
        keys = sorted(self._sums)
        mine = torch.stack([self._sums[key] for key in keys])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        everyone = torch.stack(parts)
        totals = dict(zip(keys, everyone.sum(dim=0).tolist(), strict=True))
        largest = dict(zip(keys, everyone.amax(dim=0).tolist(), strict=True))
        num_tokens = totals["count", "num_tokens"]
        weight = totals.get(("weight", ""), float(self._mini_batches))
        result = {}
        for kind, name in keys:
            if kind == "weighted":
                result[name] = totals[kind, name] / weight
            elif kind == "mean" and (of := totals["mean's weight", name]):
                result[name] = totals[kind, name] / of
            elif num_tokens and kind == "sum":
                result[name] = totals[kind, name] / num_tokens
            elif num_tokens and kind == "max":
                result[name] = largest[kind, name]
        return result
