"""Attention whose queries and keys are normed behind their rotation (Hunyuan)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megarl.models.norms import RMSNorm


class LateNormedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, which norms before the rotation: here the core, whichever it is, is given what is normed.

    The norms are called by names that have Megatron's in them, by which it sums their gradients over tensor parallel.
    """

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        config, width = self.config, self.hidden_size_per_attention_head
        self.late_q_layernorm = RMSNorm(config, width, config.layernorm_epsilon)
        self.late_k_layernorm = RMSNorm(config, width, config.layernorm_epsilon)
        self.core_attention.register_forward_pre_hook(self._norm)

    def _norm(self, core: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """given: query, key [..., heads, head_dim], and the rest."""
        query, key, *others = given
        return (self.late_q_layernorm(query), self.late_k_layernorm(key), *others)
