"""What one safetensors file holds: the safetensors library itself reads and checks the header. Without torch.

The format wants every tensor as long as its shape and dtype say, one behind the other, and nothing beside them in the file.
So what the library found, in the order of the file, also says where each tensor begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.core.errors import UserError

# Every dtype of the format; some pack several elements in a byte.
BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)
PREFIX_BYTES = 8  # the length of the header, before it
ALIGNMENT = 8  # of the header's end
INCOMPLETE, TOO_LARGE = "file not fully covered", "header too large"


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. dtype: as safetensors writes it: F32, BF16. offset: of the first byte in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """Of its content."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def header_bytes(entries: Mapping[str, Any], least: int = 0) -> bytes:
    """The beginning of a file. entries: of its tensors, as the format has them. least: bytes; blanks are at the end of fewer."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    room = max(-(-len(text) // ALIGNMENT) * ALIGNMENT, least - PREFIX_BYTES)
    return room.to_bytes(PREFIX_BYTES, "little") + text.ljust(room)


def read_header(path: Path) -> list[Stored]:
    """Every tensor of the file, in the file's order. Raises UserError for what the safetensors library refuses."""
    found = []
    try:
        # Opened by Python first: the library calls all that it cannot open missing.
        with path.open("rb") as start, safe_open(path, "numpy") as file:
            offset = PREFIX_BYTES + int.from_bytes(start.read(PREFIX_BYTES), "little")
            for name in file.offset_keys():
                tensor = file.get_slice(name)
                stored = Stored(name, tuple(tensor.get_shape()), tensor.get_dtype(), offset)
                found.append(stored)
                offset += stored.num_bytes
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a safetensors file that can be read: {_reason(str(error))}. Copy or export it again."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Copy or export it again.") from error
    assert offset == path.stat().st_size, (path, offset, path.stat().st_size)
    return found


def _reason(error: str) -> str:
    """The library's reason; in our words where its own do not say what happened to the file."""
    if INCOMPLETE in error:
        return "its tensors are not all that lies behind the header, so it is cut off, or has bytes too many"
    if TOO_LARGE in error:
        return "it begins with no header (a pointer of Git LFS in the file's place begins so)"
    return " ".join(error.removeprefix("Error while deserializing header: ").rstrip(".").split())
