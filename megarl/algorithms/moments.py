"""Mean and spread of numbers that lie in several processes: a few numbers of each, which add up. numpy, float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import IntArray


class Moments(NamedTuple):
    """num numbers: their mean, the sum of their squared distances from it, the least and the greatest.

    Without any number the mean is 0, the least is infinity and the greatest minus infinity.
    """

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = float("inf")
    greatest: float = float("-inf")

    @property
    def variance(self) -> float:
        """The population's; 0 where there are no numbers."""
        return self.squares / self.num if self.num else 0.0

    @property
    def are_equal(self) -> bool:
        """Whether all numbers are the same one, or there are none. A variance of 0 may be rounded; this is exact."""
        return self.least >= self.greatest


def moments(values: NDArray[np.floating[Any]], counts: IntArray | None = None) -> Moments:
    """Of all numbers of an array; to the bit what numpy's mean and var are in float64.

    counts: how often each number stands there, of the array's shape and not negative; default: once.
    """
    if counts is not None:
        return _counted(values[counts > 0].astype(np.float64), counts[counts > 0])
    if not values.size:
        return Moments()
    wide = values.astype(np.float64).ravel()
    mean = wide.mean()
    distances = wide - mean
    squares = np.multiply(distances, distances, out=distances).sum()
    return Moments(len(wide), float(mean), float(squares), float(wide.min()), float(wide.max()))


def _counted(values: NDArray[np.float64], counts: IntArray) -> Moments:
    if not values.size:
        return Moments()
    mean = np.average(values, weights=counts)
    squares = ((values - mean) ** 2 * counts).sum()
    return Moments(int(counts.sum()), float(mean), float(squares), float(values.min()), float(values.max()))


def merge(parts: Iterable[Moments]) -> Moments:
    """Of all numbers together: Chan, Golub and LeVeque (1979), "Updating formulae", equation 2.1.

    A single part, beside any without numbers, comes back as it is. The order of parts matters to rounding alone.
    """
    whole = Moments()
    for part in parts:
        if not part.num:
            continue
        if not whole.num:
            whole = part
            continue
        num, apart = whole.num + part.num, part.mean - whole.mean
        whole = Moments(
            num,
            whole.mean + apart * part.num / num,
            whole.squares + part.squares + apart * apart * whole.num * part.num / num,
            min(whole.least, part.least),
            max(whole.greatest, part.greatest),
        )
    return whole
