"""Builds Megatron's GPTModel for a ModelConfig. Import only after `models.bootstrap.prepare_megatron`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.core.platform import Platform
from megarl.models.attention import torch_layer_spec
from megarl.models.hf_config import ModelConfig


def transformer_config(
    config: ModelConfig, *, tp: int, dtype: torch.dtype, platform: Platform, sequence_parallel: bool = False
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
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
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
    )


def build_gpt(
    config: ModelConfig, *, tp: int, dtype: torch.dtype, platform: Platform, sequence_parallel: bool = False
) -> GPTModel:
    """A GPTModel of this rank's tensor-parallel part, weights not set; logits come out split over the vocabulary.

    Megatron's process groups must be initialised (megarl/training/parallel.py).
    """
    settings = transformer_config(config, tp=tp, dtype=dtype, platform=platform, sequence_parallel=sequence_parallel)
    if platform.has_transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_norm)
    else:
        spec = torch_layer_spec(settings)
    model = GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=config.padded_vocab_size(tp),
        max_sequence_length=config.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model.to(device=platform.device, dtype=dtype)


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
