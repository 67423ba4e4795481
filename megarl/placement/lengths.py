"""How long responses are: a distribution over tokens, given, counted in a run, or assumed log-normal."""

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
_HALVINGS = 60


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

    Raises UserError for a mean that the cut makes impossible.
    """
    if not 0 < mean < longest or spread < 0:
        raise UserError(
            f"A mean response of {mean:g} tokens (spread {spread:g}) cannot be where the longest is {longest:g}: give a "
            f"mean between 0 and {longest:g} and a spread of at least 0."
        )
    sigma = math.sqrt(math.log1p(spread**2))
    scores = np.array([NormalDist().inv_cdf(level) for level in _LEVELS])
    shape = np.exp(scores * sigma)
    even = np.interp((np.arange(64) + 0.5) / 64, _LEVELS, shape)
    low, high = mean / shape[-1] / 2, longest / shape[0] * 2
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if float(np.mean(np.minimum(even * middle, longest))) < mean:
            low = middle
        else:
            high = middle
    return Lengths(tuple(_LEVELS), tuple(np.minimum(shape * math.sqrt(low * high), longest)), longest)


def counted(lengths: Sequence[int], longest: float) -> Lengths:
    """The distribution of lengths that were counted. Raises UserError when there are none."""
    if not len(lengths):
        raise UserError("There are no response lengths to plan with. Give a mean by --response-mean.")
    values = np.minimum(np.quantile(np.asarray(lengths, np.float64), _LEVELS), longest)
    return Lengths(tuple(_LEVELS), tuple(np.maximum(values, 1.0)), longest)
