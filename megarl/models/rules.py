"""The one mapping between HF's names and Megatron's, as data: used to load, save, convert, check and sync. Without torch.

`LAYER` is the table. A row says which Megatron parameter is made of which HF tensors, in which order of rows, and how it is
cut over tensor parallel; `rules` reads it for one model. Which rows a rank holds is in parts.py, what is done with the
tensors in mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.models.config import ModelConfig

# How a Megatron tensor is cut over tensor parallel (experts: over expert-tensor parallel).
Cut = Literal["whole", "rows", "columns"]
# In which order the rows of the HF tensors stand in the Megatron tensor. chain: as they are. groups: for each key-value
# head its queries, its key, its value. halves: for each rank its rows of every tensor. padded: behind them rows of zeros,
# up to a multiple of the ranks.
Order = Literal["chain", "groups", "halves", "padded"]
# torch: our own layer spec. transformer_engine: fuses norms into the linears behind them, and groups experts.
LayerSpec = Literal["torch", "transformer_engine"]


@dataclass(frozen=True)
class Row:
    """A line of the table. Names are those within a layer, and `{e}` in them stands for the expert.

    hf: pairs of an HF name and the names of its sizes (see `_sizes`); rows of `a+b` are those of a tensor of a rows and, below,
    of one of b. when: features that a layer needs to have it (see `_features`). fused, fused_cut: name and cut under
    Transformer Engine, where they differ. is_buffer: not a parameter, and float32 whatever the model is.
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
SHARED_GATE_UP = (
    ("mlp.shared_experts.gate_proj.weight", "shared_ffn hidden"),
    ("mlp.shared_experts.up_proj.weight", "shared_ffn hidden"),
)
SHARED_GATE_UP_OF_ONE = (
    ("mlp.shared_expert.gate_proj.weight", "shared_ffn hidden"),
    ("mlp.shared_expert.up_proj.weight", "shared_ffn hidden"),
)
SHARED_GATE = "mlp.shared_experts.gate_weight"
EXPERT_FC1, GROUPED_FC1 = "mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{e}"
EXPERT_FC2, GROUPED_FC2 = "mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{e}"

# Megatron parameters whose HF tensors an engine fuses while it loads: it remembers the first of the two only within one
# bucket (SGLang, deepseek_weight_loader.py: cached_a_proj), so that they must share one.
FUSED = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")

LAYER = (
    # Norm before attention, and attention: with heads of their own for keys and values ...
    Row("input_layernorm.weight", (("input_layernorm.weight", "hidden"),), when="heads", fused=NORM_IN_QKV),
    Row("self_attention.linear_qkv.weight", QKV_WEIGHT, "rows", "groups", "heads qkv_apart"),
    Row("self_attention.linear_qkv.weight", QKV_IN_ONE, "rows", "groups", "heads qkv_in_one"),
    Row("self_attention.linear_qkv.bias", QKV_BIAS, "rows", "groups", "heads qkv_bias"),
    Row("self_attention.q_layernorm.weight", (("self_attn.q_norm.weight", "head"),), when="heads qk_norm"),
    Row("self_attention.k_layernorm.weight", (("self_attn.k_norm.weight", "head"),), when="heads qk_norm"),
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
    Row("self_attention.linear_proj.weight", (("self_attn.o_proj.weight", "hidden values"),), "columns"),
    # Norm before the MLP; Gemma and GLM-4 have norms behind attention and MLP too, and Gemma's HF names move on by one.
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
        when="gemma_norms dense",
        fused=NORM_IN_FC1,
    ),
    Row("pre_mlp_layernorm.weight", (("post_attention_layernorm.weight", "hidden"),), when="common_norms experts"),
    # A dense MLP ...
    Row("mlp.linear_fc1.weight", GATE_UP, "rows", "halves", "dense gate_apart"),
    Row("mlp.linear_fc1.weight", GATE_UP_IN_ONE, "rows", "halves", "dense gate_in_one"),
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
    # ... or experts, under two sets of HF names.
    Row("mlp.router.weight", (("mlp.gate.weight", "experts hidden"),), when="experts common_names"),
    Row("mlp.router.weight", (("block_sparse_moe.gate.weight", "experts hidden"),), when="experts mixtral_names"),
    Row(
        "mlp.router.expert_bias",
        (("mlp.gate.e_score_correction_bias", "experts"),),
        when="experts score_bias",
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
    # Shared experts, several of them, or one with a gate.
    Row("mlp.shared_experts.linear_fc1.weight", SHARED_GATE_UP, "rows", "halves", "experts shared_experts"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.shared_experts.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="experts shared_experts",
    ),
    Row(SHARED_GATE, (("mlp.shared_expert_gate.weight", "one hidden"),), when="experts shared_expert"),
    Row("mlp.shared_experts.linear_fc1.weight", SHARED_GATE_UP_OF_ONE, "rows", "halves", "experts shared_expert"),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        (("mlp.shared_expert.down_proj.weight", "hidden shared_ffn"),),
        "columns",
        when="experts shared_expert",
    ),
)
EMBEDDING = Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "vocab hidden"),), "rows", "padded")
FINAL_NORM = Row("decoder.final_layernorm.weight", (("model.norm.weight", "hidden"),))
HEAD = Row("output_layer.weight", (("lm_head.weight", "vocab hidden"),), "rows", "padded")
SCORE_HEAD = Row("output_layer.weight", (("score.weight", "one hidden"),))
TIED_HEAD = Row("output_layer.weight", EMBEDDING.hf, "rows", "padded")


