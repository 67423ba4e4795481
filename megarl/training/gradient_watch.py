"""Which optimizer steps are not taken: those whose gradient is not finite, or far above what it was of late. Without torch.

All ranks see the same norms, and so decide alike. What it remembers is a part of a checkpoint: a run that goes on, or that is
replayed, leaves out the same steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 32  # optimizer steps that a spike is measured by
FEWEST = 8  # before so many were taken, nothing is a spike


class GradientWatch:
    """Of one optimizer. spike_factor: a norm above so many times the median of those before is a spike; None: none is."""

    def __init__(self, spike_factor: float | None) -> None:
        self._factor = spike_factor
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def trouble(self, grad_norm: float) -> str:
        """Why the step should not be taken; empty where nothing is wrong with it. grad_norm: before clipping."""
        if not math.isfinite(grad_norm):
            return f"is not finite (norm {grad_norm})"
        if self._factor is None or len(self._recent) < FEWEST:
            return ""
        median = statistics.median(self._recent)
        if grad_norm <= self._factor * median:
            return ""
        return f"is a spike (norm {grad_norm:.4g}, {grad_norm / median:.3g} times the median of the last {len(self._recent)})"

    def took(self, grad_norm: float) -> None:
        """A step was taken: later ones are measured by it."""
        self._recent.append(grad_norm)

    def state(self) -> list[float]:
        """For a checkpoint."""
        return list(self._recent)

    def load_state(self, norms: Iterable[float]) -> None:
        """Go on from a checkpoint."""
        self._recent = deque(norms, maxlen=WINDOW)
