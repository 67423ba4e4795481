"""Seconds of a step's rollout under every number and size of servers: prefill, and decode step by step.

A decode step reads the weights once and every running sequence's keys and values, or multiplies for longer than that (a
roofline: Pope et al., arXiv 2211.05102), and reads and writes its states of linear attention; to this come two all-reduces a
layer where servers are cut, what the layers' kernels cost at any size, and the host's work on every running request. While
more samples wait than a server's cache holds it runs full; then the batch thins out along the tail of the length
distribution, and the step ends with the longest response of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.placement.cluster import Cluster
from megarl.placement.links import all_reduce_s, server_reduce_s
from megarl.placement.memory import ServerBytes
from megarl.placement.roofline import attention_products, mlp_products, prefilled_multiplications, serving_roof
from megarl.placement.sizes import kv_bytes, kv_span
from megarl.placement.space import Servers
from megarl.placement.states import state_bytes
from megarl.placement.workload import ROLLOUT, Workload

# Tokens of one chunk of prefill: the default of SGLang's --chunked-prefill-size on most devices.
PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class RolloutSeconds:
    """[N] seconds of one step's rollout. full: while samples wait. tail: from then on, to the last response.

    flow: seconds that a step's tokens take where samples of other steps fill the tail (asynchronous rollout).
    longest: seconds of the longest response of a step among them: it is waited for where it may get no older.
    running: sequences that one server decodes at once, at most; flowing: the same with those of other steps among them.
    """

    prefill: Any
    full: Any
    tail: Any
    requests: float
    flow: Any
    longest: Any
    running: Any
    flowing: Any

    @property
    def total(self) -> Any:
        """All of a synchronous step."""
        return self.prefill + self.full + self.tail + self.requests


def rollout_seconds(
    config: ModelConfig, choice: Servers, held: ServerBytes, workload: Workload, cluster: Cluster
) -> RolloutSeconds:
    """Seconds of generating a step's samples. Choices whose cache does not hold one whole sample take infinitely long."""
    lengths = workload.responses
    knots, alive = lengths.knots, lengths.running
    width = np.diff(knots)
    middle = (knots[1:] + knots[:-1]) / 2
    mean = float(width @ alive)
    # Where samples follow one another, a running response is met at an age of E[L^2] / 2 E[L], and so is what is left.
    tail_mass = np.append(np.cumsum((width * alive)[::-1])[::-1], 0.0)
    left = (tail_mass[1:] + tail_mass[:-1]) / 2 / mean
    residual = float(width @ left)
    context = workload.prompt_tokens + residual
    each = workload.samples / choice.count
    room = np.floor(held.cache_tokens / np.maximum(context, 1))
    room = np.minimum(room, np.minimum(workload.max_running, held.most_running))
    if workload.in_flight is not None:
        room = np.minimum(room, np.maximum(workload.in_flight / choice.count, 1))
    cap = np.minimum(room, np.maximum(each, 1))
    waits = each > cap
    step = _Step(config, choice, workload, cluster)
    full_steps = np.where(waits, np.maximum(each * mean - cap * residual, 0) / np.maximum(cap, 1), 0.0)
    full = full_steps * step.seconds(np.maximum(cap, 1), context)
    start = np.minimum(each, cap)[:, None]
    share = np.where(waits[:, None], left[None, :], alive[None, :])
    # While any server still runs, the step is not over.
    any_alive = -np.expm1(np.maximum(start * choice.count[:, None], 1) * np.log1p(-np.minimum(share, 1 - 1e-12)))
    age = np.where(waits[:, None], residual + middle / 2, middle[None, :])
    tail = np.sum(
        width * any_alive * step.seconds(np.maximum(start * share, 1.0), workload.prompt_tokens + age), axis=1
    )
    prefill = prefill_seconds(config, choice.used, choice.tp, workload, cluster)
    # Samples of as many steps as they may be old are in flight beside this one's.
    most = np.maximum(np.minimum(room, each * (1 + workload.staleness)), 1)
    flow = prefill + each * mean / most * step.seconds(most, context)
    # While the longest is waited for, others end: on average those run whose tokens are made in that time.
    tokens = float(width @ -np.expm1(workload.samples * np.log1p(-np.minimum(alive, 1 - 1e-12))))
    met = np.clip(each * mean * (1 + workload.staleness) / tokens, 1, most)
    longest = tokens * step.seconds(met, context)
    holds = (held.cache_tokens >= workload.longest_sample) & (held.most_running >= 1)
    never = np.where(holds, 0.0, np.inf)
    requests = workload.samples * cluster.rates.request_s
    flow = np.maximum(flow + requests, longest / (1 + workload.staleness))
    return RolloutSeconds(prefill + never, full, tail, requests, flow + never, longest, cap, most)


def step_model(workload: Workload, cluster: Cluster, tp: int, servers: int) -> Callable[[Any, float], Any]:
    """Seconds of one decode step on each of so many servers, by [Q] sequences in its batch and their context, tokens."""
    used = np.array([servers * tp], np.int64)
    choice = Servers(used, np.array([tp], np.int64), np.ones(1), used)
    step = _Step(workload.models[ROLLOUT], choice, workload, cluster)
    return lambda batch, context: step.seconds(batch[None, :], context)[0]


