"""What megarl knows of a model: sizes and features as data, for one builder and one table of rules. Without torch.

`hf_config` fills it from an HF folder; nothing here knows HF's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megarl.models.vision import Vision


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `scaled` kinds stretch a model beyond the context that it was first trained on.

    theta: base of the frequencies. kind: default (no scaling), linear, llama3, yarn, longrope or proportional. factor: how many
    times longer.
    original_positions: context before scaling. low_freq_factor, high_freq_factor: llama3's.
    beta_fast, beta_slow, mscale, truncate: yarn's. mscale_all_dim: yarn's, and of latent attention whatever scales it.
    attention_factor: yarn's scale of cos and sin, where it is not left to the formula.
    short_factors: longrope's divisors of each frequency, for sequences of at most original_positions tokens.
    share: proportional's, of the frequencies that are not zero: the others' elements stay as they are.
    position_beta: by how much queries grow from one original_positions to the next (Llama 4; `rope.position_scale`); 0 is not.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    share: float = 1.0
    position_beta: float = 0.0


@dataclass(frozen=True)
class Moe:
    """Mixture of experts, in the layers that `ModelConfig.moe_layers` names.

    ffn_hidden_size: of one expert, one of the two gated halves. shared_ffn_hidden_size: of the shared experts together,
    0 where there are none. score: how router logits become scores. normalize: chosen scores are divided by their sum.
    scaling_factor: multiplies the chosen scores. num_groups, top_groups: group-limited routing; 0 is off.
    best_of_group: a group counts its best expert (DeepSeek-V2, arXiv 2405.04434), not its two best.
    score_bias: a bias for each expert, added for the choice alone (DeepSeek-V3's e_score_correction_bias).
    shared_gate: the shared experts' output is multiplied by a sigmoid of the token's own (Qwen1.5-MoE).
    biases: router and experts have biases, and HF's folder one tensor for all experts of a layer (gpt-oss).
    normed: the shared experts are the layer's MLP; router, MLP and the others have norms of their own, and what an expert puts
    out is multiplied by a number that it learned (Gemma 4).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 0
    top_groups: int = 0
    best_of_group: bool = False
    score_bias: bool = False
    shared_gate: bool = False
    biases: bool = False
    normed: bool = False


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). q_rank: None where queries are not compressed.

    A head of queries and keys is nope_dim + rope_dim wide, of values v_dim.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class GlobalHeads:
    """Heads of the layers without a window, where they are others than those of layers with one (Gemma 4).

    keys_as_values: one linear gives what becomes a key by a norm and the rotation, and a value by a norm alone.
    """

    num_kv_heads: int
    head_dim: int
    keys_as_values: bool


