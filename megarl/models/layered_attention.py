"""Attention whose layers differ: in their rotary positions, and in their heads (Gemma 4)."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class LocalSelfAttention(SelfAttention):  # type: ignore[misc]
    """Attention that takes its rotation from one of several tables, or has none (rotary_table is None)."""

    def __init__(self, *positions: Any, rotary_table: int | None, **options: Any) -> None:
        super().__init__(*positions, **options)
        self._table = rotary_table

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """rotary_pos_emb: [tables, positions, 1, 1, head_dim], where it is taken from; the rest as Megatron has it.

        Of heads that are narrower than others', the table is as well, and has zeros behind it.
        """
        table = None
        if self._table is not None:
            table = rotary_pos_emb[self._table, ..., : self.hidden_size_per_attention_head]
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, rotary_pos_emb=table, **options
        )
        return output


class KeyLinear(ColumnParallelLinear):  # type: ignore[misc]
    """The linear before attention, without the values that Megatron asks it for."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        values = config.num_query_groups * config.kv_channels
        super().__init__(input_size, output_size - values, config=config, **options)


class LayeredSelfAttention(LocalSelfAttention):
    """Attention with heads of its layer's own, whose values are normed, without a weight.

    Megatron reads sizes from the one config of all layers: here each layer has a copy with its own. keys_as_values: a value is
    what becomes a key by the norm of keys and the rotation (`KeyLinear`).
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        num_kv_heads: int,
        head_dim: int,
        keys_as_values: bool,
        **options: Any,
    ) -> None:
        own = copy.copy(config)
        own.num_query_groups, own.kv_channels = num_kv_heads, head_dim
        super().__init__(config=own, **options)
        self._keys_as_values = keys_as_values

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states: [s, b, hidden]. Returns query, key and value: [s, b, this rank's heads, head_dim]."""
        assert not output_gate and split_qkv, "as Megatron asks for it"
        if self._keys_as_values:
            query, value = self._queries_and_keys(hidden_states)
            query, key = self.q_layernorm(query), self.k_layernorm(value)
        else:
            query, key, value = super().get_query_key_value_tensors(hidden_states)
        return query, key, F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)

    def _queries_and_keys(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Of each key head its queries stand before it; where ranks share one, each has a part of the rows of both."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.pg_collection.tp.size()
        heads, width = self.config.num_attention_heads // groups, self.hidden_size_per_attention_head
        sharing = max(1, ranks // groups)  # ranks of one group
        rank = self.pg_collection.tp.rank()
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(groups, dim=-1)[rank // sharing]
        query, key = mixed.unflatten(-1, (-1, heads + 1, width)).split([heads, 1], dim=-2)
        query = query.flatten(2, 3)
        return (query.chunk(sharing, dim=2)[rank % sharing] if sharing > 1 else query), key.squeeze(-2)
