"""Seconds of a Megatron role's work under every layout: one log-prob or value pass over a step's samples, and its updates.

A micro-batch on one pipeline stage costs its multiplications at the rate that matrices of that size reach, a fixed time a
layer, and the collectives of tensor, context and expert parallel; a pipeline of p stages runs m + p - 1 of them one after
the other (Narayanan et al., arXiv 2104.04473). An update adds the reduction of gradients and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import ForwardFlops, forward_flops
from megarl.placement.cluster import Cluster
from megarl.placement.lengths import Lengths
from megarl.placement.links import all_gather_s, all_reduce_s, all_to_all_s, send_s
from megarl.placement.memory import GRADIENT_BYTES, role_bytes
from megarl.placement.space import Layouts
from megarl.placement.workload import Workload

# Backward multiplies twice for each multiplication of the forward pass.
BACKWARD = 2


@dataclass(frozen=True)
class Seconds:
    """[N] seconds of one kind of work in one step, by where they go."""

    compute: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any
    bubble: Any
    gradients: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """[N] seconds of one micro-batch on the slowest pipeline stage, forward."""

    compute: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any


@dataclass(frozen=True)
class Batches:
    """[N] how the samples of one pass or update come to a data-parallel rank: so many micro-batches of so many tokens."""

    count: Any
    tokens: Any


def batches(samples: float, workload: Workload, choice: Layouts) -> Batches:
    """Micro-batches of the heaviest data-parallel rank when this many samples are dealt.

    Dealt well, the heaviest rank has the mean, or the longest sample where ranks have few; whole samples, so that one rank
    has the mean number rounded up, none of them shorter than the shortest. A micro-batch is filled as far as they let it.
    """
    lengths = workload.responses
    mean = workload.prompt_tokens + lengths.mean
    load = np.maximum(samples / choice.dp * mean, workload.prompt_tokens + lengths.longest_of(samples))
    load = np.maximum(load, np.ceil(samples / choice.dp) * (workload.prompt_tokens + lengths.shortest))
    room = np.maximum(choice.micro_tokens - mean / 2, mean)
    count = np.maximum(np.ceil(load / room - 1e-9), 1)
    return Batches(count, load / count)


def score_seconds(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, *, head: bool = True
) -> Seconds:
    """Log-probs (or values, without a head) of a step's samples."""
    dealt = batches(workload.samples, workload, choice)
    one = forward_pass(config, choice, dealt.tokens, workload, cluster, head=head)
    return _pipelined(one, dealt.count, choice, cluster, 1.0, 1.0)


def update_seconds(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, *, head: bool = True, epochs: int = 1
) -> Seconds:
    """All optimizer steps of one step. epochs: times that the role goes through the samples."""
    updates = workload.mini_batches * epochs
    dealt = batches(workload.samples / workload.mini_batches, workload, choice)
    one = forward_pass(config, choice, dealt.tokens, workload, cluster, head=head)
    again = np.where(choice.recompute == 2, 1.0, 0.0)
    half = np.where(choice.recompute == 1, 0.1, again)
    passes = _pipelined(
        one, dealt.count * updates, choice, cluster, 1 + BACKWARD + half, 2 + again, updates=updates, calls=epochs
    )
    sizes = role_bytes(config, choice, workload.bytes_each, trained=True, head=head)
    gradients, optimizer = _step_seconds(sizes.weights / workload.bytes_each, choice, workload, cluster)
    return Seconds(**{**vars(passes), "gradients": updates * gradients, "optimizer": updates * optimizer})


def crowding(devices: Any, cluster: Cluster) -> Any:
    """How many times slower each of a pool's devices is while all of them work: those of a node may share its cores."""
    return np.maximum(np.minimum(devices, cluster.devices_per_node) / cluster.rates.at_once, 1.0)


def core_share(devices: Any, cluster: Cluster) -> Any:
    """Share of the cluster's cores that a pool keeps busy; 0 where devices are devices."""
    return np.minimum(devices / (cluster.rates.at_once * cluster.nodes), 1.0)


def _pipelined(
    one: Pass,
    count: Any,
    choice: Layouts,
    cluster: Cluster,
    compute: Any,
    moves: Any,
    *,
    updates: float = 1.0,
    calls: int = 1,
) -> Seconds:
    """`count` micro-batches through the pipeline. compute, moves: a pass's cost in units of a forward pass."""
    parts = {
        "compute": one.compute * compute,
        "launch": one.launch * compute,
        "tensor": one.tensor * moves,
        "context": one.context * moves,
        "expert": one.expert * moves,
        "pipeline": one.pipeline * np.minimum(moves, 2.0),
    }
    crowd = crowding(choice.devices, cluster)
    own, whole = parts["compute"] + parts["launch"], sum(parts.values())
    # Ranks that wait, for a message or for their turn in the pipeline, leave shared cores to the others.
    bubble = np.maximum((choice.pp - 1) * updates * whole - (crowd - 1) * count * own, 0.0)
    spent = {name: seconds * count for name, seconds in parts.items()}
    spent["compute"], spent["launch"] = spent["compute"] * crowd, spent["launch"] * crowd
    spent["launch"] = spent["launch"] + cluster.rates.call_s * calls
    zero = np.zeros(len(choice))
    return Seconds(**spent, bubble=bubble, gradients=zero, optimizer=zero)


