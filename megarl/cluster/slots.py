"""Which device each process gets: ranks in the order of nodes and devices, servers where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.nodes import Node
from megarl.core.errors import DeadlineError, UserError
from megarl.core.platform import Platform
from megarl.core.scratch import TMPDIR, temporary

RESERVE_S = 60.0
NODE_LABEL = "ray.io/node-id"  # Ray's own, on every node
FEW_CPUS = 0.01  # a process that waits for a device most of the time


@dataclass(frozen=True)
class Slot:
    """A process's place. devices: their names on the node, where Ray gives them out. options: for its actor."""

    node: Node
    devices: tuple[str, ...]
    options: dict[str, Any] = field(hash=False)

    @property
    def env(self) -> dict[str, str]:
        """What a process has to start with to see its devices, and no others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}


@dataclass(frozen=True)
class ServerSlot:
    """A server's place. parts: one a node, the first answers requests. shared: the devices are ranks' as well."""

    parts: tuple[Slot, ...]
    shared: bool = False


def reserve(platform: Platform, nodes: Sequence[Node], count: int, size: int = 1) -> tuple[Slot, ...]:
    """Slots of `size` devices each, by node and device: neighbours share a node as far as they can.

    Raises DeadlineError where the devices are not free.
    """
    if not count:
        return ()
    resource = platform.ray_resource
    bundles = [{resource: float(size), "CPU": FEW_CPUS}] * count
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=_only_on(nodes, count))
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise DeadlineError(
            f"{count} x {size} devices ({resource}) were not free within {RESERVE_S:g} s. Free now: "
            f"{ray.available_resources().get(resource, 0.0):g}."
        )
    places = {node.ray_id: index for index, node in enumerate(nodes)}
    table = placement_group_table(group)["bundles_to_node_id"]
    devices = _devices(platform, group, count)
    order = sorted(
        range(count), key=lambda bundle: (places[table[bundle]], list(map(_number, devices[bundle])), bundle)
    )
    uses = {"num_gpus": float(size)} if resource == "GPU" else {"resources": {resource: float(size)}}
    chosen = [(bundle, nodes[places[table[bundle]]]) for bundle in order]
    return tuple(
        Slot(
            node,
            devices[bundle],
            {"num_cpus": FEW_CPUS, "scheduling_strategy": _bundle(group, bundle), **uses, **_place(node)},
        )
        for bundle, node in chosen
    )


def server_slots(
    platform: Platform, nodes: Sequence[Node], ranks: Sequence[Slot], count: int, size: int
) -> tuple[ServerSlot, ...]:
    """Places for `count` servers of `size` devices: devices of their own where there are enough, the ranks' otherwise.

    Servers larger than a node take whole nodes. Raises UserError where they cannot be cut evenly, DeadlineError.
    """
    if not platform.has_device_memory:
        return tuple(ServerSlot((slot,)) for slot in beside(nodes, ranks, count))
    largest = max(node.devices for node in nodes)
    part = min(size, largest)
    if size % part:
        raise UserError(f"rollout.tp {size} is larger than a node of {largest} devices, and no multiple of it.")
    if sum(node.devices for node in nodes) - len(ranks) >= count * size:
        slots = reserve(platform, nodes, count * size // part, part)
        parts = size // part
        return tuple(ServerSlot(slots[first : first + parts]) for first in range(0, len(slots), parts))
    if len(ranks) < size:
        raise UserError(
            f"{count} servers of rollout.tp {size} fit neither beside the ranks nor on their {len(ranks)} devices. Lower "
            "rollout.tp or rollout.servers, or take more devices."
        )
    chunks = [ranks[first : first + size] for first in range(0, len(ranks) - size + 1, size)]
    return tuple(ServerSlot(share(chunks[index % len(chunks)]), shared=True) for index in range(count))


def share_no_device(ranks: Sequence[Slot], servers: Sequence[ServerSlot]) -> bool:
    """Whether no server is on a device of these ranks; always so where processes stand for devices."""
    taken = {(part.node, device) for slot in servers for part in slot.parts for device in part.devices}
    return not any((slot.node, device) in taken for slot in ranks for device in slot.devices)


def ranks_beside(ranks: Sequence[Slot], servers: Sequence[ServerSlot]) -> tuple[tuple[int, ...], ...]:
    """For each server, the rank on each of its devices, in their order; nothing where a device of a server has none."""
    on = {(slot.node, device): rank for rank, slot in enumerate(ranks) for device in slot.devices}
    places = [[(part.node, device) for part in server.parts for device in part.devices] for server in servers]
    if not all(place in on for each in places for place in each) or not all(places):
        return ()
    return tuple(tuple(on[place] for place in each) for each in places)


def share(ranks: Sequence[Slot]) -> tuple[Slot, ...]:
    """The slots of neighbouring ranks as those of one server, a part for each node. Raises UserError for uneven parts."""
    parts = []
    for node, slots in groupby(ranks, key=lambda slot: slot.node):
        devices = tuple(device for slot in slots for device in slot.devices)
        parts.append(Slot(node, devices, slot_on(node).options))
    if len({len(part.devices) for part in parts}) > 1:
        sizes = ", ".join(f"{len(part.devices)} on {part.node}" for part in parts)
        raise UserError(
            f"A server of rollout.tp {len(ranks)} would have uneven parts: {sizes}. Choose another rollout.tp."
        )
    return tuple(parts)


def beside(nodes: Sequence[Node], taken: Sequence[Slot], count: int) -> tuple[Slot, ...]:
    """Slots for processes that need no device of their own: assigned to the nodes without ranks, or to all."""
    busy = {slot.node for slot in taken}
    free = [node for node in nodes if node not in busy] or list(nodes)
    return tuple(slot_on(free[index % len(free)]) for index in range(count))


def slot_on(node: Node) -> Slot:
    """A slot on this node that takes no device."""
    strategy = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
    return Slot(node, (), {"num_cpus": 0, "scheduling_strategy": strategy, **_place(node)})


def _place(node: Node) -> dict[str, Any]:
    """Where a process's temporary files go: libraries make some as they are imported, before any line of ours."""
    return {"runtime_env": {"env_vars": {TMPDIR: str(temporary(node.temp))}}} if node.joined else {}


def _bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _only_on(nodes: Sequence[Node], count: int) -> list[dict[str, str]] | None:
    """For each bundle, the nodes that it may be on, as labels; None where these are all of Ray's."""
    ids = [node.ray_id for node in nodes]
    others = [row for row in ray.nodes() if row["Alive"] and row["NodeID"] not in ids]
    return [{NODE_LABEL: f"in({','.join(ids)})"}] * count if others else None


def _number(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdigit() else (-1, device)


def _devices(platform: Platform, group: PlacementGroup, count: int) -> list[tuple[str, ...]]:
    """Each bundle's devices; Ray hands them out in any order. None where processes stand for devices."""
    if platform.ray_resource != "GPU":
        return [()] * count
    look = ray.remote(lambda: tuple(sorted(map(str, ray.get_gpu_ids()), key=_number)))
    size = group.bundle_specs[0]["GPU"]
    asked = [
        look.options(num_gpus=size, num_cpus=FEW_CPUS, scheduling_strategy=_bundle(group, bundle)).remote()
        for bundle in range(count)
    ]
    try:
        return list(ray.get(asked, timeout=RESERVE_S))
    except GetTimeoutError as error:
        raise DeadlineError(
            f"Ray has not started a process on each of {count} x {size:g} devices (GPU) within {RESERVE_S:g} s, by which the run "
            "learns which devices they are. What Ray's workers wait for is in its logs on the nodes (session_latest/logs)."
        ) from error
