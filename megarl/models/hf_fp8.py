"""FP8 weights as DeepSeek-V3 publishes them: e4m3 values, and one scale for each block of rows and columns. Without torch.

A weight is value * scale, in float32 and then rounded once to the type that it is loaded as: what the `fp8_cast_bf16.py`
of DeepSeek-V3's repository computes for bfloat16 (arXiv 2412.19437, section 3.3). The blocks at the lower and right edge
are smaller where the size of a block does not divide the matrix.
"""

from __future__ import annotations

from megarl.models.hf_fields import Fields

FP8, SCALE_DTYPES = "F8_E4M3", ("F32", "BF16")
METHOD, FORMAT = "fp8", "e4m3"
SPELLED = (None, FORMAT, "float8_e4m3fn")  # the same, as MiniMax-M2's configs call it
QUANTIZATION = "quantization_config"


def scale_name(weight: str) -> str:
    """The tensor that holds the scales of a weight."""
    return f"{weight}_scale_inv"


def read_fp8_block(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns of a block, from a config's `quantization_config`; None where it has none.

    Raises UserError for every other quantisation.
    """
    if fields.get(QUANTIZATION) is None:
        return None
    settings = fields.part(QUANTIZATION)
    method, form, block = (settings.get(key) for key in ("quant_method", "fmt", "weight_block_size"))
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if method != METHOD or form not in SPELLED or not is_block:
        fields.refuse(
            QUANTIZATION,
            fields.get(QUANTIZATION),
            f"of quantised weights, those of quant_method {METHOD}, fmt {FORMAT} and a weight_block_size of rows and "
            "columns can be read. Use the unquantised model",
        )
    return block[0], block[1]
