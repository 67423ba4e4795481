"""The parts of a layer that Transformer Engine would bring, for machines without it: norms and core attention on torch.

Core attention runs torch's SDPA: grouped queries, causal, packed sequences (thd), and context parallel with keys and
values gathered, in Megatron's layout: each sequence is cut in 2 x CP chunks and rank r holds chunks r and 2 x CP - 1 - r.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under Megatron's constructor; knows sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron sums the gradients of such weights over the tensor-parallel ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over queries, keys and values, dense or packed."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self._cp = pg_collection.cp
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query: [s, b, heads, d], or packed [t, heads, d]; key, value with fewer heads. Returns [s, b, heads * d].

        s and t are this context-parallel rank's part; packed, b is 1.
        """
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        if self._cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self._cp)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        if packed_seq_params is not None and packed:
            return self._packed(query, key, value, packed_seq_params).flatten(2)
        return self._sequence(query, key, value).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        """Each sequence on its own. query: [t, 1, heads, d]; key, value: [cp * t, 1, kv heads, d], rank by rank."""
        cp, total = self._cp.size(), query.shape[0]
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = (bounds.diff() // cp).tolist()
        sizes = [*lengths, total - sum(lengths)]  # the last is padding behind the sequences
        # Split, not sliced: the gradient of each slice would be a whole tensor of zeros around it.
        queries = torch.split(query, sizes)
        keys, values = (torch.split(tensor.unflatten(0, (cp, total)), sizes, dim=1) for tensor in (key, value))
        outputs = [
            self._sequence(q, k.flatten(0, 1), v.flatten(0, 1))
            for q, k, v in zip(queries[:-1], keys, values, strict=False)
            if len(q)
        ]
        return torch.cat([*outputs, torch.zeros_like(queries[-1])])

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One causal sequence. query: [s, b, heads, d]; key, value: [cp * s, b, kv heads, d], rank by rank."""
        cp, rank = self._cp.size(), self._cp.rank()
        if cp == 1:
            return _sdpa(query, key, value, self._scale, None)
        length = query.shape[0] // 2
        order = torch.tensor(_chunk_order(cp), device=key.device)
        key, value = (tensor.unflatten(0, (2 * cp, length))[order].flatten(0, 1) for tensor in (key, value))
        outputs = []
        for chunk, part in zip((rank, 2 * cp - 1 - rank), query.split(length), strict=True):
            end = (chunk + 1) * length
            positions = torch.arange(end, device=key.device)
            mask = positions[None, :] <= positions[chunk * length :, None]
            outputs.append(_sdpa(part, key[:end], value[:end], self._scale, mask))
        return torch.cat(outputs)


def _chunk_order(cp: int) -> list[int]:
    """Where each of the 2 x CP chunks lies when the ranks' parts stand one behind the other."""
    held = [chunk for rank in range(cp) for chunk in (rank, 2 * cp - 1 - rank)]
    return [held.index(chunk) for chunk in range(2 * cp)]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[s, b, heads, d] -> [s, b, heads, d]; causal where no mask is given."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return output.permute(2, 0, 1, 3)


def torch_layer_spec(config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's own layer with these norms and this attention. stage: the virtual pipeline stage, where there are such."""
    spec: ModuleSpec = copy.deepcopy(
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=stage), layer_norm=RMSNorm)
