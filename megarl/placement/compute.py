"""Seconds of a Megatron role's work under every layout: one log-prob or value pass over a step's samples, and its updates.

A micro-batch on one pipeline stage costs its products and the bytes beside them (see `roofline`), what its launches take beyond
that, and the collectives of tensor, context and expert parallel; a pipeline of p stages runs m + p - 1 of them one after
the other (Narayanan et al., arXiv 2104.04473). An update adds the reduction of gradients and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.placement.cluster import Cluster
from megarl.placement.links import all_gather_s, all_to_all_s, send_s
from megarl.placement.memory import GRADIENT_BYTES
from megarl.placement.roofline import (
    ATTENTION_BACKWARD,
    LOGIT_BYTES,
    attention_elements,
    attention_products,
    expert_elements,
    mlp_products,
    training_roof,
)
from megarl.placement.sizes import model_sizes
from megarl.placement.space import Layouts
from megarl.placement.workload import Workload

# Backward multiplies twice for each multiplication of the forward pass, and moves twice the bytes.
BACKWARD = 2
# Collectives of tensor parallel with sequence parallel, of one layer's two halves: each gathers its input and scatters its
# output; backward gathers the inputs once more for the gradients of the weights (arXiv 2205.05198).
GATHERS, GATHERS_BACKWARD = 2, 3


@dataclass(frozen=True)
class Seconds:
    """[N] seconds of one kind of work in one step, by where they go.

    dispatch: of its samples, from one process to all ranks and back: pools do not share that out, and it is no one's choice.
    """

    compute: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any
    bubble: Any
    gradients: Any
    optimizer: Any
    dispatch: float

    @property
    def total(self) -> Any:
        """All of it."""
        return sum(vars(self).values())

    @property
    def work(self) -> Any:
        """What the ranks of a pool do: all but the dispatch."""
        return self.total - self.dispatch


@dataclass(frozen=True)
class Pass:
    """[N] seconds of one micro-batch on the slowest pipeline stage, in one direction or several."""

    compute: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any

    def plus(self, other: Pass, times: Any = 1.0) -> Pass:
        """This and so many times the other."""
        return Pass(**{name: mine + times * getattr(other, name) for name, mine in vars(self).items()})


@dataclass(frozen=True)
class Batches:
    """[N] how the samples of one pass or update come to a data-parallel rank: so many micro-batches of so many tokens."""

    count: Any
    tokens: Any


def batches(samples: float, workload: Workload, choice: Layouts) -> Batches:
    """Micro-batches of the heaviest data-parallel rank when this many samples are assigned.

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
    assigned = batches(workload.samples, workload, choice)
    one, _, _ = passes(config, choice, assigned.tokens, workload, cluster, head=head)
    return _pipelined(one, assigned.count, choice, workload, cluster)


def update_seconds(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, *, head: bool = True, epochs: int = 1
) -> Seconds:
    """All optimizer steps of one step. epochs: times that the role goes through the samples."""
    updates = workload.mini_batches * epochs
    assigned = batches(workload.samples / workload.mini_batches, workload, choice)
    forward, backward, again = passes(config, choice, assigned.tokens, workload, cluster, head=head)
    both = forward.plus(backward).plus(again)
    seconds = _pipelined(both, assigned.count * updates, choice, workload, cluster, updates=updates, calls=epochs)
    gradients, optimizer = _step_seconds(config, choice, workload, cluster, head=head)
    return Seconds(**{**vars(seconds), "gradients": updates * gradients, "optimizer": updates * optimizer})


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
    workload: Workload,
    cluster: Cluster,
    *,
    updates: float = 1.0,
    calls: int = 1,
) -> Seconds:
    """`count` micro-batches through the pipeline, in `updates` rounds."""
    rates, crowd = cluster.rates, crowding(choice.devices, cluster)
    own, whole = one.compute + one.launch, sum(vars(one).values())
    # Ranks that wait, for a message or for their turn in the pipeline, leave shared cores to the others.
    bubble = np.maximum((choice.pp - 1) * updates * whole - (crowd - 1) * count * own, 0.0)
    spent = {name: seconds * count for name, seconds in vars(one).items()}
    spent["compute"], spent["launch"] = spent["compute"] * crowd, spent["launch"] * crowd
    spent["launch"] = spent["launch"] + calls * rates.call_s
    zero, dispatch = np.zeros(len(choice)), calls * workload.samples * rates.call_sample_s
    return Seconds(**spent, bubble=bubble, gradients=zero, optimizer=zero, dispatch=dispatch)


