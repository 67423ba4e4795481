"""Which optimizer steps are not taken: those whose gradient is not finite, or far above what it was of late. Without torch.

All ranks see the same norms, and so decide alike. What it remembers is a part of a checkpoint: a run that goes on, or that is
replayed, leaves out the same steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

WINDOW = 32  # optimizer steps that a spike is measured by
FEWEST = 8  # before so many norms are known, nothing is a spike
# A run that leaves out so many in a row learns nothing, and would say so only in a metric.
MOST_SKIPPED = WINDOW


class GradientWatch:
    """Of one optimizer. spike_factor: a norm above so many times the median of those before is a spike; None: none is.

    skipped: steps in a row that were left out.
    """

    def __init__(self, spike_factor: float | None) -> None:
        self._factor = spike_factor
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0

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
        """A step was taken: later ones are measured by it, unless it had nothing to teach."""
        # Where all rewards are equal the norm is 0: by a median of those every gradient would be a spike.
        if grad_norm > 0:
            self._recent.append(grad_norm)
        self.skipped = 0

    def skip(self, grad_norm: float) -> bool:
        """A step was left out; whether there were not too many in a row by now.

        Later ones are measured by it as well. One spike moves no median, but where norms have risen for good, the median
        follows within half a window; else each step from then on would be a spike.
        """
        if math.isfinite(grad_norm):
            self._recent.append(grad_norm)
        self.skipped += 1
        return self.skipped < MOST_SKIPPED

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": list(self._recent), "skipped": self.skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._recent = deque((norm for norm in state["norms"] if norm > 0), maxlen=WINDOW)  # an older megarl kept zeros
        self.skipped = state["skipped"]
