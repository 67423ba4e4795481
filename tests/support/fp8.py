"""FP8 folders as DeepSeek-V3 publishes them, and what they stand for, computed number by number in plain Python."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (128, 128)


def write_fp8(folder: Path, block: tuple[int, int] = BLOCK, *, scales: torch.dtype = torch.float32) -> Path:
    """Quantise the linears of a float32 model, and round the rest to bfloat16 as published; returns the folder."""
    path = folder / "model.safetensors"
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight") or "_a_proj" in name or "_b_proj" in name:
            found[name], found[f"{name}_scale_inv"] = quantised(tensor, block, scales)
        else:
            found[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
    save_file(found, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def quantised(tensor: Tensor, block: tuple[int, int], scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Values in e4m3 and one scale a block, the largest of which becomes 448."""
    rows, columns = (-(-size // each) for size, each in zip(tensor.shape, block, strict=True))
    values, factors = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            factors[row, column] = (tensor[part].abs().max() / 448).to(scales)
            values[part] = (tensor[part] / factors[row, column]).to(torch.float8_e4m3fn)
    return values, factors.to(scales)


def slow_reference(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Value times scale in float32, rounded to the dtype: byte by byte, without torch's arithmetic."""
    found = []
    for row, line in enumerate(values.view(torch.uint8).tolist()):
        for column, byte in enumerate(line):
            scale = np.float32(scales[row // block[0], column // block[1]].item())
            bits = struct.unpack("<I", struct.pack("<f", np.float32(e4m3(byte)) * scale))[0]
            found.append(bits if dtype == torch.float32 else round_to_bfloat16(bits))
    if dtype == torch.float32:
        return torch.from_numpy(np.array(found, np.uint32).view(np.float32)).reshape(values.shape)
    return torch.from_numpy(np.array(found, np.uint16).view(np.int16)).view(torch.bfloat16).reshape(values.shape)


def e4m3(byte: int) -> float:
    """What a byte stands for: sign, four bits of exponent (bias 7), three of mantissa; no infinity (arXiv 2209.05433)."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def round_to_bfloat16(bits: int) -> int:
    """The upper half of a finite float32, to the nearest, ties to even."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def dequantised(folder: Path, block: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of an FP8 folder in one dtype, but for the bias of the router, by the slow reference."""
    stored = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            found[name] = slow_reference(tensor, stored[f"{name}_scale_inv"], block, dtype)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor if name.endswith("correction_bias") else tensor.to(dtype)
    return found
