"""Seconds of a Megatron role's work under every layout: one log-prob or value pass over a step's samples, and its updates.

A pipeline goes at the pace of its slowest rank: m micro-batches take m times what that one needs, and once what all others do,
of which v virtual stages leave 1 / v (Narayanan et al., arXiv 2104.04473). What a rank needs is in `layers`. An update adds the
reduction of gradients and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.types import MiniBatches
from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.layers import BACKWARD, GRADIENT_BYTES, Parts, micro_batch
from megarl.placement.links import all_gather_s
from megarl.placement.sizes import adapter_sizes, model_sizes, routed_adapter_sizes
from megarl.placement.space import Layouts
from megarl.placement.stages import Stage, stages
from megarl.placement.workload import Workload
from megarl.recipe.roles import Lora


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
class Batches:
    """[N] how the samples of one pass or update come to a data-parallel rank: so many micro-batches of so many tokens, padded."""

    count: Any
    tokens: Any


def batches(samples: float, workload: Workload, choice: Layouts) -> Batches:
    """Micro-batches of the heaviest data-parallel rank when this many samples are assigned.

    Dealt well, the heaviest rank has the mean, or the longest sample where ranks have few; whole samples, so that one rank
    has the mean number rounded up, none of them shorter than the shortest. A micro-batch is filled as far as they let it; only
    then are its sequences padded.
    """
    lengths = workload.responses
    mean = workload.prompt_tokens + lengths.mean
    load = np.maximum(samples / choice.dp * mean, workload.prompt_tokens + lengths.longest_of(samples))
    load = np.maximum(load, np.ceil(samples / choice.dp) * (workload.prompt_tokens + lengths.shortest))
    room = np.maximum(choice.micro_tokens - mean / 2, mean)
    count = np.maximum(np.ceil(load / room - 1e-9), 1)
    return Batches(count, load / count * (1 + choice.padding / mean))


def score_seconds(
    config: ModelConfig,
    choice: Layouts,
    workload: Workload,
    cluster: Cluster,
    *,
    head: bool = True,
    of: MiniBatches = "all",
) -> Seconds:
    """Log-probs (or values, without a head) of a step's samples. of: mini-batches."""
    minis = workload.mini_batches - (of == "later")
    assigned = batches(workload.samples * minis / workload.mini_batches, workload, choice)
    forward, _, _ = micro_batch(config, choice, assigned.tokens, workload, cluster, head=head)
    return _pipelined(config, forward, assigned.count, choice, workload, cluster)


def update_seconds(
    config: ModelConfig,
    choice: Layouts,
    workload: Workload,
    cluster: Cluster,
    *,
    head: bool = True,
    epochs: int = 1,
    lora: Lora | None = None,
) -> Seconds:
    """All optimizer steps of one step. epochs: times that the role goes through the samples. lora: adapters that alone learn."""
    updates = workload.mini_batches * epochs
    assigned = batches(workload.samples / workload.mini_batches, workload, choice)
    forward, backward, again = micro_batch(config, choice, assigned.tokens, workload, cluster, head=head, lora=lora)
    both = forward.plus(backward).plus(again)
    seconds = _pipelined(config, both, assigned.count, choice, workload, cluster, updates=updates, calls=epochs)
    gradients, optimizer = _step_seconds(config, choice, workload, cluster, head=head, lora=lora)
    return Seconds(**{**vars(seconds), "gradients": updates * gradients, "optimizer": updates * optimizer})


def crowding(devices: Any, cluster: Cluster) -> Any:
    """How many times slower each of a pool's devices is while all of them work: those of a node may share its cores."""
    return np.maximum(np.minimum(devices, cluster.devices_per_node) / cluster.rates.at_once, 1.0)


def core_share(devices: Any, cluster: Cluster) -> Any:
    """Share of the cluster's cores that a pool keeps busy; 0 where devices are devices."""
    return np.minimum(devices / (cluster.rates.at_once * cluster.nodes), 1.0)


