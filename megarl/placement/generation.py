"""Seconds of a step's rollout under every number and size of servers: prefill, and decode step by step.

A decode step reads the weights once and every running sequence's keys and values (a roofline: Pope et al., arXiv
2211.05102). While more samples wait than a server's cache holds it runs full; then the batch thins out along the tail of
the length distribution, and the step ends with the longest response of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.placement.cluster import Cluster
from megarl.placement.links import all_reduce_s
from megarl.placement.memory import ServerBytes
from megarl.placement.sizes import kv_bytes, kv_span, model_sizes
from megarl.placement.space import Servers
from megarl.placement.workload import ROLLOUT, Workload


@dataclass(frozen=True)
class RolloutSeconds:
    """[N] seconds of one step's rollout. full: while samples wait. tail: from then on, to the last response.

    flow: seconds that a step's tokens take where samples of other steps fill the tail (asynchronous rollout).
    running: sequences that one server decodes at once, at most.
    """

    prefill: Any
    full: Any
    tail: Any
    requests: float
    flow: Any
    running: Any

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
    cap = np.minimum(np.minimum(room, workload.max_running), np.maximum(each, 1))
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
    prefill = prefill_seconds(config, choice.used, workload, cluster)
    # Samples of as many steps as they may be old are in flight beside this one's.
    most = np.maximum(np.minimum(np.minimum(room, workload.max_running), each * (1 + workload.staleness)), 1)
    flow = prefill + each * mean / most * step.seconds(most, context)
    holds = held.cache_tokens >= workload.longest_sample
    never = np.where(holds, 0.0, np.inf)
    requests = workload.samples * cluster.rates.request_s
    return RolloutSeconds(prefill + never, full, tail, requests, flow + requests + never, cap)


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
        self._bytes = workload.bytes_each
        self._peak = cluster.device.peak_flops(workload.dtype) * cluster.rates.prefill
        self._memory = cluster.device.memory_bytes_s * cluster.rates.memory
        self._sizes = model_sizes(config)
        self._kv = kv_bytes(config, choice.tp, self._bytes)
        self._flops = forward_flops(config, [1]).linear
        # Servers of one node may share its cores.
        here = np.minimum(choice.used, cluster.devices_per_node)
        self._crowd = np.maximum(here / cluster.rates.servers_at_once, 1.0)

    def seconds(self, batch: Any, context: Any) -> Any:
        """batch: [N] or [N, Q]; context: alike, or one number."""
        wide = (...,) + (None,) * (np.ndim(batch) - 1)
        tp, kv = self._choice.tp[wide], self._kv[wide]
        rates, config = self._cluster.rates, self._config
        weights = self._weights_read(batch) * self._bytes / tp / self._memory
        compute = batch * self._flops / tp / self._peak
        cache = batch * kv * kv_span(config, context) / self._memory
        message = batch * config.hidden_size * self._bytes
        tensor = 2 * config.num_layers * all_reduce_s(self._cluster, message, tp, 1)
        moe = len(config.moe_layers)
        launch = (config.num_layers - moe) * rates.decode_layer_s + moe * rates.decode_expert_layer_s + rates.decode_s
        launch = launch + config.num_layers * batch * rates.decode_sequence_s
        return (np.maximum(weights, compute) + cache + tensor + launch) * self._crowd[wide]

    def _weights_read(self, batch: Any) -> Any:
        """Parameters that a step of this batch meets: of the experts those that some token chose."""
        sizes, moe = self._sizes, self._config.moe
        embedding = 0.0 if sizes.tied else sizes.embedding
        if moe is None:
            return sizes.total - embedding
        met = 1 - (1 - moe.top_k / moe.num_experts) ** batch
        return sizes.total - embedding - sizes.moe_layers * sizes.routed * (1 - met)


def prefill_seconds(config: ModelConfig, devices: Any, workload: Workload, cluster: Cluster) -> Any:
    """Seconds of reading a step's prompts on so many devices: once for all samples of a group, servers share prefixes."""
    rate = cluster.device.peak_flops(workload.dtype) * cluster.rates.prefill
    flops = forward_flops(config, [max(1, round(workload.prompt_tokens))]).total
    return workload.prompts * flops / (devices * rate)
