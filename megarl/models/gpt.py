"""Builds Megatron's GPTModel for a ModelConfig. Import only after `models.bootstrap.prepare_megatron`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.core.layout import Layout, stage_layers
from megarl.core.platform import Platform
from megarl.models.config import ModelConfig
from megarl.models.flops import Recompute
from megarl.models.heads import ScalarHead
from megarl.models.layer_spec import set_latent_eps, stage_spec, uses_transformer_engine
from megarl.models.packed import give_device_bounds, give_host_bounds
from megarl.models.rope import logit_factor, magnitude
from megarl.models.rotary import make_rotary, scale_by_position, scales_queries, scales_rotation
from megarl.models.seen import show_images
from megarl.models.xielu import Xielu

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu_clamped": quick_gelu,
    "xielu": F.elu,  # each layer gets its own
}
# What Megatron's dispatcher of tokens to experts leaves of a pass (0.16.1); others of its tensors are of the layer.
PER_PASS = (
    *("probs", "routing_map", "reversed_local_input_permutation_mapping"),
    *("tokens_per_expert", "num_global_tokens_per_local_expert", "num_out_tokens"),
    *("input_splits", "output_splits", "output_splits_tp"),
)
CLAMPED = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}


def transformer_config(
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype,
    platform: Platform,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    aux_loss_coef: float = 0.0,
) -> TransformerConfig:
    """Megatron's own description of the model: no dropout, softmax in float32, exact token-level loss normalisation."""
    fused = uses_transformer_engine(config, platform, dtype, layout.cp)
    fused_activation = fused and config.activation == "silu"
    make = TransformerConfig if config.mla is None else MLATransformerConfig
    return make(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        add_bias_linear=config.sinks,
        add_qkv_bias=config.qkv_bias,
        # Of norms of single heads alone: Megatron sums their gradients over tensor parallel. Those of latents are whole, and of
        # norms over all heads each rank has a part.
        qk_layernorm=config.qk_norm and not config.whole_qk_norm,
        rotary_interleaved=config.interleaved_rope,
        gated_linear_unit=config.halves == 2,
        activation_func=ACTIVATIONS[config.activation],
        **(CLAMPED if config.activation == "swiglu_clamped" else {}),
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        layernorm_zero_centered_gamma=config.norm_offset,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=True,
        # Weights come from a checkpoint, but only initialisation marks which are split over tensor parallel: without the
        # marks the global gradient norm counts those of one rank alone. So it runs, and leaves the memory as it is.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # On the CPU, Megatron would make each weight whole on every rank, to cut its part out of it.
        use_cpu_initialization=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused_activation,
        # Megatron 0.16.1 tells the kernel for packed sequences nothing of neighbours, nor of positions of a token's own.
        apply_rope_fusion=fused and config.mla is None and not config.interleaved_rope and config.vision is None,
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
        **_attention(config),
        **_moe(config, fused, aux_loss_coef),
        **_parallel(layout),
        **_recompute(recompute, recompute_num_layers),
    )


def _leave(weight: Tensor) -> Tensor:
    """An initialisation that leaves the tensor alone."""
    return weight


def _attention(config: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"softmax_type": "learnable" if config.sinks else "vanilla"}
    if config.window is not None:
        settings["window_size"] = (config.window - 1, 0)
        settings["window_attn_skip_freq"] = [int(index in config.local_layers) for index in range(config.num_layers)]
    mla = config.mla
    if mla is None:
        settings["attention_output_gate"] = config.output_gate
        if config.delta is not None:
            # Megatron then names layers in checkpoints by their numbers: they differ in what they hold.
            linear = [int(index in config.linear_layers) for index in range(config.num_layers)]
            settings["linear_attention_freq"] = linear
        settings["hetereogenous_dist_checkpoint"] = config.global_heads is not None  # for the same
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        apart = scales_queries(config) or config.mixed_ropes
        return settings | {"softmax_scale": scale if apart else scale * logit_factor(config.rope)}
    rope = config.rope
    weight = rope.mscale_all_dim or 0.0  # transformers heeds it for every kind that stretches
    return settings | {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        # Megatron's own rotary modules are replaced; the type only says whether they return a factor beside the angles.
        "rope_type": "yarn" if scales_rotation(config) else "rope",
        "rotary_base": rope.theta,
        "softmax_scale": config.head_dim**-0.5 * magnitude(rope.factor, weight) ** 2,
        # Megatron's latent attention computes the same scale from these two.
        "rotary_scaling_factor": rope.factor,
        "mscale_all_dim": weight,
    }


