"""Builds Megatron's GPTModel for a ModelConfig. Import only after `models.bootstrap.prepare_megatron`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.core.layout import Layout
from megarl.core.platform import Platform
from megarl.models.attention import torch_layer_spec
from megarl.models.config import ModelConfig


Recompute = Literal["none", "selective", "full"]


def transformer_config(
    config: ModelConfig, layout: Layout, *, dtype: torch.dtype, platform: Platform, recompute: Recompute = "none"
) -> TransformerConfig:
    """Megatron's own description of the model: no dropout, softmax in float32, exact token-level loss normalisation."""
    fused = platform.has_transformer_engine
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not fused,
        # Weights come from a checkpoint, but only initialisation marks which are split over tensor parallel: without the
        # marks the global gradient norm counts those of one rank alone.
        perform_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
        **_parallel(layout),
        **_recompute(recompute),
    )


def _parallel(layout: Layout) -> dict[str, Any]:
    interleaved = layout.vpp > 1
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Packed micro-batches differ in length, and the stages of a pipeline have to tell each other.
        "variable_seq_lengths": layout.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        # With two ranks, batched exchange between interleaved stages silently gives wrong losses.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _recompute(mode: Recompute) -> dict[str, Any]:
    """selective: attention's own activations are computed again in the backward pass; full: every layer's."""
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if mode == "selective" else {}


def build_gpt(
    config: ModelConfig,
    layout: Layout,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype,
    platform: Platform,
    recompute: Recompute = "none",
) -> list[GPTModel]:
    """This rank's part of the model, one GPTModel for each of its virtual stages; weights are not set.

    Logits come out split over the vocabulary. Megatron's globals must be the layout's (`training.parallel.Groups.active`).
    """
    settings = transformer_config(config, layout, dtype=dtype, platform=platform, recompute=recompute)
    rank, stages = groups.pp.rank(), range(layout.vpp)
    return [
        GPTModel(
            config=settings,
            transformer_layer_spec=_layer_spec(config, settings, platform, stage if layout.vpp > 1 else None),
            vocab_size=config.padded_vocab_size(layout.tp),
            max_sequence_length=config.max_positions,
            pre_process=rank == 0 and stage == 0,
            post_process=rank == layout.pp - 1 and stage == layout.vpp - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=config.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rope.theta,
            pg_collection=groups,
            vp_stage=stage if layout.vpp > 1 else None,
        ).to(device=platform.device, dtype=dtype)
        for stage in stages
    ]


def _layer_spec(config: ModelConfig, settings: TransformerConfig, platform: Platform, stage: int | None) -> Any:
    if platform.has_transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_norm)
    return torch_layer_spec(settings, stage)


def packed_params(cu_seqlens: Tensor) -> PackedSeqParams:
    """Megatron's description of sequences packed end to end. cu_seqlens: [S + 1] int32, from 0 to T."""
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
