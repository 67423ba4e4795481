"""Seconds that collectives take over the links of a cluster: bytes over the slowest link's rate, and hops.

A group of ranks is told by its size and by its stride (how far apart neighbours are numbered). What fits into a node
goes over the links inside. Else the ring leaves each node once for every one of its ranks there, each over its own
network device, so that a group with k ranks in a node has k times the network of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.placement.cluster import Cluster

# The most that the custom all-reduce of a server takes (SGLang and vLLM, custom_all_reduce.py).
CUSTOM_REDUCE_BYTES = 8 * 2**20


def group_bytes_s(cluster: Cluster, size: Any, stride: Any) -> Any:
    """Bytes a second that a ring over the group moves through each rank."""
    node, device, rates = cluster.devices_per_node, cluster.device, cluster.rates
    inside = device.inside_bytes_s * rates.links
    here = np.clip(node // np.asarray(stride), 1, None)
    between = np.minimum(device.between_bytes_s * rates.network * np.minimum(here, size), inside)
    return np.where(np.asarray(size) * stride <= node, inside, between)


def all_gather_s(cluster: Cluster, total_bytes: Any, size: Any, stride: Any) -> Any:
    """All-gather or reduce-scatter of so many bytes in all: each rank passes on (size - 1) / size of them."""
    hops = cluster.rates.hop_s * np.ceil(np.log2(np.maximum(size, 1)))
    return total_bytes * (size - 1) / size / group_bytes_s(cluster, size, stride) + hops


def all_reduce_s(cluster: Cluster, total_bytes: Any, size: Any, stride: Any) -> Any:
    """All-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_s(cluster, total_bytes, size, stride)


def server_reduce_s(cluster: Cluster, total_bytes: Any, size: Any) -> Any:
    """All-reduce of a server's ranks, captured in a graph: a kernel of its own for small messages, else NCCL's ring.

    Both SGLang and vLLM leave to NCCL what is above CUSTOM_REDUCE_BYTES or crosses nodes. 0 where there is one rank.
    """
    device, rates, size = cluster.device, cluster.rates, np.asarray(size)
    moved = 2 * total_bytes * (size - 1) / size
    own = rates.reduce_s + moved / (device.inside_bytes_s * rates.reduce_links)
    small = (np.asarray(total_bytes) <= CUSTOM_REDUCE_BYTES) & (size <= cluster.devices_per_node)
    return np.where(size > 1, np.where(small, own, all_reduce_s(cluster, total_bytes, size, 1)), 0.0)


def all_to_all_s(cluster: Cluster, own_bytes: Any, size: Any, stride: Any) -> Any:
    """All-to-all where each rank has so many bytes: those for other nodes go over its own network device."""
    device, rates = cluster.device, cluster.rates
    node = np.clip(cluster.devices_per_node // np.asarray(stride), 1, None)
    outside = np.clip(1 - node / np.asarray(size), 0, None)
    inside = np.clip(1 - 1 / np.asarray(size) - outside, 0, None)
    # Both directions at once; the two paths overlap little in practice, so their times are added.
    seconds = own_bytes * (
        inside / (device.inside_bytes_s * rates.links) + outside / (device.between_bytes_s * rates.network)
    )
    return seconds + rates.hop_s * np.where(np.asarray(size) > 1, 2.0, 0.0)


def send_s(cluster: Cluster, message_bytes: Any, stride: Any) -> Any:
    """One rank to the one that is `stride` away."""
    device, rates = cluster.device, cluster.rates
    inside = np.asarray(stride) < cluster.devices_per_node
    rate = np.where(inside, device.inside_bytes_s * rates.links, device.between_bytes_s * rates.network)
    return message_bytes / rate + rates.hop_s
