"""Seconds of a weight sync by its bytes: what links and memories a bucket passes. The one place that prices them.

The search takes whole models (`sync_seconds`, `gather_seconds`); sync/price.py takes a plan bucket by bucket, by the same rates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.lora_settings import linear_of, target_of
from megarl.models.rules import expected_tensors, rules
from megarl.placement.cluster import Cluster
from megarl.placement.links import group_bytes_s
from megarl.placement.sizes import model_sizes
from megarl.placement.space import Layouts
from megarl.placement.workload import Workload

# Of a sync that the search prices: what a recipe has that says nothing else (sync.bucket_mb).
BUCKET_BYTES = 512 * 2**20


def inside_bytes_s(cluster: Cluster) -> float:
    """What reaches a device from its peers in the node."""
    return cluster.device.inside_bytes_s * cluster.rates.links


def between_bytes_s(cluster: Cluster) -> float:
    """What one device's network carries."""
    return cluster.device.between_bytes_s * cluster.rates.network


def memory_s(cluster: Cluster, moved: Any, nbytes: Any) -> Any:
    """Seconds of `nbytes` of weights that are read and written on a device, `moved` bytes of memory traffic in all.

    At most rates.copy_bytes_s of weights, where that was measured.
    """
    memory = cluster.device.memory_bytes_s * cluster.rates.memory
    return np.maximum(moved / memory, nbytes / cluster.rates.copy_bytes_s)


def send_bytes_s(cluster: Cluster, senders: int, receivers: int, *, across: bool) -> float:
    """Bytes a second of a broadcast. senders, receivers: devices of the sender's node, and of a receiving one, in the group.

    across: whether receivers are on other nodes. NCCL's rings leave a node over the network of each of its devices that is
    in the group, and enter the next likewise; inside each device takes all of it from a peer.
    """
    inside = inside_bytes_s(cluster)
    return min(inside, between_bytes_s(cluster) * min(senders, receivers)) if across else inside


def assemble_s(cluster: Cluster, own: Any, foreign: Any) -> Any:
    """Seconds of memory in which a device copies `own` bytes into a bucket, and `foreign` ones arrive in it."""
    return memory_s(cluster, 2 * own + foreign, (own + foreign) / 2)


def load_s(cluster: Cluster, nbytes: Any, tp: Any) -> Any:
    """Seconds of memory in which a server's devices copy their rows out of a bucket: each reads and writes its share.

    A measured copy_bytes_s is of a whole hand-over, ranks and servers one after another: half of it is each one's.
    """
    return memory_s(cluster, 2 * nbytes / tp, nbytes / 2)


def engine_s(cluster: Cluster, config: ModelConfig) -> float:
    """Seconds that an engine takes beside all copies: it loads one tensor after another."""
    return cluster.rates.load_tensor_s * num_tensors(config)


def hosted_bytes_s(cluster: Cluster) -> float:
    """Bytes a second of a broadcast to servers on the ranks' devices: gloo takes it through the host's memory."""
    return min(inside_bytes_s(cluster), cluster.device.host_bytes_s * cluster.rates.host)


def quantise_s(cluster: Cluster, nbytes: float, quantised: float) -> float:
    """Seconds of memory in which a device reads weights and writes them in FP8, with their scales: so many bytes of each."""
    return float(memory_s(cluster, nbytes + quantised, 0))


def write_s(cluster: Cluster, nbytes: float) -> float:
    """Seconds in which one node writes so much of a weight version."""
    return nbytes / cluster.rates.disk_bytes_s


def read_s(cluster: Cluster, nbytes: float) -> float:
    """Seconds in which a node reads a whole weight version, and writes down what its servers load."""
    return 2 * nbytes / cluster.rates.disk_bytes_s


@lru_cache(maxsize=64)
def adapter_bytes(config: ModelConfig, rank: int, targets: tuple[str, ...], bytes_each: int) -> int:
    """Of LoRA adapters in PEFT's format: A [rank, in] and B [out, rank] of every HF linear. targets: Megatron's linears."""
    return sum(
        rank * (source.shape[0] + source.shape[1]) * bytes_each
        for rule in rules(config, "torch")
        if target_of(linear_of(rule)) in targets
        for source in rule.sources
    )


def adapter_s(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a sync of adapters alone: one rank writes them, and every node's servers read them."""
    return cluster.rates.sync_s + 2 * nbytes / cluster.rates.disk_bytes_s


@lru_cache(maxsize=64)
def num_tensors(config: ModelConfig) -> int:
    """HF tensors of a model. An expert has as many as the one before it, or its part of those of all."""
    moe = config.moe
    if moe is None:
        return len(expected_tensors(config))
    one, two = (len(expected_tensors(replace(config, moe=replace(moe, num_experts=count)))) for count in (1, 2))
    return one + (two - one) * (moe.num_experts - 1)


def sync_seconds(
    config: ModelConfig, workload: Workload, cluster: Cluster, *, across: bool = False
) -> tuple[float, float]:
    """Seconds of moving the actor's weights into servers on other devices, and into servers on its own.

    cluster: the servers'. across: whether the actor is on nodes of another kind. On its own devices: as if each held one
    of so many even parts as its node has devices. Servers are taken as tp 1. Over the disk one node writes all.
    """
    total = model_sizes(config).total * workload.bytes_each + workload.sent_tower
    node = cluster.devices_per_node
    if workload.transport == "adapters" and workload.lora is not None:
        lora = workload.lora
        alone = adapter_s(cluster, adapter_bytes(config, lora.rank, tuple(lora.targets), workload.bytes_each))
        return alone, alone
    fixed = cluster.rates.sync_s + engine_s(cluster, config)
    sent = workload.served_weights + workload.sent_tower  # what is quantised is, by its sender
    load = float(load_s(cluster, sent, 1))
    if workload.transport == "disk":
        by_disk = fixed + write_s(cluster, sent) + read_s(cluster, sent) + load
        return by_disk, by_disk

    def sent_at(rate: float) -> float:
        send, buckets = sent / rate, max(1.0, total / BUCKET_BYTES)
        return (send + load + (buckets - 1) * max(send, load)) / buckets

    separate = sent_at(send_bytes_s(cluster, node, node, across=across or cluster.nodes > 1))
    if workload.quantization is not None or workload.transport == "broadcast":
        # Rows do not quantise, and two processes of one device have no NCCL between them.
        return fixed + separate, fixed + sent_at(hosted_bytes_s(cluster))
    foreign = total * (1 - 1 / node)
    memory = float(assemble_s(cluster, total - foreign, foreign)) + load
    return fixed + separate, fixed + max(foreign / inside_bytes_s(cluster), memory)


def gather_seconds(config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """[N] seconds of gathering the first bucket of the actor's cut weights; others are gathered while one is sent."""
    cut = choice.tp * choice.pp * choice.ep * choice.etp
    bucket = min(model_sizes(config).total * workload.bytes_each, BUCKET_BYTES)
    return bucket * (1 - 1 / cut) / group_bytes_s(cluster, cut, 1)
