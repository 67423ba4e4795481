"""How large a vision tower is, and what it keeps of an image, by a config.json alone. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models.hf_fields import Fields

FLOAT = 4  # bytes


@dataclass(frozen=True)
class TowerShape:
    """What a tower is made of, as transformers computes it: what it keeps for backward follows.

    merged: patches of a square. pixels: numbers of a patch. out: width of its features. mergers: what makes features of patches.
    kept_inner: of the MLP's inner columns, how many a patch keeps. wide_norms: RMS norms, which compute in float32, in the place
    of layer norms.
    """

    depth: int
    width: int
    inner: int
    heads: int
    merged: int
    pixels: int
    out: int
    mergers: int
    kept_inner: int
    wide_norms: bool

    def backward_bytes(self, squares: float, bytes_each: int, *, again: bool) -> float:
        """Most that is live of an image of so many squares while the tower learns from it, on top of weights and gradients.

        again: blocks are computed again in the backward pass.
        """
        width, each = self.width, bytes_each
        # RMS norms keep their input in float32, the same normed, and the output; layer norms input and output.
        norm = (FLOAT if self.wide_norms else each) * width + (2 if self.wide_norms else 1) * each * width + 2 * FLOAT
        # Queries, keys and values as one; the first two turned; the output, and that of all windows; and a log-sum.
        attention = 7 * width * each + FLOAT * self.heads
        block = 2 * norm + attention + self.kept_inner * self.inner * each
        # What makes features keeps its norm, and two widths inside; the earlier ones share their input with the next block.
        merger, earlier = norm + 2 * width * each, norm + width * each
        kept = self.pixels * each + (self.mergers - 1) * earlier + self.depth * (width * each if again else block)
        # First the gradient of the widest weight, while all is kept; then a block's, with its gradients on top.
        ends = kept + merger + (self.merged * width) ** 2 * each / (squares * self.merged)
        inside = kept + again * block + (self.inner + width) * each
        # In the forward pass the pixels are there in float32, too, and of a block that keeps nothing what it is at.
        forward = kept + merger + FLOAT * self.pixels * (each < FLOAT) + again * (7 * width + self.inner) * each
        return squares * (self.merged * max(ends, inside, forward) + 2 * self.mergers * self.out * each)


def patch_size(tower: Fields) -> int:
    """Pixels of a patch's side. Raises UserError."""
    return tower.count("patch_size", 16 if is_later(tower) else 14)


def tower_width(tower: Fields) -> int:
    """`hidden_size`, which is that of the text part in Qwen2-VL. Raises UserError."""
    return tower.count("hidden_size", 1152 if is_later(tower) else 3584)  # transformers' defaults


def tower_shape(tower: Fields) -> TowerShape:
    """Of the same. Raises UserError."""
    first, later = "embed_dim" in tower.raw, is_later(tower)
    width = tower.count("embed_dim", 1280) if first else tower_width(tower)
    inner = width * tower.count("mlp_ratio", 4) if first else tower.count("intermediate_size", 4304 if later else 3420)
    pixels = patch_size(tower) ** 2 * tower.count("temporal_patch_size", 2)
    return TowerShape(
        depth=tower.count("depth", 27 if later else 32),
        width=width,
        inner=inner,
        heads=tower.count("num_heads", 16),
        merged=tower.count("spatial_merge_size", 2) ** 2,
        pixels=pixels * tower.count("in_channels", 3),
        out=tower.count("hidden_size" if first else "out_hidden_size", 3584),
        mergers=1 + len(tower.counts("deepstack_visual_indexes")),
        kept_inner=3 if first else 2 if later else 4,
        wide_norms=not first and not later,
    )


def is_later(tower: Fields) -> bool:
    """Whether it is a tower of Qwen3-VL or Qwen3.5, whose modules and defaults are others."""
    return any(key in tower.raw for key in ("num_position_embeddings", "deepstack_visual_indexes"))
