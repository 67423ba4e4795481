"""How far two computations of the same may lie apart, by platform and dtype: the one table, for all tests of the engine.

On a CPU these are bounds that were measured, and tests fail soon above them. Those of CUDA were chosen and never measured:
float32 as on a CPU, times what other kernels and other orders of summation are usually worth (the tests take no TF32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.core.platform import Platform, PlatformName

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one dtype on one platform; 0 where no test asks.

    logprob: the largest difference of a log-prob, nats; mean_logprob: their mean. gradient: of an element, relative to the
    largest of its tensor. loss: of a loss or a norm, relative; loss_abs: absolute. weight: of a weight after a few steps of
    1e-3. split: of what differs by the order of sums alone, relative.
    """

    logprob: float
    mean_logprob: float = 0.0
    gradient: float = 0.0
    loss: float = 0.0
    loss_abs: float = 0.0
    weight: float = 0.0
    split: float = 0.0


TABLE: dict[tuple[PlatformName, Dtype], Tolerance] = {
    ("cpu", "float32"): Tolerance(1e-5, gradient=2e-5, loss=1e-5, loss_abs=2e-6, weight=2e-6, split=1e-6),
    ("cpu", "bfloat16"): Tolerance(0.1, mean_logprob=0.02),
    ("cuda", "float32"): Tolerance(1e-4, gradient=2e-4, loss=1e-4, loss_abs=2e-5, weight=2e-5, split=1e-5),
    ("cuda", "bfloat16"): Tolerance(0.1, mean_logprob=0.02),
}


def tolerance(platform: Platform, dtype: Dtype = "float32") -> Tolerance:
    """The row of the table."""
    return TABLE[platform.name, dtype]
