"""Floating-point operations of a model's matrix multiplications: what MFU is made of. Pure arithmetic, without torch.

docs/flops.md states the formula. A multiplication of [m, k] and [k, n] is 2 m k n. Norms, activations, softmax, rotary
positions and the embedding's lookup are not counted: they are no matrix multiplications, and of another order.

This is what the mathematics asks for, not what some kernel does: each query is counted against the keys that it may see,
which under a causal mask is half the square, whether or not the kernel computes the other half and throws it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.core.types import IntArray
from megarl.models.config import ModelConfig

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ForwardFlops:
    """One forward pass, by where the operations are; over all layers and all tokens.

    projections: attention's linear layers. attention: queries against keys, and probabilities against values; of Gated DeltaNet
    the convolution, and the state by keys, values and queries, token by token.
    mlp: dense MLPs, routers, routed and shared experts with their gates. logits: the output layer.
    """

    projections: float
    attention: float
    mlp: float
    logits: float

    @property
    def linear(self) -> float:
        """What multiplies activations with weights."""
        return self.projections + self.mlp + self.logits

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.attention


def forward_flops(config: ModelConfig, lengths: Sequence[int] | IntArray) -> ForwardFlops:
    """FLOPs of one forward pass over sequences of these lengths (tokens), packed or not; padding is not counted."""
    tokens = float(np.sum(np.asarray(lengths, np.int64)))
    num_local, num_linear = len(config.local_layers), len(config.linear_layers)
    num_attention, kinds = config.num_layers - num_linear, config.kinds_of_heads
    weights = sum(share * _attention_weights(kind) for share, kind in kinds)
    # Those with a window come first.
    pairs = (num_attention - num_local) * _visible_pairs(lengths, None) * _pair_multiplications(kinds[-1][1])
    pairs += num_local * _visible_pairs(lengths, config.window) * _pair_multiplications(kinds[0][1])
    return ForwardFlops(
        projections=2 * tokens * (num_attention * weights + num_linear * _delta_weights(config)),
        attention=2 * (pairs + tokens * num_linear * _delta_multiplications(config)),
        mlp=2 * tokens * _mlp_weights(config),
        logits=2 * tokens * config.hidden_size * config.vocab_size,
    )


def train_flops(
    config: ModelConfig, lengths: Sequence[int] | IntArray, *, weight_gradients: bool = True, scores: bool = False
) -> float:
    """Model FLOPs of forward and backward: three times the forward pass.

    The backward pass multiplies twice for each multiplication of the forward pass: once for the gradient of either
    factor. weight_gradients: False where the weights are frozen (LoRA), so that only the activations' is left; the
    adapters' own operations are not counted. scores: True where the output layer gives one number, not a vocabulary's.
    """
    forward = forward_flops(config, lengths)
    linear = forward.linear - (forward.logits * (1 - 1 / config.vocab_size) if scores else 0.0)
    return 3 * forward.attention + (3 if weight_gradients else 2) * linear


def recompute_flops(config: ModelConfig, lengths: Sequence[int] | IntArray, recompute: Recompute) -> float:
    """FLOPs that activation recompute adds to `train_flops`: hardware does them, the model does not need them.

    selective: attention's core again. full: every layer again, but not the output layer.
    """
    forward = forward_flops(config, lengths)
    again = {"none": 0.0, "selective": forward.attention, "full": forward.total - forward.logits}
    return again[recompute]


def mfu(flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): `flops` over what the devices could have done.

    flops: `train_flops`, without recompute. peak_flops: of one device, a second, in the dtype that was trained in.
    """
    return flops / (seconds * num_devices * peak_flops)


def _visible_pairs(lengths: Sequence[int] | IntArray, window: int | None) -> float:
    """Pairs of a query and a key that it may see: keys up to the query, of which a window leaves the last ones."""
    length = np.asarray(lengths, np.float64)
    span = length if window is None else np.minimum(length, window)
    # The first `span` queries see 1, 2, .. span keys; the others see `span` each.
    return float(np.sum(span * (span + 1) / 2 + (length - span) * span))


def _pair_multiplications(config: ModelConfig) -> float:
    """Multiplications of one query with one key and with its value, over all heads of one layer."""
    if config.mla is not None:
        return config.num_heads * (config.mla.nope_dim + config.mla.rope_dim + config.mla.v_dim)
    return config.num_heads * 2 * config.head_dim


def _attention_weights(config: ModelConfig) -> float:
    """Weights of one layer's attention that multiply each token."""
    hidden, heads, mla = config.hidden_size, config.num_heads, config.mla
    if mla is None:
        of_keys = (1 if config.keys_as_values else 2) * config.num_kv_heads
        return hidden * config.head_dim * ((3 if config.output_gate else 2) * heads + of_keys)
    query_dim = heads * (mla.nope_dim + mla.rope_dim)
    query = hidden * query_dim if mla.q_rank is None else mla.q_rank * (hidden + query_dim)
    key_value = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
    return query + key_value + heads * mla.v_dim * hidden


def _delta_weights(config: ModelConfig) -> float:
    """Weights of one layer's linears around Gated DeltaNet."""
    delta = config.delta
    if delta is None:
        return 0.0
    return config.hidden_size * (delta.num_key_heads * delta.columns + delta.num_value_heads * delta.value_dim)


def _delta_multiplications(config: ModelConfig) -> float:
    """Multiplications of one token in one layer's Gated DeltaNet: the key reads its state, it is written, the query reads."""
    delta = config.delta
    if delta is None:
        return 0.0
    convolved = delta.num_key_heads * delta.mixed * delta.conv_width
    return 3 * delta.num_value_heads * delta.key_dim * delta.value_dim + convolved


def _mlp_weights(config: ModelConfig) -> float:
    """Weights of all layers' MLPs that multiply each token: three matrices each, two without a gate; chosen experts alone."""
    hidden, moe = config.hidden_size, config.moe
    num_moe = len(config.moe_layers)
    dense = (config.num_layers - num_moe) * (config.halves + 1) * hidden * config.ffn_hidden_size
    if moe is None:
        return dense
    experts = 3 * hidden * (moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size)
    return dense + num_moe * (hidden * (moe.num_experts + moe.shared_gate) + experts)
