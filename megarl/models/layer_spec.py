"""Which modules a layer is made of: Transformer Engine's where it is and can, Megatron's with our own parts elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megarl.core.platform import Platform, compute_capability
from megarl.models.attention import CoreAttention
from megarl.models.config import ModelConfig, Moe
from megarl.models.delta_net import GatedDeltaNet
from megarl.models.gated_attention import GatedSelfAttention
from megarl.models.late_norms import LateNormedSelfAttention
from megarl.models.latent_attention import LatentAttention
from megarl.models.layered_attention import KeyLinear, LayeredSelfAttention, LocalSelfAttention
from megarl.models.normed_experts import NormedExperts, NormedRouter
from megarl.models.norms import LATENT_EPS, NormedRowParallelLinear, RMSNorm, WholeNorm
from megarl.models.packed import on_host
from megarl.models.rope import logit_factor
from megarl.models.rotary import ScaledQueries, scales_queries
from megarl.models.routers import router_of
from megarl.models.scaled_layer import ScaledLayer

HOPPER = 9  # of compute capabilities


class WholeExpertOutput(RowParallelLinear):  # type: ignore[misc]
    """The second linear of an expert that no rank shares, for experts with biases: its output is nobody else's to add to.

    Megatron adds the bias in place, which autograd forbids of what the sum over a group of one rank gives. It marks the bias as
    that of a dense layer: a copy of the other tensor-parallel ranks', whose gradients are to be summed. Here these ranks have
    other experts, or gradients that those who hold the expert share anyhow.
    """

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        assert self.tp_group.size() == 1, "layout_check refuses it"
        self.explicit_expert_comm = True
        for mark, holds in (("sequence_parallel", False), ("tensor_model_parallel", True)):
            setattr(self.bias, mark, holds)


class BiasedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear with a bias, where Megatron, which has one answer for all linears of a layer, gives none."""

    def __init__(self, *positions: Any, bias: bool, **options: Any) -> None:
        super().__init__(*positions, bias=True, **options)


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention, which cuts packed sequences to rotate them: by bounds that are on the host already.

    By the device's it would wait four times a layer. Its core has them on the device.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        kv: Any = None,
        positions: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Any:
        """As Megatron has it."""
        packed = None if packed_seq_params is None else on_host(packed_seq_params)
        return super().get_query_key_value_tensors(hidden_states, kv, positions, packed, **options)


def uses_transformer_engine(config: ModelConfig, platform: Platform, dtype: torch.dtype, cp: int) -> bool:
    """Whether the layers are Transformer Engine's.

    It has neither norms behind attention and MLP, over all heads, or behind the rotation, nor rotations that differ by layer
    (but in whether there is one), nor a bias behind attention alone, nor an activation that learns; sinks of packed sequences
    only in some kernels, and its kernels want values no wider than keys. In float32 its products are TF32's, whatever torch is
    told, and it has no attention under context parallel (2.11). That has no window where keys and values go from rank to rank,
    which is how Megatron asks for it.
    """
    apart = config.mixed_ropes or config.output_bias or config.delta or config.output_gate or config.halves == 1
    wide_values = config.mla is not None and config.mla.v_dim > config.head_dim
    window = config.window is not None and cp > 1
    norms = config.post_norms or config.whole_qk_norm or config.late_qk_norm
    cannot = norms or apart or wide_values or window or dtype == torch.float32
    return platform.has_transformer_engine and not cannot


def attends_packed(config: ModelConfig, platform: Platform) -> bool:
    """Whether Transformer Engine has an attention for packed sequences here that never holds the products of all pairs.

    cuDNN's takes them from Hopper on (2.11, nvte_get_fused_attn_backend; not on (12, 0)): in training heads up to 256 wide there,
    128 behind it, or 192 with values of 128. Flash-attn's, where it is installed, wants values as wide as keys. Without either
    it would hold them, for as many sequences of the longest's length as there are, or end under context parallel.
    """
    capability = compute_capability(platform)
    if capability is None:
        return True
    keys = config.head_dim
    values = keys if config.mla is None else config.mla.v_dim
    of_deepseek = (keys, values) == (192, 128)
    if capability[0] == HOPPER:
        fits = keys <= 256 and (keys == values or values < 128 or of_deepseek)
    else:
        fits = HOPPER < capability[0] < 12 and (keys <= 128 or of_deepseek)
    if keys % 8 == values % 8 == 0 and fits:
        return True
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

    return bool(FlashAttentionUtils.is_installed) and keys == values <= 256 and keys % 8 == 0


def stage_spec(
    config: ModelConfig, layers: range, platform: Platform, dtype: torch.dtype, cp: int
) -> TransformerBlockSubmodules:
    """The layers of one virtual stage. layers: their global indices."""
    if uses_transformer_engine(config, platform, dtype, cp):
        from megatron.core.extensions.transformer_engine import TENorm

        fused = [_fused_layer(config, index) for index in layers]
        if not attends_packed(config, platform):
            for layer in fused:
                layer.submodules.self_attention.submodules.core_attention = CoreAttention
        return TransformerBlockSubmodules(fused, layer_norm=TENorm)
    return TransformerBlockSubmodules([_torch_layer(config, index) for index in layers], layer_norm=RMSNorm)


