"""How configs of families with experts describe them: data, which `families` gives each family. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class MoeKeys:
    """Under which keys a family's config describes its experts, and what it leaves unsaid.

    normalize: a key, or the answer where there is none; normalize_unsaid: what a key says that is not there.
    sparse: which layers have experts; "step" is Qwen's decoder_sparse_step with mlp_only_layers, "after" DeepSeek's
    first_k_dense_replace, "named" those that mlp_layer_types names: all but the first where there is none.
    num_shared: how many shared experts, each as wide as the others; shared_ffn_hidden_size: of one shared expert with a
    width of its own, and with a gate. biases: see `Moe`.
    """

    num_experts: tuple[str, ...]  # names of several generations of transformers; the first that is there
    ffn_hidden_size: str
    sparse: Literal["all", "step", "after", "named"]
    normalize: str | bool
    normalize_unsaid: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_shared: str | None = None
    shared_ffn_hidden_size: str | None = None
    scaling_factor: str | None = None
    num_groups: str | None = None
    top_groups: str | None = None
    score_bias: bool = False
    biases: bool = False


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
QWEN3_5_MOE = replace(QWEN2_MOE, num_experts=("num_experts",), sparse="all", normalize=True)
QWEN3_NEXT = replace(QWEN2_MOE, num_experts=("num_experts",), normalize_unsaid=True)
GPT_OSS = replace(MIXTRAL, biases=True)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, sparse="named")
MINIMAX_M2 = replace(MIXTRAL, score="sigmoid", score_bias=True)
OLMOE = replace(QWEN3_MOE, ffn_hidden_size="intermediate_size", sparse="all")