def _moe(config: ModelConfig, fused: bool, aux_loss_coef: float) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(index in config.moe_layers) for index in range(config.num_layers)],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        # The softmax of the chosen logits is the softmax of all, divided by the sum of the chosen.
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        "moe_router_num_groups": moe.num_groups or None,
        "moe_router_group_topk": moe.top_groups or None,
        "moe_router_enable_expert_bias": moe.score_bias and moe.score == "sigmoid",  # others: in `routers`
        # The bias balances experts in pre-training; here it stays what the checkpoint says.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coef else "none",
        "moe_aux_loss_coeff": aux_loss_coef,
        "moe_grouped_gemm": fused,
        # Transformer Engine's kernels sort tokens to experts without a wait for how many each has, and add up what experts put
        # out in float32 and in one order; torch's operations wait twice more a layer, and add in bfloat16, in any order.
        "moe_permute_fusion": fused,
    }


def _parallel(layout: Layout) -> dict[str, Any]:
    interleaved = layout.vpp > 1
    # Two ranks have none between the first and the last, by which Megatron would divide: the last has what the first leaves.
    both_given = layout.pp == 2 and layout.first_stage_layers is not None
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": None if both_given else layout.last_stage_layers,
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


def _recompute(mode: Recompute, num_layers: int | None) -> dict[str, Any]:
    """selective: attention's own activations are computed again in the backward pass; full: every layer's, or the first few's."""
    if mode == "full":
        method, number = ("uniform", 1) if num_layers is None else ("block", num_layers)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    return {"recompute_granularity": "selective"} if mode == "selective" else {}


def build_gpt(
    config: ModelConfig,
    layout: Layout,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype,
    platform: Platform,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    aux_loss_coef: float = 0.0,
) -> list[GPTModel]:
    """This rank's part of the model, one GPTModel for each of its virtual stages; the memory of weights is not set.

    Logits come out split over the vocabulary. Megatron's globals must be the layout's (`training.parallel.Groups.active`).
    aux_loss_coef: of the loss that balances experts (arXiv 2101.03961); 0 is off.
    """
    settings = transformer_config(
        config,
        layout,
        dtype=dtype,
        platform=platform,
        recompute=recompute,
        recompute_num_layers=recompute_num_layers,
        aux_loss_coef=aux_loss_coef,
    )
    rank = groups.pp.rank()
    chunks = []
    for stage, layers in enumerate(stage_layers(layout, config.num_layers)[rank]):
        chunk = GPTModel(
            config=settings,
            transformer_layer_spec=stage_spec(config, layers, platform, dtype, layout.cp),
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
        ).to(platform.device)
        assert [layer.layer_number - 1 for layer in chunk.decoder.layers] == list(layers), (layout, layers)
        _finish(chunk, config, groups, platform)
        chunks.append(chunk)
    return chunks