def forward_pass(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster, *, head: bool
) -> Pass:
    """One micro-batch of so many tokens a data-parallel rank, forward, on the slowest stage.

    tokens: [N]. Logits are the last stage's alone.
    """
    rates, peak = cluster.rates, cluster.device.peak_flops(workload.dtype)
    each = flops_per_token(config, workload.responses, workload.prompt_tokens)
    here = tokens / choice.cp
    stage = np.ceil(config.num_layers / choice.pp)
    share = stage / config.num_layers
    moe = config.moe
    experts = 0.0 if moe is None else _expert_flops(config)
    cut = choice.tp
    filled = here / (here + rates.half_tokens)
    dense = (each.projections + each.mlp - experts) * share + (each.logits if head else 0.0)
    compute = here / cut * (dense / (peak * rates.matmul * filled) + each.attention * share / (peak * rates.attention))
    moe_share = len(config.moe_layers) / config.num_layers
    sequences = tokens / (workload.prompt_tokens + workload.responses.mean)
    each_layer = rates.layer_s * (1 - moe_share) + rates.expert_layer_s * moe_share
    each_sequence = np.where(choice.cp > 1, rates.cut_sequence_s, rates.sequence_s)
    launch = stage * (each_layer + sequences * each_sequence) + rates.micro_s
    width = config.hidden_size * workload.bytes_each
    expert_s: Any = 0.0
    if moe is not None:
        met = here / cut * moe.top_k * choice.ep / moe.num_experts
        filled = met / (met + rates.half_expert_tokens)
        compute = compute + here / cut * experts * share / (peak * rates.experts * filled)
        sent = here / cut * moe.top_k * width
        # Tokens go out to their experts, and come back.
        expert_s = stage * moe_share * 2 * all_to_all_s(cluster, sent, choice.ep, 1)
    kv = 2 * config.num_kv_heads * config.head_dim * workload.bytes_each / cut
    return Pass(
        compute=compute,
        launch=launch,
        tensor=stage * 2 * all_reduce_s(cluster, here * width, choice.tp, 1),
        context=stage * all_gather_s(cluster, tokens * kv, choice.cp, choice.tp) * (choice.cp > 1),
        expert=expert_s + np.zeros(len(choice)),
        pipeline=np.where(choice.pp > 1, send_s(cluster, here / cut * width, choice.devices // choice.pp), 0.0),
    )


def flops_per_token(config: ModelConfig, responses: Lengths, prompt_tokens: float) -> ForwardFlops:
    """Forward FLOPs of one token, on average over samples of these lengths."""
    lengths = np.maximum(np.round(responses.grid + prompt_tokens), 1).astype(np.int64)
    total = forward_flops(config, lengths)
    tokens = float(lengths.sum())
    return ForwardFlops(**{name: value / tokens for name, value in vars(total).items()})


def _expert_flops(config: ModelConfig) -> float:
    """Forward FLOPs of one token in routed experts, over all layers."""
    assert config.moe is not None
    return len(config.moe_layers) * 6.0 * config.hidden_size * config.moe.top_k * config.moe.ffn_hidden_size


def _step_seconds(held: Any, choice: Layouts, workload: Workload, cluster: Cluster) -> tuple[Any, Any]:
    """Reducing gradients and gathering weights, and the optimizer's pass over its share; of one optimizer step.

    held: [N] parameters on one rank.
    """
    ranks = choice.dp * choice.cp
    # Gradients are scattered, and then weights gathered where each rank has updated its share, gradients where it has not.
    moved = held * (GRADIENT_BYTES + (workload.bytes_each if workload.shards_optimizer else GRADIENT_BYTES))
    gradients = np.where(ranks > 1, all_gather_s(cluster, moved, ranks, choice.tp), 0.0)
    memory = cluster.device.memory_bytes_s * cluster.rates.memory
    # Gradients are scaled and their norm taken; weights, moments and masters are read and written once.
    passes = held * 3 * GRADIENT_BYTES + held / (ranks if workload.shards_optimizer else 1) * 30
    return gradients, (passes / memory + cluster.rates.update_s) * crowding(choice.devices, cluster)
