"""What each rank of an SGLang server holds of a vision tower that learns: fused, cut over tensor parallel, and padded. Pure.

Written for SGLang 0.5.21 (models/qwen2_vl.py, qwen2_5_vl.py, qwen3_vl.py, which Qwen3.5's is as well): every linear but the
patches' is cut over the ranks, the first of an MLP by rows, the second by columns. Not for a server that has the whole tower on
every rank (`--mm-enable-dp-encoder`), which is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.models.multimodal import TOWER
from megarl.sync.held_piece import MLP_PADDING, Piece, share, up, vocabulary_size

PAIR_PADDING = 8  # of Qwen2.5-VL's MLP, whatever it runs on
QKV = ".attn.qkv."
PAIR = re.compile(r"\.(gate|up)_proj\.")
# Behind the tower's name and, of a block, its number.
BY_ROWS = re.compile(
    r"blocks\.\d+\.mlp\.(fc1|linear_fc1|gate_proj|up_proj)\.|merger[^.]*\.(\d+\.)?(mlp\.0|linear_fc1)\."
)
BY_COLUMNS = re.compile(
    r"blocks\.\d+\.(attn\.proj|mlp\.(fc2|linear_fc2|down_proj))\.weight$|merger[^.]*\.(\d+\.)?(mlp\.2|linear_fc2)\.weight$"
)
POSITIONS = "pos_embed.weight"
# Whose tower no rank of a CPU's server has padding in: its sizes have to suit the ranks as they are (configs/update_config.py).
FIRST_MLP = re.compile(r"\.fc[12]\.")


def is_of_tower(name: str) -> bool:
    """Whether an HF tensor is the tower's."""
    return name.startswith(TOWER)


def engine_name(name: str) -> str:
    """What SGLang calls what has the tensor in it."""
    return PAIR.sub(".gate_up_proj.", name.replace(QKV, ".attn.qkv_proj."))


@dataclass(frozen=True)
class TowerServer:
    """A server's tower. heads: of its attention. filled: sizes that do not suit the ranks are filled up, as on a CPU."""

    tp: int
    heads: int
    filled: bool

    def pieces(self, name: str, shape: tuple[int, ...], rank: int) -> Iterator[Piece]:
        """A rank's part of an HF tensor."""
        if QKV in name:
            each = shape[0] // 3
            for begin in range(0, shape[0], each):
                start, stop, below = share(each, self._of_heads(each), self.tp, rank)
                yield Piece(name, begin + start, begin + stop, below=below)
        elif BY_ROWS.search(name) or name.endswith(POSITIONS):
            start, stop, below = share(shape[0], self._padded(name, shape[0]), self.tp, rank)
            yield Piece(name, start, stop, below=below)
        elif BY_COLUMNS.search(name):
            start, stop, beside = share(shape[1], self._padded(name, shape[1]), self.tp, rank)
            yield Piece(name, 0, shape[0], (start, stop), beside=beside)
        else:
            yield Piece(name, 0, shape[0])

    def _padded(self, name: str, size: int) -> int:
        """The whole size of what is cut, with its padding."""
        if name.endswith(POSITIONS):
            return vocabulary_size(size, self.tp)
        if ".mlp." not in name or "merger" in name:
            return self._of_heads(size)
        pair = PAIR.search(name) or ".down_proj." in name
        if self.filled and not FIRST_MLP.search(name):
            return up(size, MLP_PADDING * self.tp)
        return up(size, PAIR_PADDING) if pair else size

    def _of_heads(self, size: int) -> int:
        """Of what is as wide as all heads, or several times that."""
        return size // self.heads * up(self.heads, self.tp) if self.filled else size