def _finish(chunk: GPTModel, config: ModelConfig, groups: ProcessGroupCollection, platform: Platform) -> None:
    """Put our rotary positions, the epsilon of latents, and scales and activations that Megatron knows not, into its model."""
    rotary = make_rotary(config, groups.cp, platform.device)
    if config.mla is None:
        chunk.rotary_pos_emb = rotary
        show_images(chunk, config.vision, rotary.under_way)
    else:
        for layer in chunk.decoder.layers:
            layer.self_attention.rotary_pos_emb = rotary
            set_latent_eps(layer.self_attention)
    fused = uses_transformer_engine(config, platform, chunk.config.params_dtype, groups.cp.size())
    _spare(chunk, fused=fused, rotates=config.vision is not None)
    if config.activation == "xielu":
        for layer in chunk.decoder.layers:
            layer.mlp.activation_func = Xielu(chunk.config, groups.tp).to(platform.device)
    if config.rope.position_beta:
        for layer in chunk.decoder.layers:
            scale = partial(scale_by_position, config.rope, groups.cp)
            layer.self_attention.core_attention.register_forward_pre_hook(scale, with_kwargs=True)
    if config.head == "score" and chunk.post_process:
        chunk.output_layer = ScalarHead(chunk.config, groups).to(platform.device)
    if config.logit_scale != 1.0 and config.head == "vocabulary" and chunk.post_process:
        chunk.output_layer.register_forward_pre_hook(partial(_scale_input, config.logit_scale))
    if config.logit_cap is not None and config.head == "vocabulary" and chunk.post_process:
        chunk.output_layer.register_forward_hook(partial(_cap_logits, config.logit_cap))
    if config.embedding_scale != 1.0 and chunk.pre_process:
        # The embedding alone is scaled, not the head that may share its weight.
        # Rounded to the weights' type, as transformers does; a number of the host, for which no device waits.
        rounded = float(torch.tensor(config.embedding_scale, dtype=chunk.config.params_dtype))
        chunk.embedding.register_forward_hook(partial(_scale_output, rounded))
    if config.pad_token_id is not None and chunk.pre_process:
        chunk.embedding.word_embeddings.register_forward_hook(partial(_hold_padding, config.pad_token_id))


def _spare(chunk: GPTModel, *, fused: bool, rotates: bool) -> None:
    """Spare memory that layers of experts would hold on to, and the waits of attention that is torch's.

    rotates: the rotation is torch's where the core of attention is not.
    """
    for layer in chunk.decoder.layers:
        if not fused or rotates:
            layer.self_attention.register_forward_pre_hook(give_host_bounds, with_kwargs=True)
        if fused and rotates:
            layer.self_attention.core_attention.register_forward_pre_hook(give_device_bounds, with_kwargs=True)
        if hasattr(layer.mlp, "token_dispatcher"):
            layer.mlp.register_forward_hook(_let_go)


def _let_go(module: Any, given: tuple[Tensor, ...], output: Any) -> None:
    """Behind a layer of experts: what autograd does not keep is memory.

    Megatron's dispatcher would hold the map of the tokens, their probabilities and their way back until the layer's next pass:
    in every layer, also where activations are computed again, and while the role sleeps.
    """
    dispatcher = module.token_dispatcher
    for name, value in vars(dispatcher).items():
        if name in PER_PASS and isinstance(value, Tensor):
            setattr(dispatcher, name, None)


def _scale_input(scale: float, module: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Hidden states before the head, which are fewer than logits."""
    hidden, *others = given
    return (hidden * scale, *others)


def _scale_output(scale: float, module: torch.nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * scale


def _cap_logits(
    cap: float, module: torch.nn.Module, given: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """In the logits' dtype, as transformers has it. output: logits, and no bias."""
    logits, bias = output
    return torch.tanh(logits / cap) * cap, bias


def _hold_padding(token: int, module: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """No gradient for one row of the embedding, as with torch's `padding_idx`; a head that shares the weight has its own.

    transformers makes the row zero, and the gradient of RMSNorm at zero is the gradient behind it over sqrt(eps).
    given: tokens [b, s]. output: [b, s, hidden], or [s / tp, b, hidden] where it is scattered for sequence parallel.
    """
    if not output.requires_grad:
        return output
    padding = given[0] == token
    if module.reduce_scatter_embeddings:
        group = module.tp_group
        padding = padding.t().chunk(group.size())[group.rank()]
    return torch.where(padding[..., None], output.detach(), output)
