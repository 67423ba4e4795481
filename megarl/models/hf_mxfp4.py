"""Experts as gpt-oss publishes them, in MXFP4: e2m1 values of 4 bits, 32 in a row with one power of two. Without torch.

The form is that of the OCP Microscaling formats. Where a folder holds an expert's matrix so, `NAME_blocks` has two values a
byte, the earlier one in the low bits, [experts, out, in / 32, 16], and `NAME_scales` a power each, plus 127, [experts, out,
in / 32]; unquantised, NAME is [experts, in, out]. Every value times its power is a number of bfloat16: nothing is rounded.
"""

from __future__ import annotations

from megarl.models.hf_fields import Fields
from megarl.models.hf_fp8 import QUANTIZATION

METHOD, STORED = "mxfp4", "U8"
GROUP = 32  # values that share a power
BYTES = GROUP // 2
# By the four bits: a sign, then the numbers of e2m1.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def blocks_name(weight: str) -> str:
    """The tensor that holds a weight's values."""
    return f"{weight}_blocks"


def scales_name(weight: str) -> str:
    """The tensor that holds their powers of two."""
    return f"{weight}_scales"


def blocks_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the values of an unquantised tensor of this shape, [experts, in, out]."""
    experts, width, rows = shape
    return experts, rows, width // GROUP, BYTES


def is_mxfp4(fields: Fields) -> bool:
    """Whether a config says that the experts are. Other quantisations are for `hf_fp8` to read or refuse."""
    return fields.get(QUANTIZATION) is not None and fields.part(QUANTIZATION).get("quant_method") == METHOD