@dataclass(frozen=True)
class Source:
    """An HF tensor that a rule is made of. pieces: rows of the tensors that it is, one below the other; () is one alone."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Rows of each piece."""
        return self.pieces or self.shape[:1]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter of the whole model, by its global name: the row, for this layer and this expert.

    layer: the layer that it lives with: embeddings with the first, final norm and head with the last. expert: None where
    tensor parallel cuts it, not expert-tensor parallel. rounds: how often the rows of all sources, and of their pieces, take
    turns; 0 is once for each rank. is_padded: zeros fill up the rows to a multiple of the ranks. is_copy: a second copy of a
    tensor that another rule has; it is loaded, and never exported.
    """

    megatron: str
    sources: tuple[Source, ...]
    cut: Cut
    rounds: int
    is_padded: bool
    layer: int
    expert: int | None = None
    is_buffer: bool = False
    is_copy: bool = False


def rules(config: ModelConfig, spec: LayerSpec, *, has_head_copy: bool = False) -> Iterator[Rule]:
    """Every parameter and mapped buffer of the model, in the order in which a forward pass meets them.

    has_head_copy: the last pipeline stage holds a copy of tied embeddings (the first stage is another).
    """
    sizes, last = _sizes(config), config.num_layers - 1
    yield _rule(EMBEDDING, sizes, spec, layer=0)
    for layer in range(config.num_layers):
        features = _features(config, layer)
        prefixes = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        found = [row for row in LAYER if features.issuperset(row.when.split())]
        common = [row for row in found if "{e}" not in row.megatron]
        each_expert = [row for row in found if "{e}" in row.megatron]
        yield from (_rule(row, sizes, spec, layer=layer, prefixes=prefixes) for row in common)
        if config.moe is not None:
            for expert in range(config.moe.num_experts):
                yield from (
                    _rule(row, sizes, spec, layer=layer, prefixes=prefixes, expert=expert) for row in each_expert
                )
    yield _rule(FINAL_NORM, sizes, spec, layer=last)
    if config.head == "score":
        yield _rule(SCORE_HEAD, sizes, spec, layer=last)
    elif not config.tied_embeddings:
        yield _rule(HEAD, sizes, spec, layer=last)
    elif has_head_copy:
        yield _rule(TIED_HEAD, sizes, spec, layer=last, is_copy=True)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model."""
    return {source.name: source.shape for rule in rules(config, "torch") for source in rule.sources}


def _rule(
    row: Row,
    sizes: dict[str, int],
    spec: LayerSpec,
    *,
    layer: int,
    prefixes: tuple[str, str] = ("", ""),
    expert: int | None = None,
    is_copy: bool = False,
) -> Rule:
    fused = spec == "transformer_engine"
    ours, theirs = prefixes
    number = "" if expert is None else str(expert)
    sources = tuple(_source(theirs + name.replace("{e}", number), names, sizes) for name, names in row.hf)
    name = row.fused if fused and row.fused else row.megatron
    return Rule(
        megatron=ours + name.replace("{e}", number),
        sources=sources,
        cut=row.fused_cut if fused and row.fused_cut else row.cut,
        rounds={"groups": sizes["groups"], "halves": 0}.get(row.order, 1),
        is_padded=row.order == "padded",
        layer=layer,
        expert=expert,
        is_buffer=row.is_buffer,
        is_copy=is_copy,
    )


def _source(name: str, names: str, sizes: dict[str, int]) -> Source:
    rows, *columns = names.split()
    pieces = tuple(sizes[size] for size in rows.split("+"))
    shape = sum(pieces), *(sizes[size] for size in columns)
    return Source(name, shape, pieces if len(pieces) > 1 else ())


def _features(config: ModelConfig, layer: int) -> frozenset[str]:
    """What a layer is made of, in the words of the table's `when`."""
    moe, mla = config.moe, config.mla
    found = {
        "heads": mla is None,
        "latent": mla is not None,
        "direct_queries": mla is not None and mla.q_rank is None,
        "latent_queries": mla is not None and mla.q_rank is not None,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "gemma_norms": config.sandwich_norms and config.family != "glm4",
        "glm4_norms": config.sandwich_norms and config.family == "glm4",
        "common_norms": not config.sandwich_norms or config.family == "glm4",
        "dense": layer not in config.moe_layers,
        "experts": layer in config.moe_layers,
        "score_bias": moe is not None and moe.score_bias,
        "shared_experts": moe is not None and moe.shared_ffn_hidden_size > 0 and not moe.shared_gate,
        "shared_expert": moe is not None and moe.shared_gate,
        "mixtral_names": config.family == "mixtral",
        "common_names": config.family != "mixtral",
        "qkv_in_one": config.family == "phi3",
        "qkv_apart": config.family != "phi3",
        "gate_in_one": config.family in ("glm4", "phi3"),
        "gate_apart": config.family not in ("glm4", "phi3"),
    }
    return frozenset(name for name, holds in found.items() if holds)


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that the table names; `groups` is the number of key-value heads."""
    heads = config.num_heads
    sizes = {
        "one": 1,
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "groups": config.num_kv_heads,
        "head": config.head_dim,
        "queries": heads * config.head_dim,
        "keys": config.num_kv_heads * config.head_dim,
        "values": heads * config.head_dim,
        "ffn": config.ffn_hidden_size,
    }
    if config.mla is not None:
        mla = config.mla
        sizes |= {
            "q_rank": mla.q_rank or 0,
            "kv_rank": mla.kv_rank,
            "kv_down": mla.kv_rank + mla.rope_dim,
            "kv_up": heads * (mla.nope_dim + mla.v_dim),
            "values": heads * mla.v_dim,
        }
    if config.moe is not None:
        moe = config.moe
        sizes |= {
            "experts": moe.num_experts,
            "expert_ffn": moe.ffn_hidden_size,
            "shared_ffn": moe.shared_ffn_hidden_size,
        }
    return sizes
