"""The one mapping between HF's names and Megatron's, as data: used to load, save, convert, check and sync. Without torch.

The table is in rule_table.py; `rules` reads it for one model. Which rows a rank holds is in parts.py, what is done with the
tensors in mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.models.config import ModelConfig
from megarl.models.multimodal import TOWER as HF_TOWER
from megarl.models.rule_table import EMBEDDING, FINAL_NORM, HEAD, LAYER, SCORE_HEAD, TIED_HEAD, Cut, Row

# torch: our own layer spec. transformer_engine: fuses norms into the linears behind them, and groups experts.
LayerSpec = Literal["torch", "transformer_engine"]
OTHER_SHARED = ("hunyuan_v1_moe", "gemma4")  # families whose shared experts have other names
TOWER = "vision_tower."  # how names of a vision tower's tensors begin, which is one module of Megatron's model
MIXTRAL_NAMES, HUNYUAN_MOE = ("mixtral", "minimax_m2"), "hunyuan_v1_moe"  # families


@dataclass(frozen=True)
class Slot:
    """Where a source lies in an HF tensor of all experts: it is an expert's, of every `step`th element of the last dimension.

    A matrix [out, in] stands there as [in, out]. shape: of the whole HF tensor. first: the first of its elements. as_rows: the
    tensor is [experts, out, in], and the source is the expert's rows from `first` on.
    """

    shape: tuple[int, ...]
    expert: int
    first: int
    step: int = 1
    as_rows: bool = False


@dataclass(frozen=True)
class Source:
    """An HF tensor that a rule is made of, or its slot in one. shape: of what it is made of.

    pieces: rows of the tensors that it is, one below the other; () is one alone. is_scalar: the HF tensor has no dimensions.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()
    slot: Slot | None = None
    is_scalar: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the whole HF tensor."""
        if self.is_scalar:
            return ()
        return self.shape if self.slot is None else self.slot.shape

    @property
    def is_turned(self) -> bool:
        """Whether it lies in its HF tensor otherwise than as rows."""
        return self.slot is not None and not self.slot.as_rows

    @property
    def first_row(self) -> int:
        """Where it begins in its HF tensor, that of all experts as one matrix of all their rows; of what is not turned."""
        return 0 if self.slot is None else self.slot.expert * self.slot.shape[1] + self.slot.first

    @property
    def blocks(self) -> tuple[int, ...]:
        """Rows of each piece."""
        return self.pieces or self.shape[:1]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter of the whole model, by its global name: the row, for this layer and this expert.

    layer: the layer that it lives with: embeddings with the first, final norm and head with the last. expert: None where
    tensor parallel cuts it, not expert-tensor parallel. rounds: how often the rows of all sources, and of their pieces, take
    turns; 0 is once for each rank. is_padded: zeros fill up the rows to a multiple of the ranks.
    """

    megatron: str
    sources: tuple[Source, ...]
    cut: Cut
    rounds: int
    is_padded: bool
    layer: int
    expert: int | None = None
    is_buffer: bool = False


def rules(config: ModelConfig, spec: LayerSpec, *, has_head_copy: bool = False) -> Iterator[Rule]:
    """Every parameter and mapped buffer of the model, in the order in which a forward pass meets them.

    has_head_copy: the last pipeline stage holds a copy of tied embeddings (the first stage is another).
    """
    sizes, last = _sizes(config), config.num_layers - 1
    yield from _tower(config)
    yield _rule(EMBEDDING, sizes, spec, layer=0)
    for layer in range(config.num_layers):
        sizes = _sizes(config.of_layer(layer))
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
        yield _rule(TIED_HEAD, sizes, spec, layer=last)


