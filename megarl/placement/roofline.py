"""What a model asks of a device: the matrix products of a layer, the bytes of everything beside them, and their seconds.

A product takes as long as its operations or its bytes do, whichever is longer (Williams et al., Roofline, 2009): so one device
reaches a small share of its peak and another nearly all of it with the same kernels. Training and serving read the same
lists. Not for fixed times, collectives and schedules: see `compute` and `generation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import Delta, ModelConfig
from megarl.placement.activations import CHUNK
from megarl.placement.cluster import Cluster
from megarl.placement.sizes import linear_share

# Bytes of one logit's way through log-probs and entropy in each direction: read in the model's dtype, worked on in float32.
LOGIT_BYTES = 20
# Attention's backward pass beside its forward pass, in seconds: FlashAttention-3 on H100, causal, 2,048 to 8,192 tokens.
ATTENTION_BACKWARD = 3.5

Products = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Roof:
    """What products and memory reach: operations and bytes a second."""

    flops_s: float
    bytes_s: float

    def product_s(self, rows: Any, inner: Any, columns: Any, weight_bytes: float, bytes_each: float) -> Any:
        """Seconds of [rows, inner] by [inner, columns] weights. weight_bytes, bytes_each: of one weight, of one activation."""
        moved = inner * columns * weight_bytes + rows * (inner + columns) * bytes_each
        return np.maximum(2.0 * rows * inner * columns / self.flops_s, moved / self.bytes_s)

    def products_s(self, rows: Any, products: Products, weight_bytes: float, bytes_each: float) -> Any:
        """Seconds of several products with the same rows."""
        return sum(self.product_s(rows, inner, columns, weight_bytes, bytes_each) for inner, columns in products)


def training_roof(cluster: Cluster, dtype: str) -> Roof:
    """Of products in training."""
    rates, device = cluster.rates, cluster.device
    return Roof(device.product_flops(dtype) * rates.matmul, device.memory_bytes_s * rates.memory)


def serving_roof(cluster: Cluster, dtype: str) -> Roof:
    """Of products in a server."""
    rates, device = cluster.rates, cluster.device
    return Roof(device.product_flops(dtype) * rates.serving, device.memory_bytes_s * rates.memory)


def attention_products(config: ModelConfig, tp: Any) -> Products:
    """[inner, columns] of the products of one layer's attention on one rank; key-value heads are repeated where they are few."""
    hidden, heads, mla = config.hidden_size, config.num_heads / np.asarray(tp), config.mla
    if config.global_heads is not None:  # of a layer on average
        kinds = config.kinds_of_heads
        return [(inner, share * columns) for share, kind in kinds for inner, columns in attention_products(kind, tp)]
    if mla is None:
        kv = np.maximum(config.num_kv_heads / np.asarray(tp), 1)
        queries, keys = (2 if config.output_gate else 1) * heads, (1 if config.keys_as_values else 2) * kv
        full = [(hidden, (queries + keys) * config.head_dim), (heads * config.head_dim, hidden)]
        return full if config.delta is None else _mixed_products(config, config.delta, full, tp)
    wide = heads * (mla.nope_dim + mla.rope_dim)
    query = [(hidden, wide)] if mla.q_rank is None else [(hidden, mla.q_rank), (mla.q_rank, wide)]
    key_value = [(hidden, mla.kv_rank + mla.rope_dim), (mla.kv_rank, heads * (mla.nope_dim + mla.v_dim))]
    return [*query, *key_value, (heads * mla.v_dim, hidden)]


def _mixed_products(config: ModelConfig, delta: Delta, full: Products, tp: Any) -> Products:
    """Of a layer on average, where some have linear attention: each product with as many columns as its share of the layers."""
    hidden, share = config.hidden_size, linear_share(config)
    values = delta.num_value_heads * delta.value_dim / np.asarray(tp)
    averaged: Products = [(inner, (1 - share) * columns) for inner, columns in full]
    averaged += [(hidden, share * delta.num_key_heads * delta.columns / np.asarray(tp)), (values, share * hidden)]
    return averaged


def chunked_multiplications(delta: Delta) -> float:
    """Of one token in one layer's Gated DeltaNet, in chunks as training has them (models/delta_net.py); the convolution's too.

    Each key head: keys by keys, and by queries. Each value head: the triangular system, what queries read within the chunk; and
    the state, which forgets, is read and is written.
    """
    keys, values, near = delta.num_key_heads, delta.num_value_heads, CHUNK * delta.key_dim
    solved, inside = CHUNK * (delta.key_dim + delta.value_dim) / 2, CHUNK * delta.value_dim
    convolved = keys * delta.mixed * delta.conv_width
    return 2 * keys * near + values * (solved + inside + 3 * delta.key_dim * delta.value_dim) + convolved


def prefilled_multiplications(delta: Delta) -> float:
    """Of one token in one layer's Gated DeltaNet, where a server reads a prompt; the convolution's too.

    SGLang 0.5.21's kernels (kernels/ops/attention/fla/chunk.py) go by chunks of 64 too, every value head for itself: keys by
    keys, of 16 blocks the 10 that are not above the diagonal; what is written and what is forgotten, by the inverse (wy_fast.py);
    queries by keys, and these by values (chunk_o.py); and the state is read twice and written. The inversion is not counted.
    """
    near, inside = CHUNK * delta.key_dim, CHUNK * delta.value_dim
    convolved = delta.num_key_heads * delta.mixed * delta.conv_width
    each = (10 / 16 + 2) * near + 2 * inside + 3 * delta.key_dim * delta.value_dim
    return delta.num_value_heads * each + convolved


def mlp_products(hidden: int, width: float, tp: Any, halves: int = 2) -> Products:
    """[inner, columns] of an MLP's products on one rank. width: of one of its two gated halves; halves: 1 without a gate."""
    own = width / np.asarray(tp)
    return [(hidden, halves * own), (own, hidden)] if width else []


def attention_elements(config: ModelConfig, tp: Any) -> Any:
    """Elements a token that one layer's norms, residuals, rotary positions and splits read and write on one rank."""
    # Each norm and each residual reads and writes the hidden states (2 x 2 + 2 x 3), which sequence parallel cuts.
    heads = sum(
        share * (6 * kind.num_heads + 8 * kind.num_kv_heads) * kind.head_dim for share, kind in config.kinds_of_heads
    )
    return (10 * config.hidden_size + heads) / np.asarray(tp)


def expert_elements(hidden: int, width: int) -> int:
    """Elements that one token at one expert moves: permuted, sent, sorted and back again, and the activation between."""
    return 8 * hidden + 3 * width