class _Step:
    """Seconds of one decode step, by sequences in the batch and tokens of context."""

    def __init__(self, config: ModelConfig, choice: Servers, workload: Workload, cluster: Cluster) -> None:
        self._config, self._choice, self._cluster = config, choice, cluster
        self._bytes, self._weight_bytes = workload.bytes_each, workload.served_bytes_each
        self._roof = serving_roof(cluster, workload.served_dtype)
        self._wide_roof = serving_roof(cluster, workload.dtype)
        self._kv = kv_bytes(config, choice.tp, self._bytes)
        # Read and written: three products of each element with another are hidden behind that on any device.
        self._states_s = 2 * state_bytes(config, choice.tp, workload.states.element_bytes) / self._roof.bytes_s
        # Servers of one node may share its cores.
        here = np.minimum(choice.used, cluster.devices_per_node)
        self._crowd = np.maximum(here / cluster.rates.servers_at_once, 1.0)

    def seconds(self, batch: Any, context: Any) -> Any:
        """batch: [N] or [N, Q]; context: alike, or one number."""
        wide = (...,) + (None,) * (np.ndim(batch) - 1)
        tp, config, rates = self._choice.tp[wide], self._config, self._cluster.rates
        moe = len(config.moe_layers)
        layers = self._attention(batch, tp) * config.num_layers
        if moe < config.num_layers:
            products = mlp_products(config.hidden_size, config.ffn_hidden_size, tp, config.halves)
            layers = layers + (config.num_layers - moe) * self._products(batch, products)
        if moe:
            layers = layers + moe * self._experts(batch, tp)
        head = self._wide_roof.product_s(batch, config.hidden_size, config.vocab_size / tp, self._bytes, self._bytes)
        message = batch * config.hidden_size * self._bytes
        tensor = 2 * config.num_layers * server_reduce_s(self._cluster, message, tp)
        launch = (config.num_layers - moe) * rates.decode_layer_s + moe * rates.decode_expert_layer_s + rates.decode_s
        host = batch * (config.num_layers * rates.decode_sequence_s + rates.decode_request_s)
        held = self._cache(batch, context, wide) + batch * self._states_s[wide]
        return (layers + head + held + tensor + launch + host) * self._crowd[wide]

    def _products(self, rows: Any, products: Any) -> Any:
        return self._roof.products_s(rows, products, self._weight_bytes, self._bytes)

    def _attention(self, batch: Any, tp: Any) -> Any:
        """The products of one layer's attention."""
        return self._products(batch, attention_products(self._config, tp))

    def _experts(self, batch: Any, tp: Any) -> Any:
        """One layer's router and shared experts, and those experts that some token chose."""
        config, moe = self._config, self._config.moe
        assert moe is not None
        met = moe.num_experts * -np.expm1(batch * np.log1p(-min(moe.top_k / moe.num_experts, 1 - 1e-12)))
        routed = self._products(batch * moe.top_k / met, mlp_products(config.hidden_size, moe.ffn_hidden_size, tp))
        shared = self._products(batch, mlp_products(config.hidden_size, moe.shared_ffn_hidden_size, tp))
        router = self._wide_roof.product_s(batch, config.hidden_size, moe.num_experts, self._bytes, self._bytes)
        return met * routed + shared + router

    def _cache(self, batch: Any, context: Any, wide: Any) -> Any:
        """The core of all layers' attention: keys and values are read, and each multiplies a whole tile of queries."""
        config, device = self._config, self._cluster.device
        tokens = batch * kv_span(config, context)
        kv = self._kv[wide]
        # Queries that share a key-value head share a tile (FlashAttention-3, arXiv 2407.08608, packs them).
        heads = config.num_heads / self._choice.tp[wide]
        shared = heads if config.mla is not None else np.minimum(heads, config.num_heads / config.num_kv_heads)
        rows = np.ceil(shared / device.tile_rows) * device.tile_rows
        # Two operations for each element of keys and of values and each row; of latent attention one vector is both, but for
        # the part with rotary positions, which keys alone have.
        flops = kv / self._bytes * 2 * rows
        if config.mla is not None:
            flops = flops * (2 * config.mla.kv_rank + config.mla.rope_dim) / (config.mla.kv_rank + config.mla.rope_dim)
        reached = device.product_flops("bfloat16" if self._bytes == 2 else "float32") * self._cluster.rates.attention
        return tokens * np.maximum(kv / self._roof.bytes_s, flops / reached)


def prefill_seconds(config: ModelConfig, devices: Any, tp: Any, workload: Workload, cluster: Cluster) -> Any:
    """Seconds of reading a step's prompts on so many devices: once for all samples of a group, servers share prefixes.

    tp: devices of one server.
    """
    served = serving_roof(cluster, workload.served_dtype).flops_s
    compute = workload.prompts * prompt_flops(config, max(1, round(workload.prompt_tokens))) / (devices * served)
    # Each server reads its prompts in chunks of so many tokens.
    tokens = workload.prompts * workload.prompt_tokens / (devices / np.asarray(tp))
    message = PREFILL_TOKENS * config.hidden_size * workload.bytes_each
    reduces = 2 * config.num_layers * tokens / PREFILL_TOKENS * all_reduce_s(cluster, message, tp, 1)
    return compute + np.where(np.asarray(tp) > 1, reduces, 0.0)


def prompt_flops(config: ModelConfig, tokens: int) -> float:
    """What a server multiplies of one prompt: no logits, and linear attention in chunks, not token by token."""
    flops = forward_flops(config, [tokens])
    if config.delta is None:
        return flops.total - flops.logits
    full = forward_flops(replace(config, delta=None), [tokens]).attention
    chunked = 2 * tokens * len(config.linear_layers) * prefilled_multiplications(config.delta)
    return flops.linear - flops.logits + full + chunked