def _pipelined(
    config: ModelConfig,
    parts: Parts,
    count: Any,
    choice: Layouts,
    workload: Workload,
    cluster: Cluster,
    *,
    updates: int | None = None,
    calls: int = 1,
) -> Seconds:
    """`count` micro-batches through the pipeline, so many times as there are updates; one pass forward where that is None."""
    rates, crowd, rounds = cluster.rates, crowding(choice.devices, cluster), updates or 1
    kinds = stages(config, choice)
    slowest = _of_most([parts.total_on(kind) for kind in kinds], kinds)
    one, moe = parts.on(slowest), len(config.moe_layers)
    every = (config.num_layers - moe) * parts.dense.total + moe * parts.expert.total
    every = every + parts.embedding.total + parts.head.total + choice.pp * parts.stage.total
    # Ranks that wait, for a message or for their turn in the pipeline, leave shared cores to the others.
    waits = np.maximum(every - one.total, 0.0) / choice.vpp * rounds
    bubble = np.maximum(waits - (crowd - 1) * count * rounds * (one.compute + one.launch), 0.0)
    spent = {name: seconds * count * rounds for name, seconds in vars(one).items()}
    # Virtual stages want as many micro-batches as make whole rounds of the ranks: those of one token that fill them are launches.
    fillers = np.where(choice.vpp > 1, -count % choice.pp, 0) * rounds * (1 if updates is None else 1 + BACKWARD)
    layers_s = (slowest.layers - slowest.moe_layers) * rates.layer_s + slowest.moe_layers * rates.expert_layer_s
    spent["launch"] = spent["launch"] + fillers * layers_s
    spent["compute"], spent["launch"] = spent["compute"] * crowd, spent["launch"] * crowd
    spent["launch"] = spent["launch"] + calls * rates.call_s
    zero, dispatch = np.zeros(len(choice)), calls * workload.samples * rates.call_sample_s
    return Seconds(**spent, bubble=bubble, gradients=zero, optimizer=zero, dispatch=dispatch)


def _of_most(amounts: list[Any], kinds: tuple[Stage, ...]) -> Stage:
    """[N] of every choice the kind of rank that has most."""
    most = np.argmax(amounts, axis=0)
    return Stage(**{name: np.choose(most, [getattr(kind, name) for kind in kinds]) for name in vars(kinds[0])})


def _step_seconds(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, *, head: bool, lora: Lora | None
) -> tuple[Any, Any]:
    """Reducing gradients and gathering weights, and the optimizer's pass over its share; of one optimizer step."""
    sharded, sizes, kinds = workload.shards_optimizer, model_sizes(config, head=head), stages(config, choice)
    held = [kind.parameters(sizes) for kind in kinds]
    fullest = _of_most([dense / choice.tp + routed / (choice.ep * choice.etp) for dense, routed in held], kinds)
    dense, routed = fullest.parameters(sizes)
    others, routed = dense / choice.tp, routed / (choice.ep * choice.etp)
    if lora is not None:
        each = [adapter_sizes(config, lora, choice.tp, kind.layers, kind.moe_layers) for kind in kinds]
        of_experts = [routed_adapter_sizes(config, lora, choice.ep, choice.etp, kind.moe_layers) for kind in kinds]
        others, routed = np.max(each, axis=0), np.max(of_experts, axis=0) + np.zeros(len(choice))
    # Gradients are scattered, and then weights gathered where each rank has updated its share, gradients where it has not.
    moved = GRADIENT_BYTES + (workload.bytes_each if sharded else GRADIENT_BYTES)
    gradients, state = np.zeros(len(choice)), np.zeros(len(choice))
    groups = [(others, choice.dp * choice.cp, choice.tp)]
    groups += [(routed, np.maximum(choice.edp, 1), choice.ep * choice.etp)] if config.moe is not None else []
    for held, ranks, stride in groups:
        gradients = gradients + np.where(ranks > 1, all_gather_s(cluster, held * moved, ranks, stride), 0.0)
        state = state + held / (ranks if sharded else 1)
    memory = cluster.device.memory_bytes_s * cluster.rates.memory
    # Gradients are scaled and their norm taken; weights, moments and masters are read and written once.
    spent = (routed + others) * 3 * GRADIENT_BYTES + state * 30
    return gradients, (spent / memory + cluster.rates.update_s) * crowding(choice.devices, cluster)
