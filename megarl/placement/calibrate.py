"""Fits the rates of a cluster to measurements: those of a profile, of a run, or of others.

Not for measuring: pairs of predicted and measured seconds come from whoever knows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megarl.placement.cluster import Cluster

Pairs = Sequence[tuple[float, float]]
# Rates are shares of a peak: these cannot be more.
SHARES = ("matmul", "experts", "attention", "prefill", "memory", "links", "network", "host")
ROUNDS = 12
_LEAST_GAIN = 1e-6


def fit(
    cluster: Cluster,
    names: Sequence[str],
    pairs: Callable[[Cluster], Pairs],
    *,
    rounds: int = ROUNDS,
    limits: Mapping[str, float] | None = None,
) -> Cluster:
    """The cluster with these rates moved until the mean |log(predicted / measured)| is smallest; coordinate descent.

    names: of rates, all above 0. pairs: predicted and measured seconds under a cluster. limits: a rate's largest value;
    1 for shares of a peak where nothing is said.
    """
    best = error(pairs(cluster))
    for turn in range(rounds):
        step = 1 + 0.5 / (1 + turn * 0.7)
        for name in names:
            for factor in (1 / step, step):
                moved = scaled(cluster, name, factor, (limits or {}).get(name, 1.0 if name in SHARES else math.inf))
                value = error(pairs(moved))
                if value < best - _LEAST_GAIN:
                    best, cluster = value, moved
                    break
    return cluster


def scaled(cluster: Cluster, name: str, factor: float, most: float = math.inf) -> Cluster:
    """The cluster with one rate multiplied, up to `most`."""
    value = min(getattr(cluster.rates, name) * factor, most)
    return replace(cluster, rates=replace(cluster.rates, **{name: value}))


def error(pairs: Pairs) -> float:
    """Mean |log(predicted / measured)|."""
    return sum(abs(math.log(max(predicted, 1e-12) / measured)) for predicted, measured in pairs) / len(pairs)
