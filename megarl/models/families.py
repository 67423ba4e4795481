"""What all models of an HF architecture share: data, so that a family is a row and not a code path. Without torch.

`hf_config` reads a config.json by these rows; how the weights are called is in `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megarl.models.family import Family
from megarl.models.family_experts import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE_MOE,
    GEMMA4,
    GLM4_MOE_LITE,
    GPT_OSS,
    HUNYUAN_MOE,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from megarl.models.family_limits import (
    APERTUS_ONLY,
    DEEPSEEK_ONLY,
    DEEPSEEK_V2_ONLY,
    ERNIE_MOE_ONLY,
    ERNIE_ONLY,
    GEMMA3_ONLY,
    GEMMA4_ONLY,
    GLM4_ONLY,
    GPT_OSS_ONLY,
    HUNYUAN_DENSE_ONLY,
    HUNYUAN_MOE_ONLY,
    MINIMAX_M2_ONLY,
    OLMO3_ONLY,
    OLMOE_ONLY,
    PHI3_ONLY,
    QWEN2_ONLY,
    QWEN3_5_MOE_ONLY,
    QWEN3_5_ONLY,
)

LANGUAGE_MODEL, SCORE_MODEL = "ForCausalLM", "ForSequenceClassification"


QWEN3_5 = Family(
    "qwen3_5",
    ("qwen3_5_text",),
    qk_norm=True,
    rotary_share=0.25,
    head_dim=256,
    delta=True,
    output_gate=True,
    norm_offset=True,
    only=QWEN3_5_ONLY,
)
ERNIE = Family(
    "ernie4_5",
    ("ernie4_5",),
    head_dim=128,
    head_dim_null=True,
    interleaved=True,
    theta=5e5,
    tied=True,
    pad=0,
    eos=(2,),
    only=ERNIE_ONLY,
)
HUNYUAN = Family(
    "hunyuan_v1_dense",
    ("hunyuan_v1_dense",),
    qk_norm=True,
    late_qk_norm=True,
    alpha_rope=True,
    head_dim_wanted=True,
    pad=0,
    eos=(2,),
    only=HUNYUAN_DENSE_ONLY,
)
OLMO2 = Family(
    "olmo2", ("olmo2",), qk_norm=True, whole_qk_norm=True, pre_norms=False, post_norms=True, pad=1, eos=(50279,)
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen2ForCausalLM": Family(
            "qwen2",
            ("qwen2",),
            qkv_bias=True,
            window="upper",
            window_switch=True,
            window_default=4096,
            only=QWEN2_ONLY,
        ),
        "Qwen3ForCausalLM": Family(
            "qwen3", ("qwen3",), qk_norm=True, head_dim=128, window="upper", window_switch=True, window_default=4096
        ),
        "Qwen3_5ForCausalLM": replace(QWEN3_5, score_architecture="Qwen3_5TextForSequenceClassification"),
        "Qwen3_5MoeForCausalLM": replace(
            QWEN3_5,
            name="qwen3_5_moe",
            model_types=("qwen3_5_moe_text",),
            moe=QWEN3_5_MOE,
            ffn_hidden_size="shared_expert_intermediate_size",
            only=QWEN3_5_MOE_ONLY,
            # Without "Text" it would be that of the model that sees (multimodal.py).
            score_architecture="Qwen3_5MoeTextForSequenceClassification",
        ),
        "Qwen3NextForCausalLM": replace(QWEN3_5, name="qwen3_next", model_types=("qwen3_next",), moe=QWEN3_NEXT),
        "Qwen3MoeForCausalLM": Family(
            "qwen3_moe",
            ("qwen3_moe",),
            qk_norm=True,
            moe=QWEN3_MOE,
            window="all",
            window_switch=True,
            window_default=4096,
        ),
        "Qwen2MoeForCausalLM": Family(
            "qwen2_moe",
            ("qwen2_moe",),
            qkv_bias="qkv_bias",
            qkv_bias_unsaid=True,
            moe=QWEN2_MOE,
            only=QWEN2_ONLY,
        ),
        "LlamaForCausalLM": Family("llama", ("llama",), head_dim_null=True, eos=(2,)),
        "MistralForCausalLM": Family(
            "mistral", ("mistral",), head_dim_null=True, window="all", window_default=4096, eos=(2,)
        ),
        "Ministral3ForCausalLM": Family(
            "ministral3",
            ("ministral3",),
            rope_unsaid=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16384,
                    "llama_4_scaling_beta": 0.1,
                }
            ),
            position_scale=True,
            head_dim=128,
            window="all",
            pad=11,
            eos=(2,),
        ),
        "Phi3ForCausalLM": Family(
            "phi3",
            ("phi3",),
            rotary_share=1.0,
            longrope=True,
            window="all",
            pad=32000,
            eos=(32000,),
            only=PHI3_ONLY,
        ),
        "MixtralForCausalLM": Family(
            "mixtral", ("mixtral",), head_dim_null=True, moe=MIXTRAL, window="all", theta=1e6, eos=(2,)
        ),
        "DeepseekV3ForCausalLM": Family(
            "deepseek_v3",
            ("deepseek_v3", "kimi_k2"),
            head_dim_null=True,
            moe=DEEPSEEK_V3,
            mla=True,
            eos=(1,),
            only=DEEPSEEK_ONLY,
        ),
        "ApertusForCausalLM": Family(
            "apertus",
            ("apertus",),
            qk_norm=True,
            activation="xielu",
            rope_unsaid=MappingProxyType(
                {
                    "rope_type": "llama3",
                    "rope_theta": 12e6,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            ),
            theta=12e6,
            pad=3,
            eos=(2,),
            only=APERTUS_ONLY,
        ),
        "DeepseekV2ForCausalLM": Family(
            "deepseek_v2",
            ("deepseek_v2",),
            head_dim_null=True,
            moe=DEEPSEEK_V2,
            mla=True,
            eos=(2,),
            only=DEEPSEEK_V2_ONLY,
        ),
        "Ernie4_5ForCausalLM": ERNIE,
        "Ernie4_5_MoeForCausalLM": replace(
            ERNIE,
            name="ernie4_5_moe",
            model_types=("ernie4_5_moe",),
            head_dim=None,
            head_dim_null=False,
            moe=ERNIE_MOE,
            only=ERNIE_MOE_ONLY,
        ),
        "HunYuanDenseV1ForCausalLM": HUNYUAN,
        "HunYuanMoEV1ForCausalLM": replace(
            HUNYUAN,
            name="hunyuan_v1_moe",
            model_types=("hunyuan_v1_moe",),
            moe=HUNYUAN_MOE,
            only=HUNYUAN_MOE_ONLY,
        ),
        "Glm4ForCausalLM": Family(
            "glm4",
            ("glm4",),
            qkv_bias="attention_bias",
            qkv_bias_unsaid=True,
            rotary_share=0.5,
            head_dim=128,
            interleaved=True,
            post_norms=True,
            pad=151329,
            eos=(151329, 151336, 151338),
            eos_at_null=True,
            only=GLM4_ONLY,
        ),
        "Glm4MoeForCausalLM": Family(
            "glm4_moe",
            ("glm4_moe",),
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
            rotary_share=0.5,
            moe=DEEPSEEK_V3,
            only=GLM4_ONLY,
        ),
        "Glm4MoeLiteForCausalLM": Family(
            "glm4_moe_lite", ("glm4_moe_lite",), moe=GLM4_MOE_LITE, mla=True, eos=(1,), only=DEEPSEEK_ONLY
        ),
        "GptOssForCausalLM": Family(
            "gpt_oss",
            ("gpt_oss",),
            qkv_bias=True,
            rope_unsaid=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                }
            ),
            head_dim=64,
            sinks=True,
            output_bias=True,
            moe=GPT_OSS,
            activation="swiglu_clamped",
            window="pattern",
            window_period=2,
            window_default=128,
            theta=150000.0,
            only=GPT_OSS_ONLY,
        ),
        "GraniteForCausalLM": Family("granite", ("granite",), multipliers=True, eos=(2,)),
        "GraniteMoeForCausalLM": Family("granitemoe", ("granitemoe",), multipliers=True, moe=MIXTRAL, eos=(2,)),
        "Olmo2ForCausalLM": OLMO2,
        "Olmo3ForCausalLM": replace(
            OLMO2,
            name="olmo3",
            model_types=("olmo3",),
            unscaled_locally=True,
            window="pattern",
            window_period=4,
            window_default=4096,
            only=OLMO3_ONLY,
        ),
        "Exaone4ForCausalLM": Family(
            "exaone4",
            ("exaone4",),
            qk_norm=True,
            pre_norms=False,
            post_norms=True,
            unrotated="global",
            window="pattern",
            window_period=4,
            window_default=4096,
            eos=(2,),
        ),
        "SmolLM3ForCausalLM": Family(
            "smollm3", ("smollm3",), unrotated="named", theta=2e6, tied=True, pad=128004, eos=(128001,)
        ),
        "SeedOssForCausalLM": Family(
            "seed_oss",
            ("seed_oss",),
            qkv_bias="attention_bias",
            qkv_bias_unsaid=True,
            output_bias="attention_out_bias",
            head_dim=128,
            head_dim_null=True,
            pad=1,
            eos=(2,),
            only=QWEN2_ONLY,
        ),
        "MiniMaxM2ForCausalLM": Family(
            "minimax_m2",
            ("minimax_m2",),
            qk_norm=True,
            whole_qk_norm=True,
            rotary_share=1.0,
            rotary_width="rotary_dim",
            head_dim=128,
            moe=MINIMAX_M2,
            theta=5e6,
            eos=(200020,),
            only=MINIMAX_M2_ONLY,
        ),
        "OlmoeForCausalLM": Family(
            "olmoe",
            ("olmoe",),
            head_dim_fixed=True,
            qk_norm=True,
            whole_qk_norm=True,
            moe=OLMOE,
            pad=1,
            eos=(50279,),
            only=OLMOE_ONLY,
        ),
        "Gemma3ForCausalLM": Family(
            "gemma3",
            ("gemma3_text",),
            qk_norm=True,
            head_dim=256,
            gemma=True,
            activation="gelu_tanh",
            window="pattern",
            window_default=4096,
            theta=1e6,
            tied=True,
            pad=0,
            eos=(1,),
            only=GEMMA3_ONLY,
            score_architecture="Gemma3TextForSequenceClassification",
        ),
        "Gemma4ForCausalLM": Family(
            "gemma4",
            ("gemma4_text",),
            qk_norm=True,
            head_dim=256,
            global_heads=True,
            moe=GEMMA4,
            post_norms=True,
            activation="gelu_tanh",
            window="pattern",
            window_default=512,
            tied=True,
            pad=0,
            eos=(1,),
            only=GEMMA4_ONLY,
        ),
    }
)


def score_architecture(architecture: str) -> str:
    """What transformers calls a family's models with one score a sequence."""
    return FAMILIES[architecture].score_architecture or architecture.replace(LANGUAGE_MODEL, SCORE_MODEL)
