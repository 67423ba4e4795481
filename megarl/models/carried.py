"""Tensors of a model's folder that are not trained, and are carried along: exports and checkpoints have them too. Without torch.

They are a vision tower that is frozen, and the layers that predict further tokens. They stay as they are, to the byte, but for
FP8: an export is unquantised, and so are they (`hf_save.write_carried`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.hf_files import TensorInfo, content_bytes, read_index, readable_further, unquantised
from megarl.models.hf_header import BITS
from megarl.models.tower_files import tower_index
from megarl.models.weight_files import AGAIN, some


def carried(folder: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """By their names in the folder, wide dtypes first, as in a file; FP8 tensors come with their scales. Raises UserError.

    A model that scores predicts no tokens, and leaves such layers behind. folder: of HF, or the `hf/` of a checkpoint, which
    has no other tensors.
    """
    found = tower_index(folder) if config.vision is not None and not config.vision.tower else {}
    if config.head != "score":
        problems = defaultdict[str, list[str]](list)
        found |= readable_further(read_index(folder), config, problems)
        if problems:
            said = "; ".join(f"{kind}: {some(what)}" for kind, what in problems.items())
            raise UserError(f"Layers in {folder} that predict further tokens cannot be read. {said}. {AGAIN}")
    return dict(sorted(found.items(), key=lambda each: -BITS[unquantised(each[1]).dtype]))


def carried_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Of such tensors in an export."""
    return sum(content_bytes(unquantised(info)) for info in tensors)


def in_files(tensors: Mapping[str, TensorInfo], max_bytes: int) -> Iterator[dict[str, TensorInfo]]:
    """The same in files of at most so many bytes, or of one tensor."""
    file, size = dict[str, TensorInfo](), 0
    for name, info in tensors.items():
        more = carried_bytes([info])
        if file and size + more > max_bytes:
            yield file
            file, size = {}, 0
        file[name] = info
        size += more
    if file:
        yield file
