"""What one HF architecture is made of, in the words of its config.json: a row of `families`. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.models.family_experts import MoeKeys
from megarl.models.family_limits import COMMON, Only


@dataclass(frozen=True)
class Family:
    """One HF architecture.

    model_types: what `model_type` may be, by which transformers chooses the model; the first is transformers' own.
    qkv_bias, qk_norm: a key that says, or the answer where there is none; qkv_bias_unsaid: what a key says that is not there.
    output_bias: the same of the bias behind attention.
    rotary_share: which part of a head RoPE turns where no key says; None: all of it, and no key may say otherwise.
    rotary_width: a key that says how many elements of a head those are.
    position_scale: queries grow with their position, as the object that describes the scaling says (Rope).
    longrope: transformers scales its positions by LongRoPE and in no other way. interleaved: it turns neighbours.
    alpha_rope: positions may be scaled by a factor of the base, and by no kind that scales cosine and sine.
    rope_unsaid: the object that describes the scaling, where no key does. head_dim: where no key says; None: the hidden size
    over the heads. head_dim_null: null is that as well; elsewhere transformers makes no model of it. head_dim_fixed: it makes
    none of another. head_dim_wanted: it makes none without the key.
    pre_norms, post_norms: norms before attention and MLP, and behind them. whole_qk_norm, late_qk_norm, sinks: see
    ModelConfig. unscaled_locally: layers with a window have RoPE that is not scaled.
    unrotated: which layers have no positions: those without a window in models that have windows ("global"), or those that
    no_rope_layers names, every fourth where no key says ("named").
    delta: layers that layer_types names have Gated DeltaNet (hf_delta). output_gate, norm_offset: see ModelConfig.
    multipliers: four keys say what is multiplied (hf_scales). global_heads: layers without a window have heads and RoPE of their
    own, and all that goes with it in Gemma 4 (hf_global); the last layer is one.
    window: which layers slide a window where the config sets one: none may, all do, those from max_window_layers on, or
    those that a pattern names: where no key says, those whose number is no multiple of window_period. window_switch: only
    where use_sliding_window says so. window_default: where no key says.
    ffn_hidden_size: under which key a config has the width of an MLP without experts; where no layer has one, of another.
    theta: RoPE's base where no key says. tied: whether the head is the embedding where no key says; transformers leaves
    out what equals its own default. pad, eos: the padding token, and those that end a response, where no key says;
    eos_at_null: where one says null, too. only: see COMMON. score_architecture: of its models with one score a sequence,
    where it is not the architecture with ForSequenceClassification for ForCausalLM.
    """

    name: str
    model_types: tuple[str, ...]
    qkv_bias: bool | str = False
    qkv_bias_unsaid: bool = False
    output_bias: bool | str = False
    qk_norm: bool | str = False
    rotary_share: float | None = None
    rotary_width: str | None = None
    position_scale: bool = False
    longrope: bool = False
    alpha_rope: bool = False
    head_dim: int | None = None
    head_dim_null: bool = False
    head_dim_fixed: bool = False
    head_dim_wanted: bool = False
    interleaved: bool = False
    rope_unsaid: Mapping[str, Any] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    whole_qk_norm: bool = False
    late_qk_norm: bool = False
    unscaled_locally: bool = False
    unrotated: Literal["never", "global", "named"] = "never"
    multipliers: bool = False
    delta: bool = False
    output_gate: bool = False
    norm_offset: bool = False
    sinks: bool = False
    global_heads: bool = False
    moe: MoeKeys | None = None
    ffn_hidden_size: str = "intermediate_size"
    mla: bool = False
    gemma: bool = False
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped", "xielu"] = "silu"
    window: Literal["never", "all", "upper", "pattern"] = "never"
    window_period: int = 6
    window_switch: bool = False
    window_default: int | None = None
    theta: float = 10000.0
    tied: bool = False
    pad: int | None = None
    eos: tuple[int, ...] = ()
    eos_at_null: bool = False
    only: Only = field(default_factory=lambda: COMMON)
    score_architecture: str | None = None