def _tower(config: ModelConfig) -> Iterator[Rule]:
    """Of a vision tower that is a part of the model: every rank of the first stage has all of it."""
    for name, shape in config.vision.tower if config.vision is not None else ():
        yield Rule(TOWER + name, (Source(HF_TOWER + name, shape),), "whole", rounds=1, is_padded=False, layer=0)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model."""
    return {source.name: source.stored for rule in rules(config, "torch") for source in rule.sources}


def _rule(
    row: Row,
    sizes: dict[str, int],
    spec: LayerSpec,
    *,
    layer: int,
    prefixes: tuple[str, str] = ("", ""),
    expert: int | None = None,
) -> Rule:
    fused = spec == "transformer_engine"
    ours, theirs = prefixes
    number = "" if expert is None else str(expert)
    sources = tuple(_source(theirs + name.replace("{e}", number), names, sizes, expert) for name, names in row.hf)
    name = row.fused if fused and row.fused else row.megatron
    return Rule(
        megatron=ours + name.replace("{e}", number),
        sources=sources,
        cut=row.fused_cut if fused and row.fused_cut else row.cut,
        rounds={"groups": sizes["groups"], "key_heads": sizes.get("key_heads", 1), "halves": 0}.get(row.order, 1),
        is_padded=row.order == "padded",
        layer=layer,
        expert=expert,
        is_buffer=row.is_buffer,
    )


def _source(name: str, names: str, sizes: dict[str, int], expert: int | None) -> Source:
    rows, *columns = names.split()
    pieces = tuple(sizes[size] for size in rows.split("+"))
    shape = sum(pieces), *(sizes[size] for size in columns)
    name, _, places = name.partition("[")
    if places:
        assert expert is not None, name
        places = places.removesuffix("]")
        if "/" in places:
            part, parts = map(int, places.split("/"))
            stacked = (sizes["experts"], shape[0] * parts, *shape[1:])
            return Source(name, shape, slot=Slot(stacked, expert, part * shape[0], as_rows=True))
        first, step = map(int, places.split(":"))
        return Source(name, shape, slot=Slot((sizes["experts"], *shape[1:], shape[0] * step), expert, first, step))
    return Source(name, shape, pieces if len(pieces) > 1 else (), is_scalar=rows == "scalar")


def _features(config: ModelConfig, layer: int) -> frozenset[str]:
    """What a layer is made of, in the words of the table's `when`."""
    moe, mla = config.moe, config.mla
    shares = moe is not None and moe.shared_ffn_hidden_size > 0
    found = {
        "heads": mla is None and layer not in config.linear_layers,
        "delta": layer in config.linear_layers,
        "delta_in_two": config.family == "qwen3_next",
        "delta_in_four": config.family != "qwen3_next",
        "attention": layer not in config.linear_layers,
        "latent": mla is not None,
        "direct_queries": mla is not None and mla.q_rank is None,
        "latent_queries": mla is not None and mla.q_rank is not None,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm and not (config.whole_qk_norm or config.late_qk_norm),
        "late_qk_norm": config.qk_norm and config.late_qk_norm,
        "whole_qk_norm": config.qk_norm and config.whole_qk_norm,
        "pre_norms": config.pre_norms,
        "gemma_norms": config.post_norms and config.family != "glm4",
        "glm4_norms": config.post_norms and config.family == "glm4",
        "common_norms": (not config.post_norms or config.family == "glm4") and config.family != "apertus",
        "input_norm": config.family != "apertus",
        "apertus_norms": config.family == "apertus",
        "dense": layer not in config.moe_layers,
        "experts": layer in config.moe_layers,
        "normed_experts": moe is not None and moe.normed and layer in config.moe_layers,
        "score_bias": moe is not None and moe.score_bias,
        "flat_bias": config.family != "ernie4_5_moe",
        "ernie_bias": config.family == "ernie4_5_moe",
        "gate": config.family != HUNYUAN_MOE,
        "hunyuan_gate": config.family == HUNYUAN_MOE,
        "shared_experts": moe is not None and shares and not moe.shared_gate and config.family not in OTHER_SHARED,
        "shared_mlp": shares and config.family == HUNYUAN_MOE,
        "shared_expert": moe is not None and moe.shared_gate,
        "sinks": config.sinks,
        "output_bias": config.output_bias,
        "mixtral_names": config.family in MIXTRAL_NAMES,
        "granite_names": config.family == "granitemoe",
        "stacked_names": moe is not None and moe.biases,
        "common_names": config.family not in (*MIXTRAL_NAMES, "granitemoe", "gemma4")
        and not (moe is not None and moe.biases),
        "qkv_in_one": config.family == "phi3",
        "qkv_apart": config.family != "phi3" and not config.of_layer(layer).keys_as_values,
        "keys_as_values": config.of_layer(layer).keys_as_values,
        "layer_scale": config.layer_scale,
        "gate_in_one": config.family in ("glm4", "phi3"),
        "gate_apart": config.family not in ("glm4", "phi3") and config.halves == 2,
        "ungated": config.halves == 1,
    }
    return frozenset(name for name, holds in found.items() if holds)


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that the table names; `groups` is the number of key-value heads."""
    heads = config.num_heads
    sizes = {
        "one": 1,
        "scalar": 1,
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "query_heads": heads,
        "groups": config.num_kv_heads,
        "head": config.head_dim,
        "queries": heads * config.head_dim * (2 if config.output_gate else 1),  # each head's gate is behind its query
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
    if config.delta is not None:
        delta = config.delta
        sizes |= {
            "key_heads": delta.num_key_heads,
            "value_heads": delta.num_value_heads,
            "delta_keys": delta.num_key_heads * delta.key_dim,
            "delta_values": delta.num_value_heads * delta.value_dim,
            "delta_value": delta.value_dim,
            "delta_keys_to_gates": 2 * (delta.num_key_heads * delta.key_dim + delta.num_value_heads * delta.value_dim),
            "delta_numbers": 2 * delta.num_value_heads,
            "conv": delta.conv_width,
        }
    if config.moe is not None:
        moe = config.moe
        sizes |= {
            "experts": moe.num_experts,
            "expert_ffn": moe.ffn_hidden_size,
            "shared_ffn": moe.shared_ffn_hidden_size,
        }
    return sizes
