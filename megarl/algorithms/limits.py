"""Bounds that keep extreme tokens finite; shared by what runs on arrays and what runs on tensors."""

from __future__ import annotations

# exp(20) = 4.9e8: far outside any clip range, far inside float32, also when multiplied by an advantage and summed.
MAX_LOG_RATIO = 20.0
# A reward beyond this is no grade: rewards are float32, which ends at 3.4e38, and sums of them have to stay finite.
MAX_REWARD = 1e30