def passes(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster, *, head: bool
) -> tuple[Pass, Pass, Pass]:
    """One micro-batch on the slowest stage: forward, backward, and what recompute adds to the latter.

    tokens: [N] of the micro-batch on a data-parallel rank. Logits are the last stage's alone.
    """
    stage = np.ceil(config.num_layers / choice.pp)
    moe = len(config.moe_layers) / config.num_layers
    here, dense = tokens / choice.cp, _dense_layer(config, choice, tokens, workload, cluster)
    layers = dense if moe == 0 else _mixed(dense, _expert_layer(config, choice, tokens, workload, cluster), moe)
    forward, backward = (_times(one, stage) for one in layers)
    head_s = _head_seconds(config, choice, here, workload, cluster) if head else 0.0
    roof = training_roof(cluster, workload.dtype)
    routed, others = _held(config, choice, head=head)
    micro_s = cluster.rates.micro_s
    width = here / choice.tp * config.hidden_size * workload.bytes_each
    send = np.where(choice.pp > 1, send_s(cluster, width, choice.devices // choice.pp), 0.0)
    # Each micro-batch's gradients are added to those before: read in the model's dtype, read and written in float32.
    added = (routed + others) * (workload.bytes_each + 2 * GRADIENT_BYTES) / roof.bytes_s
    attention = _attention_seconds(config, choice, here, workload, cluster) * stage
    again = _times(forward, np.where(choice.recompute == 2, 1.0, 0.0)).plus(
        _only_compute(np.where(choice.recompute == 1, attention, 0.0))
    )
    extra = _only_compute(head_s, launch=micro_s, pipeline=send)
    extra_back = _only_compute(BACKWARD * head_s + added, launch=BACKWARD * micro_s, pipeline=send)
    return forward.plus(extra), backward.plus(extra_back), again


def _only_compute(compute: Any, launch: Any = 0.0, pipeline: Any = 0.0) -> Pass:
    return Pass(compute=compute, launch=launch, tensor=0.0, context=0.0, expert=0.0, pipeline=pipeline)


def _times(one: Pass, times: Any) -> Pass:
    return Pass(**{name: seconds * times for name, seconds in vars(one).items()})


def _mixed(dense: tuple[Pass, Pass], expert: tuple[Pass, Pass], moe: float) -> tuple[Pass, Pass]:
    """A layer on average, where a share of them has experts."""
    forward, backward = (_times(one, 1 - moe).plus(other, moe) for one, other in zip(dense, expert, strict=True))
    return forward, backward


def _dense_layer(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster
) -> tuple[Pass, Pass]:
    """Forward and backward of one layer without experts."""
    here, each, roof, rates = (
        tokens / choice.cp,
        workload.bytes_each,
        training_roof(cluster, workload.dtype),
        cluster.rates,
    )
    products = attention_products(config, choice.tp) + mlp_products(
        config.hidden_size, config.ffn_hidden_size, choice.tp
    )
    elements = attention_elements(config, choice.tp) + 3 * config.ffn_hidden_size / choice.tp
    own = roof.products_s(here, products, each, each) + here * elements * each * rates.traffic / roof.bytes_s
    attention = _attention_seconds(config, choice, here, workload, cluster)
    gather = all_gather_s(cluster, here * config.hidden_size * each, choice.tp, 1)
    launch = rates.layer_s + _sequence_launch(choice, tokens, workload, cluster)
    context = _context_seconds(config, choice, tokens, workload, cluster)
    return (
        _layer(own + attention, launch, 2 * GATHERS * gather, context, cluster),
        _layer(
            BACKWARD * own + ATTENTION_BACKWARD * attention,
            BACKWARD * launch,
            2 * GATHERS_BACKWARD * gather,
            2 * context,
            cluster,
        ),
    )


def _layer(compute: Any, launch: Any, tensor: Any, context: Any, cluster: Cluster) -> Pass:
    """One layer in one direction. Where the host runs ahead, launching takes only what the device does not need anyway."""
    if cluster.device.queues:
        launch = np.maximum(launch - compute - tensor - context, 0.0)
    return Pass(compute=compute, launch=launch, tensor=tensor, context=context, expert=0.0, pipeline=0.0)


def _expert_layer(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster
) -> tuple[Pass, Pass]:
    """Forward and backward of one layer with experts: tokens go out to them and come back, and the host waits for counts."""
    moe, rates, each = config.moe, cluster.rates, workload.bytes_each
    assert moe is not None
    hidden, here, roof = config.hidden_size, tokens / choice.cp, training_roof(cluster, workload.dtype)
    own_tokens = here / choice.tp
    sent = own_tokens * moe.top_k
    local = moe.num_experts / choice.ep
    # Experts are not cut by tensor parallel; the rows of each are padded to whole tiles.
    rows = np.ceil(sent / local / cluster.device.tile_rows) * cluster.device.tile_rows
    experts = local * roof.products_s(rows, mlp_products(hidden, moe.ffn_hidden_size, 1), each, each)
    experts = experts + roof.product_s(own_tokens, hidden, moe.num_experts, each, each)
    products = attention_products(config, choice.tp) + mlp_products(hidden, moe.shared_ffn_hidden_size, choice.tp)
    elements = here * attention_elements(config, choice.tp) + sent * expert_elements(hidden, moe.ffn_hidden_size)
    own = experts + roof.products_s(here, products, each, each) + elements * each * rates.traffic / roof.bytes_s
    attention = _attention_seconds(config, choice, here, workload, cluster)
    gather = all_gather_s(cluster, here * hidden * each, choice.tp, 1)
    context = _context_seconds(config, choice, tokens, workload, cluster)
    launch = rates.expert_layer_s + _sequence_launch(choice, tokens, workload, cluster)
    exchange = 2 * all_to_all_s(cluster, sent * hidden * each, choice.ep, 1) + np.zeros(len(choice))
    # Of the two halves only attention is cut by tensor parallel.
    forward = Pass(own + attention, launch, GATHERS * gather, context, exchange, 0.0)
    backward = Pass(
        compute=BACKWARD * own + ATTENTION_BACKWARD * attention,
        launch=BACKWARD * launch,
        tensor=GATHERS_BACKWARD * gather,
        context=2 * context,
        expert=exchange,
        pipeline=0.0,
    )
    return forward, backward


def _sequence_launch(choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster) -> Any:
    sequences = tokens / (workload.prompt_tokens + workload.responses.mean)
    return sequences * np.where(choice.cp > 1, cluster.rates.cut_sequence_s, cluster.rates.sequence_s)


def _context_seconds(config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster) -> Any:
    """Keys and values of one layer, gathered."""
    kv = 2 * config.num_kv_heads * config.head_dim * workload.bytes_each / choice.tp
    return all_gather_s(cluster, tokens * kv, choice.cp, choice.tp) * (choice.cp > 1)


def _attention_seconds(config: ModelConfig, choice: Layouts, here: Any, workload: Workload, cluster: Cluster) -> Any:
    """The core of one layer's attention, forward."""
    lengths = np.maximum(np.round(workload.responses.grid + workload.prompt_tokens), 1).astype(np.int64)
    each = forward_flops(config, lengths).attention / float(lengths.sum()) / config.num_layers
    return here / choice.tp * each / (cluster.device.product_flops(workload.dtype) * cluster.rates.attention)


def _head_seconds(config: ModelConfig, choice: Layouts, here: Any, workload: Workload, cluster: Cluster) -> Any:
    """The vocabulary's product and what reads its logits, forward."""
    columns, roof, each = config.vocab_size / choice.tp, training_roof(cluster, workload.dtype), workload.bytes_each
    return roof.product_s(here, config.hidden_size, columns, each, each) + here * columns * LOGIT_BYTES / roof.bytes_s


def _held(config: ModelConfig, choice: Layouts, *, head: bool) -> tuple[Any, Any]:
    """[N] parameters on one rank of the heaviest stage: of routed experts, and all others."""
    dense, routed = model_sizes(config, head=head).on_stage(choice.pp)
    return routed / choice.ep, dense / choice.tp


def _step_seconds(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, *, head: bool
) -> tuple[Any, Any]:
    """Reducing gradients and gathering weights, and the optimizer's pass over its share; of one optimizer step."""
    sharded, routed, others = workload.shards_optimizer, *_held(config, choice, head=head)
    # Gradients are scattered, and then weights gathered where each rank has updated its share, gradients where it has not.
    moved = GRADIENT_BYTES + (workload.bytes_each if sharded else GRADIENT_BYTES)
    gradients, state = np.zeros(len(choice)), np.zeros(len(choice))
    groups = [(others, choice.dp * choice.cp, choice.tp)]
    groups += [(routed, np.maximum(choice.edp, 1), choice.ep)] if config.moe is not None else []
    for held, ranks, stride in groups:
        gradients = gradients + np.where(ranks > 1, all_gather_s(cluster, held * moved, ranks, stride), 0.0)
        state = state + held / (ranks if sharded else 1)
    memory = cluster.device.memory_bytes_s * cluster.rates.memory
    # Gradients are scaled and their norm taken; weights, moments and masters are read and written once.
    spent = (routed + others) * 3 * GRADIENT_BYTES + state * 30
    return gradients, (spent / memory + cluster.rates.update_s) * crowding(choice.devices, cluster)
