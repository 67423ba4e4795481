"""Bytes that NCCL holds for ranks that send to one another, and grouped products for experts, beside `Rates.reserved_bytes`.

NCCL's source (p2p.cc, init.cc, paths.cc of 2.28): for each channel and peer of a node it has a buffer for what comes, of 4 MiB
beside 4.7 and 0.5 for two protocols of small messages, and one for what goes, both in units of 2 MiB: 10 and 2 MiB. A ring has
one peer and, on eight devices with NVLink, 24 channels. Who is sent to has 32 channels: the exchange of tokens among eight ranks
of a node takes 2.6 GiB, where 3.3 GB more were seen on H100 (NVIDIA/nccl issue 1685). `NCCL_MAX_P2P_NCHANNELS` makes them fewer.
In a group that spans nodes they are as few as one network adapter wants, and a pool for the network comes with them.
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
NEAR, SLOW, FAR = 32, 2, 4  # channels for who is sent to: over NVLink, without it, in a group that spans nodes
POOL = 512 * MIB  # for the network: 32 channels x 16 steps x 512 KiB, to send and to receive
# Of Transformer Engine's grouped products, one for each of their streams (2.11, Hopper and later).
WORKSPACES = 4 * 32 * MIB


def exchange_bytes(config: ModelConfig, choice: Layouts, cluster: Cluster) -> Any:
    """[N] bytes that stay on a device from a trained role's first step on; 0 where nothing is sent, and without NCCL."""
    if not cluster.device.offloads_to_host:
        return np.zeros(len(choice))
    sent = _to_neighbours(choice, cluster)
    if config.moe is None:
        return sent
    # How many tokens each expert has, over ep and etp; gradients, over the copies of an expert; the loss that balances them.
    groups = (choice.ep * choice.etp, choice.edp, choice.tp * choice.cp)
    rings = sum((size > 1) * 1 for size in groups)
    return sent + _sending(choice.ep, choice.etp, cluster) + rings * RING * PAIR + WORKSPACES


def frozen_bytes(config: ModelConfig, choice: Layouts, cluster: Cluster) -> Any:
    """[N] bytes of the same for a frozen role, where no other role of its pool has its layout, and so its groups.

    Without gradients there are no sums over copies; tensor parallel has a ring more.
    """
    if not cluster.device.offloads_to_host:
        return np.zeros(len(choice))
    sent = _to_neighbours(choice, cluster) + (choice.tp > 1) * RING * PAIR
    if config.moe is None:
        return sent
    return sent + _sending(choice.ep, choice.etp, cluster) + (choice.ep * choice.etp > 1) * RING * PAIR + WORKSPACES


def _to_neighbours(choice: Layouts, cluster: Cluster) -> Any:
    """[N] bytes of the sends around a ring of sequences' parts and along the stages of a pipeline."""
    stages = _sending(choice.pp, choice.devices // choice.pp, cluster, most=2)
    return _sending(choice.cp, choice.tp, cluster, most=2) + stages


def _sending(size: Any, apart: Any, cluster: Cluster, most: int | None = None) -> Any:
    """[N] bytes of a group's sends. apart: from one of its ranks to the next. most: peers of each; default: all."""
    together = np.clip(cluster.devices_per_node // apart, 1, size)  # its ranks on one node
    near = SLOW if cluster.device.name in WITHOUT_NVLINK else NEAR
    spans, peers = size > together, together - 1
    if most is not None:
        peers = np.minimum(peers, most)
    return np.where(spans, FAR, near) * peers * PAIR + spans * POOL
