"""Which device each process gets: ranks in the order of nodes and devices, servers where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.nodes import Node
from megarl.core.errors import DeadlineError
from megarl.core.platform import Platform

RESERVE_S = 60.0
FEW_CPUS = 0.01  # a process that waits for a device most of the time


@dataclass(frozen=True)
class Seat:
    """A process's place. devices: on its node, where Ray counts them. options: for its actor."""

    node: Node
    devices: tuple[int, ...]
    options: dict[str, Any] = field(hash=False)


def reserve(platform: Platform, nodes: Sequence[Node], count: int, size: int = 1) -> tuple[Seat, ...]:
    """Seats of `size` devices each, by node and device: neighbours share a node as far as they can.

    Raises DeadlineError where the devices are not free.
    """
    if not count:
        return ()
    resource = platform.ray_resource
    group = placement_group([{resource: float(size), "CPU": FEW_CPUS}] * count, strategy="PACK")
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise DeadlineError(
            f"{count} x {size} devices ({resource}) were not free within {RESERVE_S:g} s. Free now: "
            f"{ray.available_resources().get(resource, 0.0):g}."
        )
    places = {node.ray_id: index for index, node in enumerate(nodes)}
    table = placement_group_table(group)["bundles_to_node_id"]
    devices = _devices(platform, group, count)
    order = sorted(range(count), key=lambda bundle: (places[table[bundle]], devices[bundle], bundle))
    uses = {"num_gpus": float(size)} if resource == "GPU" else {"resources": {resource: float(size)}}
    return tuple(
        Seat(
            nodes[places[table[bundle]]],
            devices[bundle],
            {"num_cpus": FEW_CPUS, "scheduling_strategy": _bundle(group, bundle), **uses},
        )
        for bundle in order
    )


def beside(nodes: Sequence[Node], taken: Sequence[Seat], count: int) -> tuple[Seat, ...]:
    """Seats for processes that need no device of their own: dealt to the nodes without ranks, or to all."""
    busy = {seat.node for seat in taken}
    free = [node for node in nodes if node not in busy] or list(nodes)
    return tuple(seat_on(free[index % len(free)]) for index in range(count))


def seat_on(node: Node) -> Seat:
    """A seat on this node that takes no device."""
    strategy = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
    return Seat(node, (), {"num_cpus": 0, "scheduling_strategy": strategy})


def _bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _devices(platform: Platform, group: PlacementGroup, count: int) -> list[tuple[int, ...]]:
    """Each bundle's device numbers; Ray hands them out in any order. None where processes stand for devices."""
    if platform.ray_resource != "GPU":
        return [()] * count
    look = ray.remote(lambda: tuple(sorted(int(device) for device in ray.get_gpu_ids())))
    size = group.bundle_specs[0]["GPU"]
    return list(
        ray.get(
            [
                look.options(num_gpus=size, num_cpus=FEW_CPUS, scheduling_strategy=_bundle(group, bundle)).remote()
                for bundle in range(count)
            ],
            timeout=RESERVE_S,
        )
    )