def _fused_layer(config: ModelConfig, index: int) -> ModuleSpec:
    moe = config.moe if index in config.moe_layers else None
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=moe.num_experts if moe else None,
        moe_grouped_gemm=moe is not None,
        qk_layernorm=config.qk_norm or config.mla is not None,
        multi_latent_attention=config.mla is not None,
    )
    if moe is not None:
        spec.submodules.mlp.submodules.router = router_of(moe)
    if config.mla is not None:
        spec.submodules.self_attention.module = LatentSelfAttention
    _choose_rotation(config, index, spec)
    _scale_queries(config, spec)
    _scale_residual(config, spec)
    return spec


def _choose_rotation(config: ModelConfig, index: int, spec: ModuleSpec) -> None:
    """Where layers differ in their rotary positions: which this one has."""
    rope, attention = config.layer_rope(index), spec.submodules.self_attention
    if rope is None or config.local_rope is not None:
        attention.module = LocalSelfAttention
        attention.params["rotary_table"] = None if rope is None else int(index in config.local_layers)
    if config.mixed_ropes:
        factor = 1.0 if rope is None else logit_factor(rope)
        attention.submodules.core_attention = ModuleSpec(CoreAttention, params={"logit_factor": factor})


def _give_heads(config: ModelConfig, attention: ModuleSpec) -> None:
    """Heads of this layer's own. config: of the layer."""
    attention.module = LayeredSelfAttention
    attention.params |= {
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "keys_as_values": config.keys_as_values,
    }
    if config.keys_as_values:
        attention.submodules.linear_qkv = KeyLinear


def _scale_queries(config: ModelConfig, spec: ModuleSpec) -> None:
    if scales_queries(config):
        assert not config.qk_norm, "a norm of queries is where their scale would be"
        scale = ModuleSpec(ScaledQueries, params={"rotated": config.rotated, "rope": config.rope})
        spec.submodules.self_attention.submodules.q_layernorm = scale


class ScaledAdd:
    """What attention and MLP put out, times a scale, joins the residual stream. In the place of Megatron's bias, dropout, sum."""

    def __init__(self, scale: float, **_: Any) -> None:
        self._scale = scale

    def __call__(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """A function of (output, its bias), the stream, and dropout; there are neither bias nor dropout here."""

        def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            assert output[1] is None and not dropout, "neither is asked for"
            return torch.add(residual, output[0], alpha=self._scale)

        return add


def _scale_residual(config: ModelConfig, spec: ModuleSpec) -> None:
    if config.residual_scale != 1.0:
        add = ModuleSpec(ScaledAdd, params={"scale": config.residual_scale})
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add


def set_latent_eps(attention: torch.nn.Module) -> None:
    """Give the norms of latents their epsilon where Transformer Engine fused them: Megatron gives them the other norms'."""
    for name in ("linear_q_up_proj", "linear_kv_up_proj"):
        linear: Any = getattr(attention, name, None)
        if hasattr(linear, "layer_norm_weight"):
            assert linear.eps > 0, linear
            linear.eps = LATENT_EPS


def _torch_layer(config: ModelConfig, index: int) -> ModuleSpec:
    moe = config.moe if index in config.moe_layers else None
    spec: ModuleSpec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=moe.num_experts if moe else None,
            qk_layernorm=config.qk_norm and not config.late_qk_norm,
            normalization="RMSNorm",
        )
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm if config.pre_norms else IdentityOp
    layer.sharded_state_dict_keys_map = _checkpoint_names(config, index)
    _scale_residual(config, spec)
    if moe is not None:
        _choose_experts(moe, layer)
    if config.mla is not None:
        layer.self_attention = ModuleSpec(LatentAttention)
        return spec
    if index in config.linear_layers:
        layer.self_attention = ModuleSpec(GatedDeltaNet, params={"delta": config.delta})
        return spec
    if config.output_gate:
        layer.self_attention.module = GatedSelfAttention
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.whole_qk_norm:
        attention.q_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_heads})
        attention.k_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_kv_heads})
    elif config.late_qk_norm:
        layer.self_attention.module = LateNormedSelfAttention
    elif config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    _choose_rotation(config, index, spec)
    if config.value_norm:
        _give_heads(config.of_layer(index), layer.self_attention)
    if config.layer_scale:
        spec.module = ScaledLayer
    _end_with(config, layer, is_dense=moe is None)
    _scale_queries(config, spec)
    return spec


def _choose_experts(moe: Moe, layer: Any) -> None:
    """Of a layer's submodules."""
    parts = layer.mlp.submodules
    parts.router = NormedRouter if moe.normed else router_of(moe)
    if moe.normed:
        # Of specs Megatron warns where it knows not the module; this one finds its groups where Megatron's own would.
        layer.mlp = SimpleNamespace(module=NormedExperts, submodules=parts, params={})
        layer.pre_mlp_layernorm = IdentityOp
    if moe.biases:
        parts.experts.submodules.linear_fc2 = WholeExpertOutput


def _end_with(config: ModelConfig, layer: Any, *, is_dense: bool) -> None:
    """What stands behind attention and MLP. layer: submodules."""
    if config.output_bias:
        layer.self_attention.submodules.linear_proj = BiasedRowParallelLinear
    if config.post_norms:
        layer.self_attention.submodules.linear_proj = NormedRowParallelLinear
        if is_dense:
            layer.mlp.submodules.linear_fc2 = NormedRowParallelLinear


def _checkpoint_names(config: ModelConfig, index: int) -> dict[str, str]:
    """Names of norms in Megatron's checkpoints: Transformer Engine's, which fuses them, so that either loads the other's."""
    names = {}
    if config.mla is None:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    else:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    if index not in config.moe_layers:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names
