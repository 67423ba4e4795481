"""The one mapping between HF's names and Megatron's, as data: used to load, save, convert, check and sync. Without torch.

A rule says which Megatron parameter is made of which HF tensors and how it is cut over tensor parallel. What is done with
the tensors is in mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.models.config import ModelConfig

# How a full Megatron tensor is cut over tensor parallel: not at all, by rows (dim 0), by columns (dim 1), or the two
# gated halves each by rows.
Cut = Literal["whole", "rows", "columns", "gated"]
Form = Literal["copy", "qkv", "gated", "vocab"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter. `{i}` in names stands for the layer."""

    megatron: str
    hf: tuple[str, ...]
    cut: Cut
    form: Form = "copy"

    def at(self, layer: int) -> Rule:
        """The rule of one layer."""
        return Rule(self.megatron.format(i=layer), tuple(name.format(i=layer) for name in self.hf), self.cut, self.form)


@dataclass(frozen=True)
class NameTable:
    """Where a layer spec keeps the norms before attention and MLP: Transformer Engine fuses them into the linears."""

    attention_norm: str
    mlp_norm: str


LOCAL_NAMES = NameTable("input_layernorm.weight", "pre_mlp_layernorm.weight")
TRANSFORMER_ENGINE_NAMES = NameTable("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")


def rules(config: ModelConfig, names: NameTable) -> Iterator[Rule]:
    """Every parameter of the model, in the order in which a forward pass meets them."""
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows", "vocab")
    layer = list(_layer_rules(config, names))
    for index in range(config.num_layers):
        yield from (rule.at(index) for rule in layer)
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
    if not config.tied_embeddings:
        yield Rule("output_layer.weight", ("lm_head.weight",), "rows", "vocab")


def _layer_rules(config: ModelConfig, names: NameTable) -> Iterator[Rule]:
    ours, theirs = "decoder.layers.{i}.", "model.layers.{i}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
    yield Rule(ours + names.attention_norm, (theirs + "input_layernorm.weight",), "whole")
    yield Rule(ours + "self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), "rows", "qkv")
    if config.qkv_bias:
        yield Rule(ours + "self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in qkv), "rows", "qkv")
    if config.qk_norm:
        yield Rule(ours + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",), "whole")
        yield Rule(ours + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",), "whole")
    yield Rule(ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), "columns")
    yield Rule(ours + names.mlp_norm, (theirs + "post_attention_layernorm.weight",), "whole")
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    yield Rule(ours + "mlp.linear_fc1.weight", gate_up, "gated", "gated")
    yield Rule(ours + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), "columns")


def hf_shapes(config: ModelConfig, rule: Rule) -> list[tuple[int, ...]]:
    """Shapes of a rule's HF tensors."""
    hidden, ffn, heads = config.hidden_size, config.ffn_hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    if rule.form == "qkv":
        return [
            (rows,) if name.endswith("bias") else (rows, hidden)
            for rows, name in zip((heads, kv, kv), rule.hf, strict=True)
        ]
    if rule.form == "gated":
        return [(ffn, hidden)] * 2
    if rule.form == "vocab":
        return [(config.vocab_size, hidden)]
    if rule.megatron.endswith("linear_proj.weight"):
        return [(hidden, heads)]
    if rule.megatron.endswith("linear_fc2.weight"):
        return [(hidden, ffn)]
    return [(config.head_dim,) if rule.megatron.endswith(("q_layernorm.weight", "k_layernorm.weight")) else (hidden,)]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model."""
    return {
        name: shape
        for rule in rules(config, LOCAL_NAMES)
        for name, shape in zip(rule.hf, hf_shapes(config, rule), strict=True)
    }


def slices(rule: Rule, config: ModelConfig, rank: int, tp: int) -> list[tuple[slice, ...]]:
    """Which part of each HF tensor a rank reads: merging these gives exactly its part.

    Key-value heads are a multiple of tp, so whole groups go to each rank.
    """
    found: list[tuple[slice, ...]] = []
    for shape in hf_shapes(config, rule):
        if rule.cut == "whole":
            found.append((slice(None),))
        elif rule.cut == "columns":
            width = shape[1] // tp
            found.append((slice(None), slice(rank * width, (rank + 1) * width)))
        else:
            rows = (config.padded_vocab_size(tp) if rule.form == "vocab" else shape[0]) // tp
            found.append((slice(min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])),))
    return found
