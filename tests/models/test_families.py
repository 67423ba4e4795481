"""Published configs of each family, and what of a family is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from megarl.core.errors import UserError
from megarl.models.config import Mla, ModelConfig, Moe, Rope
from megarl.models.families import FAMILIES, score_architecture
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.multimodal import MULTIMODALS
from tests.support.tiny import CONFIGS, tiny_config, write_tiny_model

PATH = Path("model/config.json")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# DeepSeek-V3's own, but for the number of layers and the quantisation.
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "num_nextn_predict_layers": 1,
}
# Gemma 3 1B's own, but for the number of layers.
GEMMA: dict[str, Any] = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "hidden_size": 1152,
    "head_dim": 256,
    "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_bias": False,
}


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
HEADS_SAID = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # of which transformers makes no model without head_dim
ARCHITECTURES = {family.name: name for name, family in FAMILIES.items()}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config({key: value for key, value in {**raw, **changes}.items() if value != "absent"}, PATH)


def of(architecture: str, **changes: Any) -> ModelConfig:
    return parse(SIZES, architectures=[architecture], **changes)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path, family))
    assert config.family == family
    assert config.num_layers == 3


def test_every_family_has_a_model_that_tests_it() -> None:
    assert {family.name for family in FAMILIES.values()} == set(CONFIGS)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {*LATENT, *HEADS_SAID}))
def test_heads_are_as_wide_as_in_transformers_where_no_key_says(family: str) -> None:
    """Those of latent attention have keys of their own."""
    config = tiny_config(family)
    raw = {key: value for key, value in config.to_dict().items() if key != "head_dim"}
    theirs = getattr(type(config).from_dict(dict(raw)), "head_dim", None)
    assert parse(raw | {"architectures": [ARCHITECTURES[family]]}).head_dim == (theirs or 64 // 4)


@pytest.mark.parametrize("family", CONFIGS)
def test_responses_end_as_in_transformers_where_no_key_says(family: str) -> None:
    config = tiny_config(family)
    raw = config.to_dict() | {"architectures": [ARCHITECTURES[family]]}
    theirs = type(config)().eos_token_id
    expected = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    assert list(parse(raw, eos_token_id="absent").eos_token_ids) == expected
    assert parse(raw, eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    theirs = type(config).from_dict(dict(raw, eos_token_id=None)).eos_token_id
    assert list(parse(raw, eos_token_id=None).eos_token_ids) == (theirs or [])


def test_the_model_types_are_those_by_which_transformers_chooses() -> None:
    for architecture, family in FAMILIES.items():
        theirs = {kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture}
        # Of Qwen3.5's multimodal config it takes the text part.
        assert theirs - {each.model_type for each in MULTIMODALS.values()} == {family.model_types[0]}
        # transformers has no Apertus, ERNIE 4.5, Gemma 4, GLM, Granite, OLMoE, MiniMax-M2 and Qwen3.5 of experts with one score a
        # sequence; megarl reads and writes them by the common name.
        own = {
            "apertus": "ApertusForSequenceClassification",
            "gemma4_text": "Gemma4ForSequenceClassification",
            "ernie4_5": "Ernie4_5ForSequenceClassification",
            "ernie4_5_moe": "Ernie4_5_MoeForSequenceClassification",
            "minimax_m2": "MiniMaxM2ForSequenceClassification",
            "olmoe": "OlmoeForSequenceClassification",
            "granite": "GraniteForSequenceClassification",
            "granitemoe": "GraniteMoeForSequenceClassification",
            "qwen3_5_moe_text": "Qwen3_5MoeTextForSequenceClassification",
            "glm4_moe": "Glm4MoeForSequenceClassification",
            "glm4_moe_lite": "Glm4MoeLiteForSequenceClassification",
        }
        kinds = own | MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        assert score_architecture(architecture) == kinds[family.model_types[0]]
    assert parse(DEEPSEEK, model_type="kimi_k2") == parse(DEEPSEEK, model_type="deepseek_v3") == parse(DEEPSEEK)


@pytest.mark.parametrize(
    ("architectures", "model_type"),
    [
        (["LlamaForCausalLM"], "mistral"),
        (["LlamaForCausalLM", "MistralForCausalLM"], "mistral"),
        (["LlamaForCausalLM"], "kimi_k2"),
        (["Qwen3ForCausalLM"], "qwen2"),
        (["LlamaForCausalLM"], 5),
        (["LlamaForCausalLM"], ["llama"]),
    ],
)
def test_a_model_type_of_another_family(architectures: list[str], model_type: object) -> None:
    with pytest.raises(UserError) as error:
        parse(SIZES, architectures=architectures, model_type=model_type)
    said = f"model_type {model_type!r} is not that of {architectures[0]}; transformers would build another model"
    assert said in str(error.value)


def test_llama_3_1_stretches_its_rope() -> None:
    scaling = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    config = of("LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling)
    assert config.rope == Rope(5e5, "llama3", factor=8.0, original_positions=8192)


@pytest.mark.parametrize(
    ("architecture", "changes", "window", "layers"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, 4096, range(6)),
        ("MistralForCausalLM", {"sliding_window": None}, None, range(0)),
        ("MistralForCausalLM", {}, 4096, range(6)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, None, range(0)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, 8, range(4, 6)),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, None, range(0)),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True}, None, range(0)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4,
            },
            8,
            range(2),
        ),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], window: int | None, layers: range) -> None:
    config = of(architecture, **changes)
    assert (config.window, config.local_layers) == (window, frozenset(layers))
    assert config.local_rope is None


def test_qwen3_moe() -> None:
    config = of("Qwen3MoeForCausalLM", **EXPERTS, norm_topk_prob=True)
    assert config.moe == Moe(8, 2, 32)
    assert config.moe_layers == frozenset(range(6))
    assert config.qk_norm
    new_names = {**EXPERTS, "num_experts": "absent", "num_local_experts": 8}
    sparse = of("Qwen3MoeForCausalLM", **new_names, decoder_sparse_step=2, mlp_only_layers=[3])
    assert sparse.moe == Moe(8, 2, 32, normalize=False)
    assert sparse.moe_layers == {1, 5}
    dense = of("Qwen3MoeForCausalLM", **EXPERTS, mlp_only_layers=list(range(6)))
    assert (dense.moe, dense.moe_layers) == (None, frozenset())


def test_mixtral() -> None:
    config = of("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert config.moe == Moe(8, 2, 96)
    assert config.rope == Rope(1e6)
    assert config.window is None


def test_deepseek_v3() -> None:
    config = parse(DEEPSEEK)
    assert config.mla == Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert (config.num_kv_heads, config.head_dim) == (128, 192)
    assert config.moe == Moe(
        256,
        8,
        2048,
        shared_ffn_hidden_size=2048,
        score="sigmoid",
        scaling_factor=2.5,
        num_groups=8,
        top_groups=4,
        score_bias=True,
    )
    assert config.moe_layers == {3, 4, 5}
    assert config.rope == Rope(1e4, "yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)


def test_deepseek_v3_without_what_may_be_left_out() -> None:
    absent = {"norm_topk_prob": "absent", "q_lora_rank": None, "rope_scaling": None}
    config = parse(DEEPSEEK, n_group=1, topk_group=1, n_shared_experts=2, **absent)
    assert config.mla is not None
    assert config.mla.q_rank is None
    assert config.moe is not None
    assert config.moe.normalize
    assert (config.moe.num_groups, config.moe.top_groups, config.moe.shared_ffn_hidden_size) == (0, 0, 4096)
    assert config.rope == Rope(1e4)


def test_gemma_3() -> None:
    config = parse(GEMMA)
    assert (config.window, config.local_layers) == (512, {0, 1, 2, 3, 4, 6})
    assert parse(GEMMA, sliding_window_pattern=2).local_layers == {0, 2, 4, 6}
    unnamed = parse(GEMMA, sliding_window_pattern="absent", _sliding_window_pattern=2)
    assert unnamed.local_layers == config.local_layers
    theirs = Gemma3TextConfig(num_hidden_layers=7, _sliding_window_pattern=2).layer_types
    assert {index for index, kind in enumerate(theirs) if kind == "sliding_attention"} == config.local_layers
    assert (config.rope, config.local_rope) == (Rope(1e6), Rope(1e4))
    assert (config.embedding_scale, config.query_scale) == (1152**0.5, 1 / 16)
    assert config.tied_embeddings
    assert config.norm_offset
    assert config.post_norms
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_to_later_tokens_is_refused_in_every_family(family: str) -> None:
    raw = tiny_config(family).to_dict() | {"architectures": [ARCHITECTURES[family]]}
    assert parse(raw, is_causal=True) == parse(raw)
    for value in (False, None):  # wherever it makes a mask, transformers takes null as false
        with pytest.raises(UserError, match=rf"is_causal={value} \(attention to later tokens\) is not supported"):
            parse(raw, is_causal=value)


@pytest.mark.parametrize(
    ("raw", "changes", "says"),
    [
        (DEEPSEEK, {"kv_lora_rank": "absent", "n_group": "absent"}, ["lacks kv_lora_rank, n_group"]),
        (DEEPSEEK, {"num_key_value_heads": 8}, ["num_key_value_heads 8", "num_attention_heads 128"]),
        (DEEPSEEK, {"rope_interleave": False}, ["rope_interleave=False"]),
        (DEEPSEEK, {"topk_method": "greedy", "scoring_func": "softmax"}, ["topk_method='greedy'", "'softmax'"]),
        (DEEPSEEK, {"moe_layer_freq": 2}, ["moe_layer_freq=2"]),
        (DEEPSEEK, {"attention_bias": True}, ["attention_bias=True"]),
        (DEEPSEEK, {"topk_group": 2}, ["n_group=8", "topk_group=2", "num_experts_per_tok=8", "counts its 2 best"]),
        (DEEPSEEK, {"topk_group": 9}, ["n_group=8", "topk_group=9"]),
        (DEEPSEEK, {"n_routed_experts": 100}, ["n_group=8", "100 experts"]),
        (DEEPSEEK, {"norm_topk_prob": False}, ["norm_topk_prob=False with sigmoid"]),
        (DEEPSEEK, {"norm_topk_prob": None}, ["norm_topk_prob=False with sigmoid"]),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size"]),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim is 63"]),
        (DEEPSEEK, {"qk_rope_head_dim": 0}, ["qk_rope_head_dim is 0"]),
        (SIZES, {"architectures": ["LlamaForCausalLM"], "partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (GEMMA, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0 (soft-capped logits)"]),
        (GEMMA, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        (GEMMA, {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        (GEMMA, {"hidden_activation": "relu"}, ["hidden_activation='relu'"]),
        (GEMMA, {"sliding_window_pattern": 0}, ["sliding_window_pattern is 0"]),
        (GEMMA, {"sliding_window": 0}, ["sliding_window is 0"]),
        (
            SIZES,
            {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "num_experts_per_tok": 9},
            ["num_experts_per_tok=9 of 8 experts"],
        ),
        (
            SIZES,
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                **EXPERTS,
                "num_experts_per_tok": 1,
                "norm_topk_prob": True,
            },
            ["num_experts_per_tok=1 with norm_topk_prob=True"],
        ),
        (
            SIZES,
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2},
            ["lacks num_local_experts", "MixtralForCausalLM"],
        ),
        (
            SIZES,
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 6},
            ["layer_types", "sliding_window=4096"],
        ),
    ],
)
def test_what_a_family_is_refused_for(raw: dict[str, Any], changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(raw, **changes)
    for part in [str(PATH), *says]:
        assert part in str(error.value)
