"""What is added to a sample's reward before advantages are computed. One number a sample; numpy, no tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megarl.core.types import FloatArray


def overlong_penalty(lengths: ArrayLike, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> FloatArray:
    """0 up to max_tokens - buffer_tokens, from there down to -factor at max_tokens, linearly; -factor beyond: [N] float32.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), to be added to the rewards.

    lengths: [N] response tokens. max_tokens: longest response. buffer_tokens: length of the slope.
    Raises ValueError unless 0 < buffer_tokens <= max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"0 < buffer_tokens <= max_tokens is needed; got {buffer_tokens} and {max_tokens}")
    over = np.asarray(lengths, np.float64) - (max_tokens - buffer_tokens)
    penalty: FloatArray = (-factor * np.clip(over / buffer_tokens, 0.0, 1.0)).astype(np.float32)
    return penalty
