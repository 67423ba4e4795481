"""Numbers into FP8, as a trainer sends them to servers that hold FP8: e4m3 values, and a scale for each block of 128 x 128.

A weight is value * scale (hf_fp8.py). A block's largest number becomes the largest of e4m3, which is 448: the scale is
max|w| / 448 in float32, and a value is w / scale, rounded to the nearest, ties to even. arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.fp8_weights import BLOCK, blocks

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# The smallest normal float32. Below it a scale would have few digits, and a quotient by it be far from what it should be.
SMALLEST_SCALE = 2.0**-126


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [rows, columns] e4m3 and scales [ceil(rows / 128), ceil(columns / 128)] float32.

    weight: [rows, columns], float32 or bfloat16. A block of zeros has the scale 1. A block with a number that is NaN or
    infinite has the scale NaN, so that all of it is NaN where it is used: whoever verifies the sync sees it.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    parts = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    largest = parts.abs().amax(dim=(1, 3))
    scales = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    scales = torch.where(largest == 0, 1.0, scales)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    # A quotient may round to above 448, which e4m3 has no number for.
    values = (parts / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    return values.view(padded.shape)[:rows, :columns].contiguous().to(DTYPE), scales
