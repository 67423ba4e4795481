"""Attention whose output is gated by numbers of the token's own, which the linear of the queries gives as well (Qwen3.5)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, with each head's gate behind its query, as HF's tensors have them: so the rules know no order of their own.

    Megatron has all gates of a group of heads behind all of its queries, and where ranks share a group each has the gates of all.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, output_gate: bool = True, split_qkv: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden_states: [s, b, hidden]. Returns query, key, value and gate: [s, b, this rank's heads, head_dim]."""
        assert output_gate and split_qkv, "as Megatron asks for it"
        mixed, _ = self.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.pg_collection.tp.size()
        heads, width = self.config.num_attention_heads // groups, self.hidden_size_per_attention_head
        sharing = max(1, ranks // groups)  # ranks of one group
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(groups, dim=-1)[self.pg_collection.tp.rank() // sharing]
        mixed = mixed.unflatten(-1, (-1, (2 * heads + 2) * width))
        pairs, key, value = mixed.split([2 * heads * width, width, width], dim=-1)
        pairs = pairs.unflatten(-1, (heads, 2 * width)).flatten(2, 3)
        if sharing > 1:
            pairs = pairs.chunk(sharing, dim=2)[self.pg_collection.tp.rank() % sharing]
        query, gate = pairs.chunk(2, dim=-1)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """[s, b, heads * head_dim], gated; not compiled, as Megatron's is."""
        return (x * torch.sigmoid(gate.float()).view_as(x)).type_as(x)
