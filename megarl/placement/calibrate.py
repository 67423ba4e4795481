"""Fits the rates of a cluster to measurements: those of a profile, of a run, or of others.

Not for measuring: pairs of predicted and measured seconds come from whoever knows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.placement.cluster import Cluster
from megarl.placement.lengths import Floats
from megarl.placement.rates import SHARES

Pairs = Sequence[tuple[float, float]]
ROUNDS = 30
# An error within this is as good as none; beyond it an outlier counts by its size, not by its square.
_ROUND = 0.05
# How far a rate moves (as a logarithm) for the price of one measurement that is off as far: what no measurement speaks of stays.
_PULL = 0.005
_NUDGE = 0.02
_MOST_STEP = 0.7
_ENOUGH = 1e-5


def fit(
    cluster: Cluster,
    names: Sequence[str],
    pairs: Callable[[Cluster], Pairs],
    *,
    rounds: int = ROUNDS,
    limits: Mapping[str, float] | None = None,
    enough: float = _ENOUGH,
) -> Cluster:
    """The cluster with these rates moved until predictions agree with measurements best.

    Made small is the mean |log(predicted / measured)|, rounded off near 0, by damped Gauss-Newton steps in the rates'
    logarithms with reweighted residuals; a weak pull keeps rates that the measurements hardly know where they were.

    names: of rates, all above 0. pairs: predicted and measured seconds under a cluster. limits: a rate's largest value;
    1 for shares of a peak where nothing is said. enough: the share of the loss that a round has to win for another to follow.
    """
    tops = np.array([(limits or {}).get(name, 1.0 if name in SHARES else math.inf) for name in names])
    start = np.minimum(np.log([getattr(cluster.rates, name) for name in names]), np.log(tops))

    def residuals(at: Floats) -> Floats:
        moved = with_rates(cluster, dict(zip(names, np.exp(at), strict=True)))
        return np.array([math.log(max(predicted, 1e-12) / measured) for predicted, measured in pairs(moved)])

    def loss(off: Floats, at: Floats) -> float:
        return float(np.hypot(off, _ROUND).sum() + _PULL * np.square(at - start).sum())

    at, off, damping = start, residuals(start), 1e-2
    best = loss(off, at)
    for _ in range(rounds):
        slopes = np.column_stack([(residuals(at + _NUDGE * unit) - off) / _NUDGE for unit in np.eye(len(names))])
        weights = 1 / np.hypot(off, _ROUND)
        normal = slopes.T * weights @ slopes + 2 * _PULL * np.eye(len(names))
        downhill = slopes.T @ (weights * off) + 2 * _PULL * (at - start)
        before = best
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -downhill)
            there = np.minimum(at + np.clip(step, -_MOST_STEP, _MOST_STEP), np.log(tops))
            new = residuals(there)
            if (value := loss(new, there)) < best:
                at, off, best, damping = there, new, value, damping / 5
                break
            damping *= 5
        if before - best < enough * before:
            break
    return with_rates(cluster, dict(zip(names, map(float, np.exp(at)), strict=True)))


def with_rates(cluster: Cluster, rates: Mapping[str, float]) -> Cluster:
    """The cluster with these rates in the place of its own."""
    return replace(cluster, rates=replace(cluster.rates, **rates))


def error(pairs: Pairs) -> float:
    """Mean |log(predicted / measured)|."""
    return sum(abs(math.log(max(predicted, 1e-12) / measured)) for predicted, measured in pairs) / len(pairs)
