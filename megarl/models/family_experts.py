"""How configs of families with experts describe them: data, which `families` gives each family. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class MoeKeys:
    """Under which keys a family's config describes its experts, and what it leaves unsaid.

    normalize: a key, or the answer where there is none; normalize_unsaid: what a key says that is not there.
    sparse: which layers have experts; "step" is Qwen's decoder_sparse_step with mlp_only_layers, "after" DeepSeek's
    first_k_dense_replace, "between" ERNIE's moe_layer_start_index and moe_layer_end_index, "named" those that mlp_layer_types
    names: all but the first where there is none.
    num_shared: how many shared experts, each as wide as the others; shared_ffn_hidden_size: of one shared expert with a
    width of its own; shared_gate: and with a gate. biases: see `Moe`.
    group_method: a key that says whether the choice is among groups of experts at all, each of which counts its best one.
    switch: a key that says whether there are experts at all. normed: see `Moe`.
    each_layer: how many experts a token has may be a list, of one number for each layer. same_width: keys by which SGLang
    sizes the experts, and transformers does not.
    """

    num_experts: tuple[str, ...]  # names of several generations of transformers; the first that is there
    ffn_hidden_size: str
    sparse: Literal["all", "step", "after", "between", "named"]
    normalize: str | bool
    top_k: tuple[str, ...] = ("num_experts_per_tok",)  # names of one key; where several are there, they have to agree
    normalize_unsaid: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_shared: str | None = None
    shared_ffn_hidden_size: str | None = None
    shared_gate: bool = True
    scaling_factor: str | None = None
    num_groups: str | None = None
    top_groups: str | None = None
    group_method: str | None = None
    each_layer: bool = False
    same_width: tuple[str, ...] = ()
    score_bias: bool = False
    biases: bool = False
    switch: str | None = None
    normed: bool = False


QWEN3_MOE = MoeKeys(
    num_experts=("num_experts", "num_local_experts"),
    ffn_hidden_size="moe_intermediate_size",
    sparse="step",
    normalize="norm_topk_prob",
)
QWEN2_MOE = replace(QWEN3_MOE, shared_ffn_hidden_size="shared_expert_intermediate_size")
MIXTRAL = MoeKeys(num_experts=("num_local_experts",), ffn_hidden_size="intermediate_size", sparse="all", normalize=True)
DEEPSEEK_V3 = MoeKeys(
    num_experts=("n_routed_experts", "num_local_experts"),
    ffn_hidden_size="moe_intermediate_size",
    sparse="after",
    normalize="norm_topk_prob",
    normalize_unsaid=True,
    score="sigmoid",
    num_shared="n_shared_experts",
    scaling_factor="routed_scaling_factor",
    num_groups="n_group",
    top_groups="topk_group",
    score_bias=True,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3, normalize=False, normalize_unsaid=False, score="softmax", score_bias=False, group_method="topk_method"
)
ERNIE_MOE = MoeKeys(
    num_experts=("moe_num_experts", "num_experts"),
    top_k=("moe_k", "num_experts_per_tok"),
    ffn_hidden_size="moe_intermediate_size",
    sparse="between",
    normalize=True,
    num_shared="moe_num_shared_experts",
    score_bias=True,
)
HUNYUAN_MOE = MoeKeys(
    num_experts=("num_experts", "num_local_experts"),
    top_k=("moe_topk", "num_experts_per_tok"),
    ffn_hidden_size="intermediate_size",
    sparse="all",
    normalize=True,
    shared_ffn_hidden_size="intermediate_size",
    shared_gate=False,
    each_layer=True,
    same_width=("moe_intermediate_size",),
)
GEMMA4 = MoeKeys(
    num_experts=("num_experts",),
    top_k=("top_k_experts",),
    ffn_hidden_size="moe_intermediate_size",
    sparse="all",
    normalize=True,
    shared_ffn_hidden_size="intermediate_size",
    shared_gate=False,
    switch="enable_moe_block",
    normed=True,
)
QWEN3_5_MOE = replace(QWEN2_MOE, num_experts=("num_experts",), sparse="all", normalize=True)
QWEN3_NEXT = replace(QWEN2_MOE, num_experts=("num_experts",), normalize_unsaid=True)
GPT_OSS = replace(MIXTRAL, biases=True)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, sparse="named")
MINIMAX_M2 = replace(MIXTRAL, score="sigmoid", score_bias=True)
OLMOE = replace(QWEN3_MOE, ffn_hidden_size="intermediate_size", sparse="all")
