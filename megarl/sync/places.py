"""Where ranks and servers stand, as a sync's plan wants it: of a recipe on a cluster, or of as many devices as one says."""

from __future__ import annotations

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.parts import first_copy
from megarl.placement.cluster import Cluster
from megarl.recipe.layouts import pools_of, role_layouts
from megarl.recipe.schema import Recipe
from megarl.sync.plan import Receiver, SyncPlan, Trainer, Transport, broadcast_bytes, plan_sync, planned_bytes
from megarl.sync.ring import bucket_limit
from megarl.sync.sending import MIB, Where, choose


def trainer_on(
    config: ModelConfig,
    layout: Layout,
    per_node: int,
    *,
    first_device: int = 0,
    bytes_each: int = 2,
    fused: bool = True,
) -> Trainer:
    """Ranks on neighbouring devices from `first_device` on. fused: whether layers are Transformer Engine's."""
    nodes = tuple((first_device + rank) // per_node for rank in range(layout.world_size))
    return Trainer(config, layout, nodes, bytes_each, "transformer_engine" if fused else "torch")


def servers_apart(count: int, tp: int, per_node: int, first_device: int) -> tuple[Receiver, ...]:
    """Servers on devices of their own, from `first_device` on; none begins in the middle of what another node holds of it."""
    part = min(tp, per_node)
    start = -(-first_device // part) * part
    return tuple(
        Receiver(f"server {index}", tuple((start + index * tp + device) // per_node for device in range(tp)))
        for index in range(count)
    )


def servers_beside(
    count: int, tp: int, trainer: Trainer, *, per_node: int, first_device: int = 0, devices: int | None = None
) -> tuple[Receiver, ...]:
    """Servers on devices of ranks: neighbours, in turn (cluster/slots.py). first_device: of the trainer.

    devices: of the pool from device 0 on that the servers share; default: the trainer's. Where it is not the trainer's
    alone, a server may stand beside none of its ranks.
    """
    shared = trainer.layout.world_size if devices is None else devices
    if shared < tp:
        raise UserError(
            f"Servers of rollout.tp {tp} do not fit on {shared} devices. Lower rollout.tp, or take more devices."
        )
    found = []
    for index in range(count):
        start = index % (shared // tp) * tp
        ranks = tuple(device - first_device for device in range(start, start + tp))
        has_ranks = all(0 <= rank < trainer.layout.world_size for rank in ranks)
        nodes = tuple(device // per_node for device in range(start, start + tp))
        found.append(Receiver(f"server {index}", nodes, ranks if has_ranks else ()))
    return tuple(found)


def plan_of(recipe: Recipe, config: ModelConfig, cluster: Cluster) -> SyncPlan:
    """The plan of a recipe's own placement: servers on devices of their own where there are enough, else on the first pool's.

    Raises UserError where the ranks alone are more than the cluster's devices.
    """
    pools, per_node = pools_of(recipe), cluster.devices_per_node
    first, ranks = 0, sum(pool.devices for pool in pools.values())
    for pool in pools.values():
        if "actor" in pool.roles:
            break
        first += pool.devices
    trainer = trainer_on(
        config,
        role_layouts(recipe)["actor"],
        per_node,
        first_device=first,
        bytes_each=4 if recipe.model.dtype == "float32" else 2,
        fused=cluster.device.kernels.fused,
    )
    receivers = _servers_of(recipe, trainer, cluster, ranks, first)
    transport = _transport(recipe, trainer, receivers, cluster)
    most = recipe.sync.bucket_mb * MIB
    if transport == "shared_memory":
        return plan_sync(trainer, receivers, transport, bucket_limit(most))
    helped = transport == "broadcast" and not _by_gloo(recipe, cluster, ranks)
    sent = broadcast_bytes(most, helped=helped) if transport == "broadcast" else most
    planned = planned_bytes(sent, trainer.layout, quantized=recipe.rollout.quantization is not None)
    return plan_sync(trainer, receivers, transport, planned, helped=helped)


def _transport(recipe: Recipe, trainer: Trainer, receivers: tuple[Receiver, ...], cluster: Cluster) -> Transport:
    """As a run chooses it, where /dev/shm has room. Raises UserError."""
    where = Where(
        writers={f"node {trainer.nodes[rank]}" for rank in first_copy(trainer.layout)},
        servers={f"node {node}" for receiver in receivers for node in receiver.nodes},
        takes_memory=not cluster.device.offloads_to_host,
        needed_bytes=0,
        free_bytes=None,
        external=recipe.rollout.external is not None,
        quantized=recipe.rollout.quantization is not None,
        beside=all(receiver.ranks for receiver in receivers),
    )
    transport, _ = choose(recipe.sync.transport, where)
    assert transport != "adapters", where
    return transport


def _by_gloo(recipe: Recipe, cluster: Cluster, ranks: int) -> bool:
    """Whether a broadcast goes through the host (sync/broadcast.py, run/sending.py). ranks: of all pools."""
    rollout = recipe.rollout
    if not cluster.device.offloads_to_host or (rollout.deterministic and rollout.tp > 1):
        return True
    return rollout.external is None and not _are_apart(recipe, cluster, ranks)


def _are_apart(recipe: Recipe, cluster: Cluster, ranks: int) -> bool:
    """Whether servers have devices of their own."""
    return cluster.num_devices - ranks >= recipe.rollout.server_devices


def _servers_of(recipe: Recipe, trainer: Trainer, cluster: Cluster, ranks: int, first: int) -> tuple[Receiver, ...]:
    """Where a recipe's servers stand. ranks: of all pools. first: device of the trainer's first rank."""
    per_node, tp, count, used = (
        cluster.devices_per_node,
        recipe.rollout.tp,
        recipe.rollout.num_servers,
        recipe.rollout.server_devices,
    )
    if cluster.num_devices < ranks:
        raise UserError(
            f"The recipe's ranks take {ranks} devices, and there are {cluster.num_devices}: {cluster.describe()}. Give as many "
            f"nodes as it asks for: {ranks + used} devices for ranks and servers, or {ranks} that they share."
        )
    if recipe.rollout.external is not None:
        return servers_apart(count, tp, per_node, cluster.num_devices)
    if not cluster.device.offloads_to_host:
        # Where processes stand for devices servers have none: they are on nodes without ranks, or on all (cluster/slots.py).
        free = range(-(-ranks // per_node), cluster.nodes) or range(cluster.nodes)
        return tuple(Receiver(f"server {index}", (free[index % len(free)],) * tp) for index in range(count))
    if _are_apart(recipe, cluster, ranks):
        return servers_apart(count, tp, per_node, ranks)
    shared = next(iter(pools_of(recipe).values())).devices
    return servers_beside(count, tp, trainer, per_node=per_node, first_device=first, devices=shared)
