"""Rotary positions where Megatron asks for them: a module with our own frequencies, for each kind of attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megarl.models.config import ModelConfig, Rope
from megarl.models.rope import attention_factor, inverse_frequencies, logit_factor, position_scale
from megarl.models.seen import Pass
from megarl.models.vision import Vision


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Angles [positions, 1, 1, dim] of one table of frequencies; with several, one table a row: [tables, positions, ...].

    Narrower tables have zeros behind them, which are nobody's angles.

    The angles are computed anew in each pass: they cost little, and upstream's cache keeps dozens of lengths alive.
    """

    def __init__(
        self,
        tables: list[Tensor],
        cp_group: Any,
        device: str,
        factor: float = 1.0,
        *,
        interleaved: bool = False,
    ) -> None:
        """factor: what latent attention multiplies cosine and sine by. interleaved: angles of neighbours are the same."""
        super().__init__(2 * tables[0].numel(), 1.0, use_cpu_initialization=True, cp_group=cp_group)
        self.factor, self.rotary_interleaved = factor, interleaved
        self.inv_freq = tables[0].to(device)
        self._tables = [table.to(device) for table in tables]
        self.under_way = Pass()

    def forward(self, *positions: Any, **options: Any) -> Any:
        """The angles, under the name by which Megatron asks for them."""
        return self.angles(*positions, **options)

    def angles(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles of positions offset .. offset + max_seq_len; of this context rank's alone where not packed."""
        group = cp_group or self.cp_group
        angles = []
        for table in self._tables:
            positions = torch.arange(offset, offset + max_seq_len, device=table.device, dtype=torch.float32)
            angle = torch.outer(positions, table)
            both = [angle, angle]
            angle = torch.stack(both, dim=-1).flatten(1) if self.rotary_interleaved else torch.cat(both, dim=-1)
            angle = angle[:, None, None]
            if group.size() > 1 and not packed_seq:
                angle = get_pos_emb_on_this_cp_rank(angle, 0, group)
            angles.append(angle)
        width = max(angle.shape[-1] for angle in angles)
        padded = [F.pad(angle, (0, width - angle.shape[-1])) for angle in angles]
        return angles[0] if len(angles) == 1 else torch.stack(padded)


class ScaledRotary(Rotary):
    """Returns the factor beside the angles, as Megatron's latent attention wants it under yarn."""

    def forward(self, *positions: Any, **options: Any) -> tuple[Tensor, float]:
        """Angles, factor."""
        return self.angles(*positions, **options), self.factor


class SeenRotary(Rotary):
    """With angles of each token's own, [T, 1, 1, dim], where a pass sees images (M-RoPE, arXiv 2409.12191, 2.1).

    Megatron takes as many angles as there are tokens for each one's own, whichever sequence it is of.
    """

    def __init__(self, table: Tensor, vision: Vision, cp_group: Any, device: str) -> None:
        super().__init__([table], cp_group, device)
        self._turned_by = torch.tensor(vision.turned_by(len(table)), device=device)

    def angles(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Of all sequences' tokens, over all context ranks; as `Rotary` has them where the pass is of text alone."""
        seen = self.under_way.seen
        if seen is None:
            return super().angles(max_seq_len, offset, packed_seq, cp_group)
        angle = seen.positions.T[:, self._turned_by].float() * self.inv_freq
        return torch.cat([angle, angle], dim=-1)[:, None, None]


def scales_rotation(config: ModelConfig) -> bool:
    """Whether cosine and sine themselves have to be scaled: in latent attention, where the rotated part is one of the head.

    Elsewhere the square of the factor goes into the scale of the logits, or into the rotated part of queries.
    """
    return config.mla is not None and attention_factor(config.rope) != 1.0


def scales_queries(config: ModelConfig) -> bool:
    """Whether a part of each head is rotated and scaled, in attention that is not latent."""
    return config.mla is None and config.rotated < config.head_dim and attention_factor(config.rope) != 1.0


class ScaledQueries(torch.nn.Module):
    """Multiplies what will be rotated of queries by the square of RoPE's factor, in the place where a norm of queries may be.

    Megarl's keys are not multiplied: the products are the same, and fused kernels for the rotation know no factor.
    """

    def __init__(self, rotated: int, rope: Rope, **_: Any) -> None:
        super().__init__()
        self._rotated, self._factor = rotated, logit_factor(rope)

    def forward(self, query: Tensor) -> Tensor:
        """[..., head_dim] -> the same."""
        turned, passed = query[..., : self._rotated], query[..., self._rotated :]
        return torch.cat([turned * self._factor, passed], dim=-1)


def make_rotary(config: ModelConfig, cp_group: Any, device: str) -> Rotary:
    """The rotary module of a model; with local layers of their own RoPE, table 0 is the global one."""
    local, everywhere = config.kinds_of_heads[0][1], config.kinds_of_heads[-1][1]
    tables = [inverse_frequencies(config.rope, everywhere.rotated)]
    if config.local_rope is not None:
        tables.append(inverse_frequencies(config.local_rope, local.rotated))
    if config.vision is not None:
        return SeenRotary(tables[0], config.vision, cp_group, device)
    if config.mla is None:
        return Rotary(tables, cp_group, device, interleaved=config.interleaved_rope)
    make = ScaledRotary if scales_rotation(config) else Rotary
    return make(tables, cp_group, device, attention_factor(config.rope))


def scale_by_position(
    rope: Rope, cp_group: Any, attention: torch.nn.Module, given: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Before a core attention, whichever it is: its queries, multiplied by what their positions ask for.

    given: query [t, heads, d] of packed sequences, or [s, b, heads, d], this context rank's part; and the rest.
    """
    query, *others = given
    params = options.get("packed_seq_params")
    if params is None:
        bounds = torch.tensor([0, len(query) * cp_group.size()], device=query.device)
    else:
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        bounds = bounds.to(query.device, non_blocking=True)  # where they are the host's
    scale = position_scale(rope, held_positions(len(query), bounds, cp_group)).to(query.dtype)
    return (query * scale.view(-1, *[1] * (query.dim() - 1)), *others), options


def held_positions(count: int, bounds: Tensor, cp_group: Any) -> Tensor:
    """[count] position of each token that this context rank holds, within its own sequence; behind the sequences, any.

    bounds: [S + 1], of the whole sequences. Of each, cut in 2 x CP chunks, rank r holds chunks r and 2 x CP - 1 - r.
    """
    cp, rank = cp_group.size(), cp_group.rank()
    starts = bounds // cp
    places = torch.arange(count, device=bounds.device, dtype=bounds.dtype)
    sequence = torch.searchsorted(starts, places, right=True) - 1
    held: Tensor = places - starts[sequence]  # of this rank's tokens of a sequence
    if cp > 1:
        chunk = (starts.diff() // 2)[sequence.clamp(max=len(starts) - 2)]
        held = held + torch.where(held < chunk, rank, 2 * cp - 2 - rank) * chunk
    return held
