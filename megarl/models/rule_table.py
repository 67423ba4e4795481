"""The one mapping between HF's names and Megatron's, as data: `LAYER` is the table. Without torch.

A row says which Megatron parameter is made of which HF tensors, in which order of rows, and how it is cut over tensor parallel;
rules.py reads it for one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a Megatron tensor is cut over tensor parallel (experts: over expert-tensor parallel).
Cut = Literal["whole", "rows", "columns"]
# In which order the rows of the HF tensors stand in the Megatron tensor. chain: as they are. groups: for each key-value
# head its queries, its key, its value. key_heads: for each of Gated DeltaNet's key heads its rows of every tensor. halves: for
# each rank its rows of every tensor. padded: behind them rows of zeros, up to a multiple of the ranks.
Order = Literal["chain", "groups", "key_heads", "halves", "padded"]


@dataclass(frozen=True)
class Row:
    """A line of the table. Names are those within a layer, and `{e}` in them stands for the expert.

    hf: pairs of an HF name and the names of its sizes (rules.py: `_sizes`); rows of `a+b` are those of a tensor of a rows and,
    below, of one of b, and `scalar` is a tensor without dimensions; a name with `[first:step]` is of a tensor of all experts (see
    `Slot`), with `[part/parts]` of one whose experts have so many even parts of rows. when: features that a layer needs to have
    it (see `_features`). fused, fused_cut: name and cut under Transformer Engine, where they differ. is_buffer: not a parameter,
    and float32 whatever the model is.
    """

    megatron: str
    hf: tuple[tuple[str, str], ...]
    cut: Cut = "whole"
    order: Order = "chain"
    when: str = ""
    fused: str | None = None
    fused_cut: Cut | None = None
    is_buffer: bool = False


NORM_IN_QKV, NORM_IN_FC1 = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
QKV_WEIGHT = (
    ("self_attn.q_proj.weight", "queries hidden"),
    ("self_attn.k_proj.weight", "keys hidden"),
    ("self_attn.v_proj.weight", "keys hidden"),
)
QKV_IN_ONE = (("self_attn.qkv_proj.weight", "queries+keys+keys hidden"),)
DELTA_IN = (
    ("linear_attn.in_proj_qkv.weight", "delta_keys+delta_keys+delta_values hidden"),
    ("linear_attn.in_proj_z.weight", "delta_values hidden"),
    ("linear_attn.in_proj_b.weight", "value_heads hidden"),
    ("linear_attn.in_proj_a.weight", "value_heads hidden"),
)
DELTA_IN_TWO = (
    ("linear_attn.in_proj_qkvz.weight", "delta_keys_to_gates hidden"),
    ("linear_attn.in_proj_ba.weight", "delta_numbers hidden"),
)
QKV_BIAS = (
    ("self_attn.q_proj.bias", "queries"),
    ("self_attn.k_proj.bias", "keys"),
    ("self_attn.v_proj.bias", "keys"),
)
GATE_UP = (("mlp.gate_proj.weight", "ffn hidden"), ("mlp.up_proj.weight", "ffn hidden"))
GATE_UP_IN_ONE = (("mlp.gate_up_proj.weight", "ffn+ffn hidden"),)
EXPERT_GATE_UP = (
    ("mlp.experts.{e}.gate_proj.weight", "expert_ffn hidden"),
    ("mlp.experts.{e}.up_proj.weight", "expert_ffn hidden"),
)
MIXTRAL_GATE_UP = (
    ("block_sparse_moe.experts.{e}.w1.weight", "expert_ffn hidden"),
    ("block_sparse_moe.experts.{e}.w3.weight", "expert_ffn hidden"),
)
STACKED_GATE_UP = (
    ("mlp.experts.gate_up_proj[0:2]", "expert_ffn hidden"),
    ("mlp.experts.gate_up_proj[1:2]", "expert_ffn hidden"),
)
STACKED_GATE_UP_BIAS = (
    ("mlp.experts.gate_up_proj_bias[0:2]", "expert_ffn"),
    ("mlp.experts.gate_up_proj_bias[1:2]", "expert_ffn"),
)
GRANITE_GATE_UP = (
    ("block_sparse_moe.input_linear.weight[0/2]", "expert_ffn hidden"),
    ("block_sparse_moe.input_linear.weight[1/2]", "expert_ffn hidden"),
)
SHARED_GATE_UP = (
    ("mlp.shared_experts.gate_proj.weight", "shared_ffn hidden"),
    ("mlp.shared_experts.up_proj.weight", "shared_ffn hidden"),
)
SHARED_GATE_UP_OF_ONE = (
    ("mlp.shared_expert.gate_proj.weight", "shared_ffn hidden"),
    ("mlp.shared_expert.up_proj.weight", "shared_ffn hidden"),
)
HUNYUAN_SHARED = (
    ("mlp.shared_mlp.gate_proj.weight", "shared_ffn hidden"),
    ("mlp.shared_mlp.up_proj.weight", "shared_ffn hidden"),
)
GEMMA_GATE_UP = (
    ("experts.gate_up_proj[0/2]", "expert_ffn hidden"),
    ("experts.gate_up_proj[1/2]", "expert_ffn hidden"),
)
SHARED_DENSE = (("mlp.gate_proj.weight", "shared_ffn hidden"), ("mlp.up_proj.weight", "shared_ffn hidden"))
SHARED_GATE = "mlp.shared_experts.gate_weight"
EXPERT_FC1, GROUPED_FC1 = "mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{e}"
EXPERT_FC2, GROUPED_FC2 = "mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{e}"
EXPERT_FC1_BIAS, EXPERT_FC2_BIAS = (f"mlp.experts.local_experts.{{e}}.linear_fc{number}.bias" for number in (1, 2))

# Megatron parameters whose HF tensors an engine fuses while it loads: it remembers the first of the two only within one
# bucket (SGLang, deepseek_weight_loader.py: cached_a_proj), so that they must share one.
FUSED = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")

LAYER = (
    # Norm before attention, and attention: with heads of their own for keys and values ...
    Row(
        "input_layernorm.weight",
        (("input_layernorm.weight", "hidden"),),
        when="heads pre_norms input_norm",
        fused=NORM_IN_QKV,
    ),
    Row("input_layernorm.weight", (("attention_layernorm.weight", "hidden"),), when="apertus_norms", fused=NORM_IN_QKV),
    Row("self_attention.linear_qkv.weight", QKV_WEIGHT, "rows", "groups", "heads qkv_apart"),
    Row("self_attention.linear_qkv.weight", QKV_IN_ONE, "rows", "groups", "heads qkv_in_one"),
    Row("self_attention.linear_qkv.weight", QKV_WEIGHT[:2], "rows", "groups", "heads keys_as_values"),
    Row("self_attention.linear_qkv.bias", QKV_BIAS, "rows", "groups", "heads qkv_bias"),
    Row("self_attention.q_layernorm.weight", (("self_attn.q_norm.weight", "head"),), when="heads qk_norm"),
    Row("self_attention.k_layernorm.weight", (("self_attn.k_norm.weight", "head"),), when="heads qk_norm"),
    Row(
        "self_attention.q_layernorm.weight",
        (("self_attn.q_norm.weight", "queries"),),
        "rows",
        when="heads whole_qk_norm",
    ),
    Row(
        "self_attention.k_layernorm.weight", (("self_attn.k_norm.weight", "keys"),), "rows", when="heads whole_qk_norm"
    ),
    Row(
        "self_attention.late_q_layernorm.weight",
        (("self_attn.query_layernorm.weight", "head"),),
        when="heads late_qk_norm",
    ),
    Row(
        "self_attention.late_k_layernorm.weight",
        (("self_attn.key_layernorm.weight", "head"),),
        when="heads late_qk_norm",
    ),
    # ... or latent (DeepSeek), where queries may be compressed too. Transformer Engine keeps the compressing linears whole.
    Row("input_layernorm.weight", (("input_layernorm.weight", "hidden"),), when="latent"),
    Row("self_attention.linear_q_proj.weight", QKV_WEIGHT[:1], "rows", when="latent direct_queries"),
    Row(
        "self_attention.linear_q_down_proj.weight",
        (("self_attn.q_a_proj.weight", "q_rank hidden"),),
        "rows",
        when="latent latent_queries",
        fused_cut="whole",
    ),
    Row(
        "self_attention.linear_kv_down_proj.weight",
        (("self_attn.kv_a_proj_with_mqa.weight", "kv_down hidden"),),
        "rows",
        when="latent",
        fused_cut="whole",
    ),
    Row(
        "self_attention.q_layernorm.weight",
        (("self_attn.q_a_layernorm.weight", "q_rank"),),
        when="latent latent_queries",
        fused="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    Row(
        "self_attention.linear_q_up_proj.weight",
        (("self_attn.q_b_proj.weight", "queries q_rank"),),
        "rows",
        when="latent latent_queries",
    ),
    Row(
        "self_attention.kv_layernorm.weight",
        (("self_attn.kv_a_layernorm.weight", "kv_rank"),),
        when="latent",
        fused="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Row(
        "self_attention.linear_kv_up_proj.weight",
        (("self_attn.kv_b_proj.weight", "kv_up kv_rank"),),
        "rows",
        when="latent",
    ),
    # ... or Gated DeltaNet in attention's place.
    Row("input_layernorm.weight", (("input_layernorm.weight", "hidden"),), when="delta"),
    Row("self_attention.linear_in.weight", DELTA_IN, "rows", "key_heads", "delta delta_in_four"),
    Row("self_attention.linear_in.weight", DELTA_IN_TWO, "rows", "key_heads", "delta delta_in_two"),
    Row(
        "self_attention.conv_weight",
        (("linear_attn.conv1d.weight", "delta_keys+delta_keys+delta_values one conv"),),
        "rows",
        "key_heads",
        "delta",
    ),
    Row("self_attention.decay_log", (("linear_attn.A_log", "value_heads"),), "rows", when="delta"),
    Row("self_attention.decay_bias", (("linear_attn.dt_bias", "value_heads"),), "rows", when="delta"),
    Row("self_attention.norm_weight", (("linear_attn.norm.weight", "delta_value"),), when="delta"),
    Row(
        "self_attention.linear_proj.weight",
        (("linear_attn.out_proj.weight", "hidden delta_values"),),
        "columns",
        when="delta",
    ),
    Row(
        "self_attention.linear_proj.weight",
        (("self_attn.o_proj.weight", "hidden values"),),
        "columns",
        when="attention",
    ),
    Row("self_attention.linear_proj.bias", (("self_attn.o_proj.bias", "hidden"),), when="output_bias"),
    Row("self_attention.core_attention.softmax_offset", (("self_attn.sinks", "query_heads"),), "rows", when="sinks"),
    # Norm before the MLP; Gemma and GLM-4 have norms behind attention and MLP too, and Gemma's HF names move on by one. OLMo-2
    # has those behind alone, by Gemma's names.
    Row(
        "self_attention.linear_proj.post_layernorm.weight",
        (("post_attention_layernorm.weight", "hidden"),),
        when="gemma_norms",
    ),
    Row(
        "self_attention.linear_proj.post_layernorm.weight",
        (("post_self_attn_layernorm.weight", "hidden"),),
        when="glm4_norms",
    ),
    Row(
        "pre_mlp_layernorm.weight",
        (("post_attention_layernorm.weight", "hidden"),),
        when="common_norms dense",
        fused=NORM_IN_FC1,
    ),
    Row(
        "pre_mlp_layernorm.weight",
        (("pre_feedforward_layernorm.weight", "hidden"),),
        when="gemma_norms pre_norms dense",
        fused=NORM_IN_FC1,
    ),
    Row("pre_mlp_layernorm.weight", (("post_attention_layernorm.weight", "hidden"),), when="common_norms experts"),
    Row(
        "pre_mlp_layernorm.weight",
        (("feedforward_layernorm.weight", "hidden"),),
        when="apertus_norms",
        fused=NORM_IN_FC1,
    ),
    # A dense MLP ...
    Row("mlp.linear_fc1.weight", GATE_UP, "rows", "halves", "dense gate_apart"),
    Row("mlp.linear_fc1.weight", GATE_UP_IN_ONE, "rows", "halves", "dense gate_in_one"),
    Row("mlp.linear_fc1.weight", (("mlp.up_proj.weight", "ffn hidden"),), "rows", when="dense ungated"),
    Row("mlp.activation_func.alpha_p", (("mlp.act_fn.alpha_p", "one"),), when="dense ungated"),
    Row("mlp.activation_func.alpha_n", (("mlp.act_fn.alpha_n", "one"),), when="dense ungated"),
    Row("mlp.activation_func.beta", (("mlp.act_fn.beta", "scalar"),), when="dense ungated", is_buffer=True),
    Row("mlp.activation_func.eps", (("mlp.act_fn.eps", "scalar"),), when="dense ungated", is_buffer=True),
    Row("mlp.linear_fc2.weight", (("mlp.down_proj.weight", "hidden ffn"),), "columns", when="dense"),
    Row(
        "mlp.linear_fc2.post_layernorm.weight",
        (("post_feedforward_layernorm.weight", "hidden"),),
        when="gemma_norms dense",
    ),
    Row(
        "mlp.linear_fc2.post_layernorm.weight",
        (("post_mlp_layernorm.weight", "hidden"),),
        when="glm4_norms dense",
    ),
    # ... or experts, under four sets of HF names; in the last two, of which one has biases, those of a layer are one tensor.
    Row("mlp.router.weight", (("mlp.gate.weight", "experts hidden"),), when="experts common_names gate"),
    Row("mlp.router.weight", (("mlp.gate.wg.weight", "experts hidden"),), when="experts common_names hunyuan_gate"),
    Row("mlp.router.weight", (("block_sparse_moe.gate.weight", "experts hidden"),), when="experts mixtral_names"),
    Row(
        "mlp.router.expert_bias",
        (("mlp.gate.e_score_correction_bias", "experts"),),
        when="experts score_bias common_names flat_bias",
        is_buffer=True,
    ),
    Row(
        "mlp.router.expert_bias",
        (("mlp.moe_statics.e_score_correction_bias", "one experts"),),
        when="experts score_bias common_names ernie_bias",
        is_buffer=True,
    ),
    Row(
        "mlp.router.expert_bias",
        (("block_sparse_moe.e_score_correction_bias", "experts"),),
        when="experts score_bias mixtral_names",
        is_buffer=True,
    ),
    Row(EXPERT_FC1, EXPERT_GATE_UP, "rows", "halves", "experts common_names", GROUPED_FC1),
    Row(
        EXPERT_FC2,
        (("mlp.experts.{e}.down_proj.weight", "hidden expert_ffn"),),
        "columns",
        when="experts common_names",
        fused=GROUPED_FC2,
    ),
    Row(EXPERT_FC1, MIXTRAL_GATE_UP, "rows", "halves", "experts mixtral_names", GROUPED_FC1),
    Row(
        EXPERT_FC2,
        (("block_sparse_moe.experts.{e}.w2.weight", "hidden expert_ffn"),),
        "columns",
        when="experts mixtral_names",
        fused=GROUPED_FC2,
    ),
    Row(
        "mlp.router.weight", (("block_sparse_moe.router.layer.weight", "experts hidden"),), when="experts granite_names"
    ),
    Row(EXPERT_FC1, GRANITE_GATE_UP, "rows", "halves", "experts granite_names", GROUPED_FC1),
    Row(
        EXPERT_FC2,
        (("block_sparse_moe.output_linear.weight[0/1]", "hidden expert_ffn"),),
        "columns",
        when="experts granite_names",
        fused=GROUPED_FC2,
    ),
    Row("mlp.router.weight", (("mlp.router.weight", "experts hidden"),), when="experts stacked_names"),
    Row("mlp.router.bias", (("mlp.router.bias", "experts"),), when="experts stacked_names"),
    Row(EXPERT_FC1, STACKED_GATE_UP, "rows", "halves", "experts stacked_names", GROUPED_FC1),
    Row(EXPERT_FC1_BIAS, STACKED_GATE_UP_BIAS, "rows", "halves", "experts stacked_names"),
    Row(
        EXPERT_FC2,
        (("mlp.experts.down_proj[0:1]", "hidden expert_ffn"),),
        "columns",
        when="experts stacked_names",
        fused=GROUPED_FC2,
    ),
    Row(EXPERT_FC2_BIAS, (("mlp.experts.down_proj_bias[0:1]", "hidden"),), when="experts stacked_names"),
    # Shared experts, several of them, or one, with a gate or without.
    Row("mlp.shared_experts.linear_fc1.weight", SHARED_GATE_UP, "rows", "halves", "experts shared_experts"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.shared_experts.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="experts shared_experts",
    ),
    Row("mlp.shared_experts.linear_fc1.weight", HUNYUAN_SHARED, "rows", "halves", "experts shared_mlp"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.shared_mlp.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="experts shared_mlp",
    ),
    Row(SHARED_GATE, (("mlp.shared_expert_gate.weight", "one hidden"),), when="experts shared_expert"),
    Row("mlp.shared_experts.linear_fc1.weight", SHARED_GATE_UP_OF_ONE, "rows", "halves", "experts shared_expert"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.shared_expert.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="experts shared_expert",
    ),
    # Gemma 4's stand beside the layer's MLP, which are the shared ones to Megatron.
    Row("mlp.pre_shared_layernorm.weight", (("pre_feedforward_layernorm.weight", "hidden"),), when="normed_experts"),
    Row("mlp.shared_experts.linear_fc1.weight", SHARED_DENSE, "rows", "halves", "normed_experts"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="normed_experts",
    ),
    Row(
        "mlp.post_shared_layernorm.weight", (("post_feedforward_layernorm_1.weight", "hidden"),), when="normed_experts"
    ),
    Row("mlp.router.input_scale", (("router.scale", "hidden"),), when="normed_experts"),
    Row("mlp.router.weight", (("router.proj.weight", "experts hidden"),), when="normed_experts"),
    Row("mlp.router.expert_scale", (("router.per_expert_scale", "experts"),), when="normed_experts"),
    Row("mlp.pre_routed_layernorm.weight", (("pre_feedforward_layernorm_2.weight", "hidden"),), when="normed_experts"),
    Row(EXPERT_FC1, GEMMA_GATE_UP, "rows", "halves", "normed_experts", GROUPED_FC1),
    Row(
        EXPERT_FC2,
        (("experts.down_proj[0/1]", "hidden expert_ffn"),),
        "columns",
        when="normed_experts",
        fused=GROUPED_FC2,
    ),
    Row(
        "mlp.post_routed_layernorm.weight", (("post_feedforward_layernorm_2.weight", "hidden"),), when="normed_experts"
    ),
    Row("mlp.post_layernorm.weight", (("post_feedforward_layernorm.weight", "hidden"),), when="normed_experts"),
    # What multiplies all that a layer puts out.
    Row("layer_scale", (("layer_scalar", "one"),), when="layer_scale"),
)
EMBEDDING = Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "vocab hidden"),), "rows", "padded")
FINAL_NORM = Row("decoder.final_layernorm.weight", (("model.norm.weight", "hidden"),))
HEAD = Row("output_layer.weight", (("lm_head.weight", "vocab hidden"),), "rows", "padded")
SCORE_HEAD = Row("output_layer.weight", (("score.weight", "one hidden"),))
TIED_HEAD = Row("output_layer.weight", EMBEDDING.hf, "rows", "padded")
