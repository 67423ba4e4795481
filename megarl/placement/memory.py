"""Bytes that one device holds for a role: weights, gradients, optimizer state, activations, logits; a server's cache.

Mixed precision after Megatron's distributed optimizer (ZeRO stage 1, arXiv 1910.02054): weights in the run's dtype,
gradients summed in float32, and float32 master weights with two moments split over the data-parallel ranks. Activations
after Korthikanti et al. (arXiv 2205.05198), counted for gated MLPs, grouped-query attention and a fused attention core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.placement.space import Layouts, Servers

GRADIENT_BYTES = 4
# Master weights where the weights themselves are not float32, and Adam's two moments.
MASTER_BYTES, MOMENT_BYTES = 4, 8
# Logits as they come, their float32 copy, and the gradient.
LOGIT_COPIES_BYTES = 4
# What a role that is offloaded leaves on the device: caches, small buffers.
OFFLOADED_SHARE = 0.02


@dataclass(frozen=True)
class RoleBytes:
    """[N] bytes on the fullest device of one role."""

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any
    logits: Any

    @property
    def state(self) -> Any:
        """What stays from one micro-batch to the next."""
        return self.weights + self.gradients + self.optimizer

    @property
    def working(self) -> Any:
        """What a micro-batch takes on top."""
        return self.activations + self.logits

    @property
    def moved(self) -> Any:
        """What goes to the host and comes back when the role is offloaded: gradients are made anew."""
        return self.weights + self.optimizer


def role_bytes(
    config: ModelConfig, choice: Layouts, bytes_each: int, *, trained: bool, head: bool, sharded: bool = True
) -> RoleBytes:
    """Bytes of a Megatron role under every choice.

    head: whether it has an output matrix. sharded: whether data-parallel ranks share out the optimizer's state.
    """
    dense, routed = model_sizes(config, head=head).on_stage(choice.pp)
    dense, routed = dense / choice.tp, routed / choice.ep
    tokens = choice.micro_tokens / choice.cp
    layers = np.ceil(config.num_layers / choice.pp)
    layer = layer_activations(config, choice, bytes_each)
    border = config.hidden_size * bytes_each / choice.tp
    zero = np.zeros(len(choice))
    vocabulary = config.vocab_size / choice.tp if head else zero
    if not trained:
        working = tokens * (2 * layer + 2 * border)
        logits = tokens * vocabulary * (bytes_each + LOGIT_COPIES_BYTES)
        return RoleBytes((dense + routed) * bytes_each, zero, zero, working, logits)
    # The first stage holds the activations of as many micro-batches as there are stages.
    alive = layers * choice.pp
    kept = np.select(
        [choice.recompute == 0, choice.recompute == 1],
        [alive * layer, alive * (layer - config.num_heads * config.head_dim * bytes_each / choice.tp)],
        alive * border + layer,
    )
    master = MASTER_BYTES * (bytes_each < MASTER_BYTES) + MOMENT_BYTES
    return RoleBytes(
        weights=(dense + routed) * bytes_each,
        gradients=(dense + routed) * GRADIENT_BYTES,
        optimizer=master * (dense / (choice.dp * choice.cp) + routed / choice.edp if sharded else dense + routed),
        activations=tokens * (kept + 2 * border),
        logits=tokens * vocabulary * (bytes_each + 2 * LOGIT_COPIES_BYTES),
    )


def layer_activations(config: ModelConfig, choice: Layouts, bytes_each: int) -> Any:
    """Bytes of one token in one layer that backward needs, on one rank; sequence parallel cuts all of them."""
    hidden, heads = config.hidden_size, config.num_heads
    attention = 2 * heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim
    # Inputs of both norms, of the projections and of the MLP.
    elements: float = 4 * hidden + attention
    dense = 3.0 * config.ffn_hidden_size
    moe = config.moe
    if moe is not None:
        share = len(config.moe_layers) / config.num_layers
        experts = moe.top_k * (2 * hidden + 3 * moe.ffn_hidden_size) + 3 * moe.shared_ffn_hidden_size + moe.num_experts
        dense = share * experts + (1 - share) * dense
    return (elements + dense) * bytes_each / choice.tp


@dataclass(frozen=True)
class ServerBytes:
    """[N] bytes on one device of a server. cache_tokens: tokens that the whole server's KV cache holds."""

    weights: Any
    cache: Any
    other: float
    cache_tokens: Any

    @property
    def total(self) -> Any:
        """All that it holds while awake."""
        return self.weights + self.cache + self.other


def server_bytes(
    config: ModelConfig, choice: Servers, cluster: Cluster, bytes_each: int, whole: float | None = None
) -> ServerBytes:
    """Bytes of a server under every choice: what its share of the device leaves beside the weights is KV cache.

    bytes_each: of one element of the cache. whole: of all weights; default: as many bytes for each of them.
    """
    weights = (model_sizes(config).total * bytes_each if whole is None else whole) / choice.tp
    share = choice.share * cluster.device.memory_bytes
    cache = np.maximum(share - weights - cluster.rates.server_bytes, 0.0)
    return ServerBytes(
        weights, cache, cluster.rates.server_bytes, np.floor(cache / kv_bytes(config, choice.tp, bytes_each))
    )
