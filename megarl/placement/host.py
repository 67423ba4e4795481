"""Memory of a node's host: what offloaded roles leave there, what saves put together there, and the processes themselves.

Of devices with memory of their own; where processes stand for devices, the host's memory is theirs and counted as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.devices import GIB
from megarl.placement.memory import RoleBytes
from megarl.placement.placed import PlacementPlan, PoolPlan
from megarl.placement.space import Layouts
from megarl.placement.workload import ROLLOUT, Workload

OFFLOADED, SAVE, RANKS, SERVERS = "offloaded roles", "a save", "ranks", "servers"
ROUTING = "choices of experts"
CHOICE_BYTES = 4  # of one expert, as SGLang writes it down (0.5.21, state_capturer/base.py)


def role_host(
    held: RoleBytes, choice: Layouts, workload: Workload, cluster: Cluster, *, offloaded: bool, trained: bool
) -> dict[str, float]:
    """Bytes of the host for each device of a Megatron role, on average over a node; of the first choice.

    A save puts the optimizer's state together on the host where data-parallel ranks share it out (training/state_shares.py).
    What is written while training goes on is a copy, the weights with it, which one data-parallel rank writes.
    """
    if not cluster.device.offloads_to_host:
        return {}
    weights, optimizer, moved = (float(np.ravel(each)[0]) for each in (held.weights, held.optimizer, held.moved))
    layout = choice.layout(0)
    saved = 0.0
    if trained:
        shared = workload.shards_optimizer and layout.dp * layout.cp > 1
        saved = optimizer * (shared or workload.async_save)
        here = min(layout.world_size, cluster.devices_per_node)
        saved += weights * min(1.0, layout.tp * layout.pp / here) * workload.async_save
    return {OFFLOADED: moved * offloaded, SAVE: saved}


def server_host(
    cluster: Cluster, servers: int, replayed: ModelConfig | None = None, tokens: float = 0.0
) -> dict[str, float]:
    """Bytes of the host for each device of a server; servers: that share it. Weights come anew with every sync.

    replayed: the model, where ranks are told which experts the servers chose: each rank of a server keeps them, pinned, for as
    many tokens as its cache holds, in all layers.
    """
    if not cluster.device.offloads_to_host:
        return {}
    held = {SERVERS: servers * cluster.rates.host_server_bytes}
    if replayed is None or replayed.moe is None:
        return held
    return held | {ROUTING: servers * tokens * replayed.num_layers * replayed.moe.top_k * CHOICE_BYTES}


def fullest_node(pools: Iterable[PoolPlan]) -> tuple[dict[str, float], Cluster | None]:
    """Bytes by what they are for, of the node whose host lacks most, else of the one that holds most; and the node's kind.

    Nothing where no pool has devices with memory of their own.
    """
    nodes: dict[tuple[Cluster, int], dict[str, float]] = {}
    taken: dict[Cluster, int] = {}
    for pool in pools:
        kind, size, start = pool.kind, pool.kind.devices_per_node, taken.get(pool.kind, 0)
        end = taken[kind] = start + pool.devices
        first, last = start // size, -(-end // size) - 1
        # A pool has all of every node between its ends: one stands for them.
        for node in sorted({first, min(first + 1, last), last}) if pool.devices else ():
            here = min(end, (node + 1) * size) - max(start, node * size)
            held = nodes.setdefault((kind, node), {})
            for name, each in _of_device(pool):
                held[name] = held.get(name, 0.0) + here * each
    if not nodes:
        return {}, None
    (kind, _), held = max(nodes.items(), key=lambda item: (_lacking(item[1], item[0][0]), sum(item[1].values())))
    return held, kind


def _lacking(held: dict[str, float], kind: Cluster) -> float:
    """Bytes that such a node's host has not; 0 where it has all, or nobody said what it has."""
    return 0.0 if kind.host_bytes is None else max(0.0, sum(held.values()) - kind.host_bytes)


def _of_device(pool: PoolPlan) -> Iterator[tuple[str, float]]:
    """Bytes for each device of a pool: one rank has all roles of it but the rollout."""
    for role in pool.roles:
        yield from role.host_bytes.items()
    if pool.kind.device.offloads_to_host and any(role.role != ROLLOUT for role in pool.roles):
        yield RANKS, pool.kind.rates.host_rank_bytes


def host_words(plan: PlacementPlan) -> str:
    """What the fullest node's host holds, in a line; nothing where the devices have no memory of their own."""
    held, kind = fullest_node(plan.pools)
    if kind is None or not held:
        return ""
    have = "" if kind.host_bytes is None else f" of {kind.host_bytes / GIB:.0f}"
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in held.items() if nbytes)
    return f"host memory of the fullest node: {sum(held.values()) / GIB:.1f}{have} GiB ({parts})"


def host_problem(plan: PlacementPlan) -> str | None:
    """What the fullest node's host lacks; None where it holds all of it, or nobody said what it has."""
    held, kind = fullest_node(plan.pools)
    if kind is None or not _lacking(held, kind):
        return None
    return f"the {host_words(plan)}"


def too_full_hosts(plans: Sequence[PlacementPlan], cluster: Cluster) -> UserError:
    """What to raise where the fastest placements would have a node's host hold more than it has."""
    least = min(plans, key=lambda plan: sum(fullest_node(plan.pools)[0].values()))
    return UserError(
        f"No placement among the {len(plans)} fastest on {cluster.describe()} fits into the hosts' memory: of "
        f"{least.describe()}, which takes least, {host_problem(least)}. Take more nodes, or save without train.async_save."
    )
