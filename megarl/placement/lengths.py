"""How long responses are: a distribution over tokens, counted, log-normal of a given mean, or a band where nothing is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError

Floats = NDArray[np.float64]
# Quantiles that the distribution is known by: even in the body, close to 1 in the tail, which decides when a step ends.
_LEVELS = np.array([*np.linspace(0.02, 0.98, 25), 0.985, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999])
_SCORES = np.array([NormalDist().inv_cdf(level) for level in _LEVELS])
_HALVINGS = 60
# Spreads that are looked through for one that cuts off a given share.
_SPREADS = (0.05, 20.0)
# Standard deviation over mean of lengths, before the limit cuts them, where a mean is all that is known.
ASSUMED_SPREAD = 0.9
# Mean response, tokens, where nothing is known: of published runs a tenth, half and nine tenths are below (the table of
# bench/published/lengths.csv, which a test holds these to). Their limits, of 1,024 to 20,480 tokens, say little of them but
# where they cut.
LOW_MEAN, LIKELY_MEAN, HIGH_MEAN = 549.0, 1267.0, 3500.0


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, by its quantiles; none is beyond `longest`.

    levels, values: [Q] rising; a share levels[i] of the lengths is at most values[i].
    """

    levels: tuple[float, ...]
    values: tuple[float, ...]
    longest: float

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        return float(np.mean(self.grid))

    @property
    def shortest(self) -> float:
        """The least length that is known of."""
        return self.values[0]

    @cached_property
    def grid(self) -> Floats:
        """[64] lengths of equal probability."""
        lengths: Floats = np.interp((np.arange(64) + 0.5) / 64, self.levels, self.values)
        return lengths

    @cached_property
    def knots(self) -> Floats:
        """[Q + 1] lengths at which the share that is still running is known, from 0."""
        knots: Floats = np.array([0.0, *self.values])
        return knots

    @cached_property
    def running(self) -> Floats:
        """[Q] share of responses that are longer, between each knot and the next."""
        levels = np.array([0.0, *self.levels])
        shares: Floats = 1 - (levels[:-1] + levels[1:]) / 2
        return shares

    def longest_of(self, count: Any) -> Any:
        """Length that the longest of so many responses has on average; an array where `count` is one."""
        return np.interp(1 - 0.5 / np.maximum(count, 1), self.levels, self.values)


def lognormal(mean: float, spread: float, longest: float) -> Lengths:
    """Log-normal lengths of that mean after being cut at `longest`; spread: standard deviation over mean before the cut.

    Raises UserError for a mean that the cut makes impossible, and for a spread beyond those that are looked through.
    """
    if not 0 < mean < longest or not 0 <= spread <= _SPREADS[1]:
        raise UserError(
            f"A mean response of {mean:g} tokens (spread {spread:g}) cannot be where the longest is {longest:g}: give a "
            f"mean between 0 and {longest:g} and a spread from 0 to {_SPREADS[1]:g}."
        )
    return cut_lognormal(_mean_before(mean, spread, longest), spread, longest)


def cut_lognormal(mean: float, spread: float, longest: float) -> Lengths:
    """Log-normal lengths of that mean and spread (standard deviation over mean) before being cut at `longest`."""
    return _cut(_LEVELS, _shape(spread) * mean, longest)


def cut(lengths: Lengths, longest: float) -> Lengths:
    """Lengths as they are where none may be beyond `longest`; the same where none was."""
    if lengths.longest <= longest:
        return lengths
    return _cut(np.array(lengths.levels), np.array(lengths.values), longest)


def _cut(levels: Floats, values: Floats, longest: float) -> Lengths:
    at = int(np.searchsorted(values, longest))
    if 0 < at < len(values):
        # A quantile where the cut begins: between two that are far apart, a line to the cut one says too little.
        level = float(np.interp(longest, values, levels))
        levels, values = np.insert(levels, at, level), np.insert(values, at, longest)
    return Lengths(tuple(levels), tuple(np.minimum(values, longest)), longest)


def _mean_before(mean: float, spread: float, longest: float) -> float:
    """The mean before the cut of log-normal lengths that have this mean after it."""
    shape = _shape(spread)
    even = np.interp((np.arange(64) + 0.5) / 64, _LEVELS, shape)
    low, high = mean / shape[-1] / 2, longest / shape[0] * 2
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if float(np.minimum(even * middle, longest).mean()) < mean:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _shape(spread: float) -> Floats:
    """[Q] quantiles of a log-normal distribution with a mean of 1."""
    sigma = math.sqrt(math.log1p(spread**2))
    shape: Floats = np.exp(_SCORES * sigma - sigma**2 / 2)
    return shape


def with_cut_share(mean: float, share: float, at: float, longest: float) -> Lengths:
    """Log-normal lengths, cut at `longest`, as those are that a limit of `at` gives this mean and cuts this share of."""

    def cut_there(spread: float) -> float:
        sigma = math.sqrt(math.log1p(spread**2))
        return 1 - NormalDist().cdf(math.log(at / _mean_before(mean, spread, at)) / sigma + sigma / 2)

    low, high = _SPREADS
    for _ in range(_HALVINGS // 2):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cut_there(middle) < share else (low, middle)
    spread = math.sqrt(low * high)
    return cut_lognormal(_mean_before(mean, spread, at), spread, longest)


@dataclass(frozen=True)
class Band:
    """What lengths may be where nothing is known of them: at the least, most likely, and at the most."""

    low: Lengths
    likely: Lengths
    high: Lengths


def assumed_lengths(longest: float) -> Band:
    """Lengths of a run of which nothing is known but its limit: those of published runs, cut there."""
    return Band(*(cut_lognormal(mean, ASSUMED_SPREAD, longest) for mean in (LOW_MEAN, LIKELY_MEAN, HIGH_MEAN)))


def counted(lengths: Sequence[float], longest: float) -> Lengths:
    """The distribution of lengths that were counted. Raises UserError when there are none."""
    if not len(lengths):
        raise UserError("There are no response lengths to plan with. Give a mean by --response-mean.")
    values = np.minimum(np.quantile(np.asarray(lengths, np.float64), _LEVELS), longest)
    return Lengths(tuple(_LEVELS), tuple(np.maximum(values, 1.0)), longest)
