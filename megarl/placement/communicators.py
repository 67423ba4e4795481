"""Bytes that NCCL and grouped products hold for a role with experts, beside what any layout has (`Rates.reserved_bytes`).

NCCL 2.28's source (p2p.cc, init.cc, paths.cc): for each channel and peer of a node a buffer for what comes, of 4 MiB beside 4.7
and 0.5 for two protocols of small messages, and one for what goes, both in units of 2 MiB: 10 and 2 MiB. A ring has one peer
and, on eight devices with NVLink, 24 channels. The exchange of tokens has all peers of the group and 32 channels for each: 2.6
GiB for eight ranks of a node, where 3.3 GB more were seen on H100 (NVIDIA/nccl issue 1685). `NCCL_MAX_P2P_NCHANNELS` makes them
fewer. Where the group spans nodes they are as few as one network adapter wants, and a pool for the network comes with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.devices import WITHOUT_NVLINK
from megarl.placement.space import Layouts

MIB = 2**20
PAIR = 12 * MIB  # of one channel, to one peer and from one
RING = 24  # channels
EXCHANGE, SLOW_EXCHANGE, FAR_EXCHANGE = (
    32,
    2,
    4,
)  # channels for a peer: over NVLink, without it, in a group that spans nodes
POOL = 512 * MIB  # for the network: 32 channels x 16 steps x 512 KiB, to send and to receive
WORKSPACES = (
    4 * 32 * MIB
)  # of Transformer Engine's grouped products, one for each of their streams (2.11, Hopper and later)


def expert_bytes(config: ModelConfig, choice: Layouts, cluster: Cluster) -> Any:
    """[N] bytes that stay on a device from a role's first step on; 0 for models without experts, and without NCCL."""
    if config.moe is None or not cluster.device.offloads_to_host:
        return np.zeros(len(choice))
    together = np.clip(cluster.devices_per_node // choice.etp, 1, choice.ep)  # ranks of the group on one node
    near = SLOW_EXCHANGE if cluster.device.name in WITHOUT_NVLINK else EXCHANGE
    spans = choice.ep > together
    exchange = np.where(spans, FAR_EXCHANGE, near) * (together - 1) * PAIR + spans * POOL
    # How many tokens each expert has, over ep and etp; gradients, over the copies of an expert; their norm, over all parts.
    groups = (choice.ep * choice.etp, choice.edp, choice.ep * choice.etp * choice.pp)
    rings = sum((size > 1) * 1 for size in groups)
    return exchange + rings * RING * PAIR + WORKSPACES