@dataclass(frozen=True)
class Delta:
    """Gated DeltaNet (arXiv 2412.06464), in the layers that `ModelConfig.linear_layers` names.

    num_key_heads: of queries and keys, each key_dim wide. num_value_heads: a multiple of them, each value_dim wide.
    conv_width: tokens that the convolution before the rule sees. state_bytes: of an element of the state that a server keeps.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_bytes: int = 4

    @property
    def mixed(self) -> int:
        """Of one key head, the elements of a token that the convolution goes over: query, key, and values."""
        return 2 * self.key_dim + self.num_value_heads // self.num_key_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Of one key head, the columns of the linears before the rule: gates and two numbers a value head as well."""
        return self.mixed + self.num_value_heads // self.num_key_heads * (self.value_dim + 2)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are counts of elements; `ffn_hidden_size` is of one of the two gated halves.

    num_kv_heads, head_dim: with `mla`, equal to num_heads and to the width of a query head.
    rotary_dim: how much of a head is rotated, from its beginning; None is all, or with `mla` its part for that.
    interleaved_rope: RoPE turns neighbours, not an element of one half with one of the other; with `mla` it is no question.
    moe_layers: layers (from 0) that have experts in the MLP's place. local_layers: layers with sliding-window attention
    over `window` tokens (the token itself among them), rotated by `local_rope` where given. unrotated_layers: layers without
    positions (NoPE, arXiv 2305.19466).
    activation: of the MLP's gate; swiglu_clamped is x sigmoid(1.702 x) of what is at most 7, times what it lets through,
    between -7 and 7, plus 1 (gpt-oss). xielu has no gate: the MLP's first linear is of one half alone (Apertus).
    sinks: each head has one more logit in its softmax's denominator, which is learned (arXiv 2309.17453).
    output_bias: attention's output has a bias (gpt-oss).
    norm_offset: norms multiply by 1 + weight. pre_norms, post_norms: norms before attention and MLP, and behind them.
    whole_qk_norm: norms of queries and of keys, where there are any, are over all heads together (OLMo-2, arXiv 2501.00656).
    late_qk_norm: they are behind the rotation (Hunyuan). value_norm: each head's values have a norm too, without a weight.
    global_heads: of the layers without a window; num_kv_heads and head_dim are those of the others. `of_layer` has each layer's.
    keys_as_values: of all layers of this config; see GlobalHeads.
    layer_scale: what a layer puts out is multiplied by a number of its own, which does not learn (Gemma 4).
    output_gate: attention's output is multiplied by a sigmoid of as many numbers of the token's own, which q_proj has (Qwen3.5).
    linear_layers: layers (from 0) that have `delta` in attention's place.
    pad_token_id: the token whose embedding does not learn; None is none.
    embedding_scale: multiplies the embeddings. query_scale: of the attention logits; None is head_dim ** -0.5.
    residual_scale: multiplies what attention and MLP add to the residual stream. logit_scale: multiplies the vocabulary's logits.
    logit_cap: c, of which logits x become c tanh(x / c).
    head: score is one number a token in the vocabulary's place: a critic's value, a reward model's score.
    fp8_block: rows and columns of a block with one scale, where the folder's weights are FP8; what is loaded is not.
    mxfp4: whether the folder's experts are MXFP4 (hf_mxfp4.py); what is loaded is not.
    vision: how it sees images; its folder is then a multimodal one, of which everything else here is the text part.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    rope: Rope
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    moe: Moe | None = None
    moe_layers: frozenset[int] = frozenset()
    mla: Mla | None = None
    delta: Delta | None = None
    linear_layers: frozenset[int] = frozenset()
    output_gate: bool = False
    rotary_dim: int | None = None
    interleaved_rope: bool = False
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped", "xielu"] = "silu"
    sinks: bool = False
    output_bias: bool = False
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    whole_qk_norm: bool = False
    late_qk_norm: bool = False
    value_norm: bool = False
    global_heads: GlobalHeads | None = None
    keys_as_values: bool = False
    layer_scale: bool = False
    embedding_scale: float = 1.0
    pad_token_id: int | None = None
    query_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    window: int | None = None
    local_layers: frozenset[int] = frozenset()
    local_rope: Rope | None = None
    unrotated_layers: frozenset[int] = frozenset()
    head: Literal["vocabulary", "score"] = "vocabulary"
    fp8_block: tuple[int, int] | None = None
    mxfp4: bool = False
    vision: Vision | None = None

    def with_score_head(self) -> ModelConfig:
        """The same model with one number a token in the vocabulary's place."""
        return replace(self, head="score", tied_embeddings=False)

    def with_tower(self, tower: Mapping[str, tuple[int, ...]], *, newer_names: bool) -> ModelConfig:
        """The same model with the vision tower as a part of it. As `Vision` has them; tower: name -> shape."""
        assert self.vision is not None
        vision = replace(self.vision, tower=tuple(sorted(tower.items())), newer_names=newer_names)
        return replace(self, vision=vision)

    @property
    def quantised(self) -> str | None:
        """What the folder's weights are called where they are quantised."""
        return "FP8" if self.fp8_block is not None else "MXFP4" if self.mxfp4 else None

    @property
    def halves(self) -> int:
        """Of an MLP's first linear: a gate and what it lets through, or one without a gate."""
        return 1 if self.activation == "xielu" else 2

    @property
    def rotated(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.mla.rope_dim if self.mla is not None else self.rotary_dim or self.head_dim

    def of_layer(self, layer: int) -> ModelConfig:
        """The same model with this layer's heads (layer: from 0) as those of all."""
        return self._heads_of(is_local=layer in self.local_layers)

    @property
    def kinds_of_heads(self) -> tuple[tuple[float, ModelConfig], ...]:
        """The share of the layers that have the same heads, and the model with these as those of all; one where all are alike.

        Those of layers with a window come first.
        """
        if self.global_heads is None:
            return ((1.0, self),)
        local = len(self.local_layers) / self.num_layers
        kinds = ((local, self._heads_of(is_local=True)), (1 - local, self._heads_of(is_local=False)))
        return tuple((share, config) for share, config in kinds if share)

    def _heads_of(self, *, is_local: bool) -> ModelConfig:
        heads = self.global_heads
        if heads is None:
            return self
        if is_local:
            return replace(self, global_heads=None)
        return replace(
            self,
            global_heads=None,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            keys_as_values=heads.keys_as_values,
        )

    def layer_rope(self, layer: int) -> Rope | None:
        """Rotary positions of one layer (from 0); None where it has none."""
        if layer in self.unrotated_layers:
            return None
        return self.rope if self.local_rope is None or layer not in self.local_layers else self.local_rope

    @property
    def mixed_ropes(self) -> bool:
        """Whether layers rotate by different frequencies, or only some by a RoPE that scales their logits."""
        return self.local_rope is not None or (bool(self.unrotated_layers) and self.rope.kind in ("yarn", "longrope"))

    @property
    def context(self) -> int:
        """Most tokens of a sequence: under longrope those that have its short factors, the only ones that megarl takes."""
        positions = self.max_positions
        return min(positions, self.rope.original_positions) if self.rope.kind == "longrope" else positions

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tp) * tp
