"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) for layers without Transformer Engine.

Megatron's own cannot be built without Transformer Engine, and under tensor parallel it keeps only each rank's own share
of the gradient of the rotated key, which all heads have in common. Parameters are called and cut as in Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megarl.models.attention import CoreAttention
from megarl.models.norms import LatentNorm
from megarl.models.rotary import Rotary


class LatentAttention(MegatronModule):  # type: ignore[misc]
    """Queries, keys and values from low-rank latents. A part of each head is rotated; its key is one for all heads.

    s: this context rank's tokens; under sequence parallel, inputs and outputs hold this tensor rank's part of them.
    """

    rotary_pos_emb: Rotary  # set when the model is finished: one for all layers

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self._groups = pg_collection
        self._recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        heads, width = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        self._heads = heads // pg_collection.tp.size()
        if config.q_lora_rank is None:
            self.linear_q_proj = self._columns(config.hidden_size, heads * width)
        else:
            self.linear_q_down_proj = self._columns(config.hidden_size, config.q_lora_rank)
            self.q_layernorm = LatentNorm(config, config.q_lora_rank)
            self.linear_q_up_proj = self._columns(config.q_lora_rank, heads * width)
        self.linear_kv_down_proj = self._columns(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = LatentNorm(config, config.kv_lora_rank)
        self.linear_kv_up_proj = self._columns(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.core_attention = CoreAttention(
            config,
            layer_number,
            attn_mask_type,
            "self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = tensor_parallel.RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )

    def _columns(self, inputs: int, outputs: int) -> tensor_parallel.ColumnParallelLinear:
        return tensor_parallel.ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self._groups.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> [s, b, hidden], and no bias."""
        query, key, value = self._project(hidden_states, packed_seq_params)
        if packed_seq_params is not None:
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended: Tensor = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
            return attended

        if self._recompute and self.training:
            output = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            output = attend(query, key, value)
        return self.linear_proj(output)[0], None

    def _project(self, hidden: Tensor, packed: PackedSeqParams | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [s, b, heads, nope + rope], value [s, b, heads, v]; this tensor rank's heads."""
        config = self.config
        nope, rotated, values = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(
                self.q_layernorm(self._scatter(self._whole(self.linear_q_down_proj(hidden))))
            )
        latent, shared_key = self._whole(self.linear_kv_down_proj(hidden)).split([config.kv_lora_rank, rotated], dim=-1)
        # Every rank's heads use this key: its gradient is the sum over the ranks.
        shared_key = copy_to_tensor_model_parallel_region(shared_key, group=self._groups.tp)
        pairs, _ = self.linear_kv_up_proj(self.kv_layernorm(self._scatter(latent)))
        query_plain, query_rotated = query.unflatten(-1, (self._heads, nope + rotated)).split([nope, rotated], dim=-1)
        key_plain, value = pairs.unflatten(-1, (self._heads, nope + values)).split([nope, values], dim=-1)
        query_rotated, shared_key = self._rotate((query_rotated, shared_key.unsqueeze(2)), hidden, packed)
        query = torch.cat([query_plain, query_rotated], dim=-1)
        key = torch.cat([key_plain, shared_key.expand(-1, -1, self._heads, -1)], dim=-1)
        return query, key, value

    def _whole(self, linear_output: tuple[Tensor, Any]) -> Tensor:
        """[s, b, this tensor rank's columns] -> [s, b, all columns]."""
        whole: Tensor = gather_from_tensor_model_parallel_region(linear_output[0], group=self._groups.tp)
        return whole

    def _scatter(self, latent: Tensor) -> Tensor:
        """Under sequence parallel, this tensor rank's part of the tokens: the linear that follows gathers them again."""
        if self.config.sequence_parallel:
            latent = scatter_to_sequence_parallel_region(latent, group=self._groups.tp)
        return latent

    def _rotate(self, tensors: tuple[Tensor, ...], hidden: Tensor, packed: PackedSeqParams | None) -> list[Tensor]:
        """Rotates [s, b, heads, rope] by position; pairs of neighbours come out as halves."""
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
        angles = self.rotary_pos_emb.angles(length, packed_seq=packed is not None)
        options = {"config": self.config, "mscale": self.rotary_pos_emb.factor, "cp_group": self._groups.cp}
        if packed is None:
            return [apply_rotary_pos_emb(tensor, angles, **options) for tensor in tensors]
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        return [
            apply_rotary_pos_emb(tensor.squeeze(1), angles, cu_seqlens=bounds, **options).unsqueeze(1)
            for tensor in tensors
        ]
