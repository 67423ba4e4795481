"""Numbers of parameters, whole and on one device, from a model's configuration. Norms and biases are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.recipe.roles import Lora


@dataclass(frozen=True)
class Sizes:
    """Parameters of one model, by what cuts them.

    attention: of one layer, on average over the kinds of attention. dense_mlp: of one layer without experts. routed: of all
    experts of one layer. shared: of one layer's shared experts, router and gate. embedding: of one vocabulary matrix. head:
    whether a matrix of that size stands at the end (a critic has a single row there).
    """

    layers: int
    moe_layers: int
    attention: float
    dense_mlp: float
    routed: float
    shared: float
    embedding: float
    tied: bool
    head: bool

    @property
    def total(self) -> float:
        """All parameters."""
        dense = self.layers * self.attention + (self.layers - self.moe_layers) * self.dense_mlp
        ends = self.embedding * (2 if self.head and not self.tied else 1)
        return dense + self.moe_layers * (self.routed + self.shared) + ends


def model_sizes(config: ModelConfig, *, head: bool = True) -> Sizes:
    """Sizes of a model; head: False for a critic or a reward model."""
    hidden, moe = config.hidden_size, config.moe
    # One token's multiplications are twice the weights that it meets.
    projections = forward_flops(config, [1]).projections / 2 / config.num_layers
    if config.delta is not None:
        convolved = config.delta.num_key_heads * config.delta.mixed * config.delta.conv_width
        projections += linear_share(config) * convolved
    return Sizes(
        layers=config.num_layers,
        moe_layers=len(config.moe_layers),
        attention=projections,
        dense_mlp=(config.halves + 1.0) * hidden * config.ffn_hidden_size,
        routed=0.0 if moe is None else 3.0 * hidden * moe.ffn_hidden_size * moe.num_experts,
        shared=0.0 if moe is None else hidden * (3.0 * moe.shared_ffn_hidden_size + moe.num_experts + moe.shared_gate),
        embedding=float(hidden * config.vocab_size),
        tied=config.tied_embeddings,
        head=head,
    )


def linear_share(config: ModelConfig) -> float:
    """The share of layers whose attention is linear."""
    return len(config.linear_layers) / config.num_layers


def whole_parameters(config: ModelConfig, layers: Any, moe_layers: Any, *, fused: bool) -> Any:
    """[N] parameters of so many layers that tensor parallel does not cut: routers and gates; under Transformer Engine (fused)
    also the linears that compress into latents."""
    hidden, moe, mla = config.hidden_size, config.moe, config.mla
    routers = 0 if moe is None else moe_layers * hidden * (moe.num_experts + moe.shared_gate)
    latents = 0 if mla is None or not fused else layers * hidden * ((mla.q_rank or 0) + mla.kv_rank + mla.rope_dim)
    return routers + latents


def routed_adapter_sizes(config: ModelConfig, lora: Lora, ep: Any, etp: Any, moe_layers: Any) -> Any:
    """[N] parameters of LoRA's adapters of routed experts on one rank of so many layers that have some (models/lora.py)."""
    if config.moe is None:
        return 0.0 * moe_layers
    hidden, width = config.hidden_size, config.moe.ffn_hidden_size
    each = ("experts.linear_fc1" in lora.targets) * (hidden + 2 * width / etp)
    each = each + ("experts.linear_fc2" in lora.targets) * (width / etp + hidden)
    return moe_layers * config.moe.num_experts / ep * lora.rank * each


def adapter_sizes(config: ModelConfig, lora: Lora, tp: Any, layers: Any, moe_layers: Any) -> Any:
    """[N] parameters of LoRA's other adapters on one rank of so many layers, those with experts among them.

    A linear cut by rows cuts B [out, rank], one cut by columns A [rank, in]; the other factor is whole on every rank.
    """
    if config.global_heads is not None:
        return sum(share * adapter_sizes(kind, lora, tp, layers, moe_layers) for share, kind in config.kinds_of_heads)

    def factors(linear: str, width_in: float, width_out: float, *, rows: bool = True) -> Any:
        if linear not in lora.targets:
            return 0.0
        return lora.rank * (width_in + width_out / tp if rows else width_in / tp + width_out)

    def mlp(width: float) -> Any:
        return factors("linear_fc1", hidden, config.halves * width) + factors("linear_fc2", width, hidden, rows=False)

    hidden, heads, mla, moe = config.hidden_size, config.num_heads, config.mla, config.moe
    if mla is None:
        keys = (1 if config.keys_as_values else 2) * config.num_kv_heads
        mixed = ((2 if config.output_gate else 1) * heads + keys) * config.head_dim
        attention = factors("linear_qkv", hidden, mixed)
        values = heads * config.head_dim
    else:
        query, values = heads * (mla.nope_dim + mla.rope_dim), heads * mla.v_dim
        attention = factors("linear_kv_down_proj", hidden, mla.kv_rank + mla.rope_dim)
        attention = attention + factors("linear_kv_up_proj", mla.kv_rank, heads * (mla.nope_dim + mla.v_dim))
        if mla.q_rank is None:
            attention = attention + factors("linear_q_proj", hidden, query)
        else:
            attention = attention + factors("linear_q_down_proj", hidden, mla.q_rank)
            attention = attention + factors("linear_q_up_proj", mla.q_rank, query)
    attention = attention + factors("linear_proj", values, hidden, rows=False)
    if (delta := config.delta) is not None:
        linear = factors("linear_in", hidden, delta.num_key_heads * delta.columns)
        linear = linear + factors("linear_proj", delta.num_value_heads * delta.value_dim, hidden, rows=False)
        attention = attention + linear_share(config) * (linear - attention)
    shared = mlp(moe.shared_ffn_hidden_size) if moe is not None and moe.shared_ffn_hidden_size else 0.0
    return layers * attention + (layers - moe_layers) * mlp(config.ffn_hidden_size) + moe_layers * shared


def kv_bytes(config: ModelConfig, tp: Any, bytes_each: int) -> Any:
    """Bytes of one token's keys and values on one rank of a server: heads are cut, and repeated where they are fewer.

    Latent attention keeps one compressed vector, which every rank holds whole (arXiv 2405.04434); linear attention keeps none of
    a token.
    """
    if config.mla is not None:
        return np.full(np.shape(tp), float(config.num_layers * (config.mla.kv_rank + config.mla.rope_dim) * bytes_each))
    layers = config.num_layers - len(config.linear_layers)
    wide = sum(
        share * np.maximum(kind.num_kv_heads / np.asarray(tp), 1) * kind.head_dim
        for share, kind in config.kinds_of_heads
    )
    return 2.0 * layers * wide * bytes_each


def kv_span(config: ModelConfig, context: Any) -> Any:
    """Tokens of context whose keys and values one step reads, on average over the layers: windows read fewer."""
    if config.window is None:
        return context
    local = len(config.local_layers) / config.num_layers
    return (1 - local) * context + local * np.minimum(context, config.window)
