"""The inventory that a placement is searched for: nodes, devices, memory and links, read from a cluster file.

    nodes: 4
    device: H100             # a row of the table in devices.py
    between_gbit_s: 400      # network of one device, one direction; default: the table's
    measured: {matmul: 0.55} # what `megarl profile` measured replaces the table's figures

or, where nodes are of several kinds, each with the same keys:

    nodes:
      - {device: H100, count: 4}
      - {device: H20, count: 8}

Raises UserError for what is wrong with a file, all at once, with lines.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from megarl.core.errors import UserError
from megarl.placement.devices import DEVICES, GIB, Device
from megarl.placement.rates import RATES, SHARES, Rates
from megarl.recipe.explain import explain
from megarl.recipe.section import PositiveFloat, PositiveInt, Section
from megarl.recipe.source import Keys, Tree, read_tree

# Up to this many nodes every number of them may become a pool; above it, those that many layouts divide.
EVERY_NODE_COUNT = 16
_SMOOTH = (2, 3, 5)
# More than any cluster has: what is searched through grows with the nodes.
MOST_DEVICES = 2**20
# Where a run does not fit, as many are looked at for the fewest that hold it.
MOST_NODES = 4096


@dataclass(frozen=True)
class Cluster:
    """Nodes of like devices, and beside them those of other kinds.

    device, rates: what one device is and what is reached of it. others: each without others of its own. All that costs are
    computed from is of the first kind alone: a pool of devices lies within one kind, and is priced by that kind. host_bytes:
    memory of one node's host; None where nobody said.
    """

    nodes: int
    devices_per_node: int
    device: Device
    rates: Rates
    others: tuple[Cluster, ...] = ()
    host_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.num_devices > MOST_DEVICES:
            raise UserError(
                f"{self.nodes} nodes of {self.devices_per_node} are {self.num_devices} devices, and a plan is made for at most "
                f"{MOST_DEVICES}. Name fewer nodes, or fewer devices of each."
            )

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """Every kind of nodes as a cluster of its own."""
        return (replace(self, others=()), *self.others)

    @property
    def num_devices(self) -> int:
        """Devices of this kind."""
        return self.nodes * self.devices_per_node

    @property
    def most_nodes(self) -> int:
        """How many nodes are looked at for a run that fewer do not hold."""
        return min(MOST_NODES, MOST_DEVICES // self.devices_per_node)

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that roles can share: without context, communicators and what fragments."""
        return self.device.memory_bytes * (1 - self.rates.fragmentation) - self.rates.reserved_bytes

    @property
    def all_devices(self) -> int:
        """Devices of all kinds."""
        return sum(kind.num_devices for kind in self.kinds)

    def of_nodes(self, nodes: int) -> Cluster:
        """The same kind of cluster with so many nodes."""
        return replace(self, nodes=nodes)

    def pool_sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a pool may have: they match node boundaries, and any set of them that fits packs.

        Powers of two that divide a node; then whole nodes: every number of them up to EVERY_NODE_COUNT, beyond that
        numbers without a prime factor above 5, and always the whole cluster.
        """
        node = self.devices_per_node
        small = [size for size in (2**power for power in range(node.bit_length())) if size < node and node % size == 0]
        counts = {*range(1, min(self.nodes, EVERY_NODE_COUNT) + 1), *_smooth_to(self.nodes)}
        return tuple(sorted({*small, *(count * node for count in counts), self.num_devices}))

    def describe(self) -> str:
        """`4 nodes of 8 H100 = 32 devices`, and so on for each kind."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.devices_per_node}"
        own = f"{nodes} {self.device.name} = {self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        return " and ".join([own, *(other.describe() for other in self.others)])


def one_kind(cluster: Cluster) -> Cluster:
    """The cluster, where all of its nodes are alike. Raises UserError where they are not, for what is made for one kind."""
    if cluster.others:
        raise UserError(
            f"The cluster has nodes of several kinds: {cluster.describe()}. Here all nodes have to be alike: name one kind, by "
            "--device and --nodes or in a file of its own."
        )
    return cluster


def make_cluster(device: str, nodes: int, devices_per_node: int | None = None) -> Cluster:
    """A cluster of devices of the table, by its figures. Raises UserError for a device that is not in it."""
    if device not in DEVICES:
        near = difflib.get_close_matches(device, DEVICES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"device {device!r} is not in the table of devices: {', '.join(DEVICES)}.{hint} For another one, name the "
            "row that is most like it and put its own figures under `measured`."
        )
    found = DEVICES[device]
    return Cluster(nodes, devices_per_node or found.per_node, found, RATES[device])


def _measured_section() -> type[Section]:
    """A section with every figure of Device and Rates that a measurement may replace, all optional."""
    fields: dict[str, Any] = {}
    for kind in (Device, Rates):
        for field in dataclasses.fields(kind):
            if field.type == "float":
                allowed = _Share if field.name in SHARES else PositiveFloat
                fields[field.name] = (allowed | None, Field(None, description="replaces the table's figure"))
    return create_model("Measured", __base__=Section, __doc__="Figures that were measured.", **fields)


# A figure of Device that a file may say in another unit: that key, the figure, and what one of it is.
_UNITS = (
    ("memory_gib", "memory_bytes", GIB),
    ("inside_gbyte_s", "inside_bytes_s", 1e9),
    ("between_gbit_s", "between_bytes_s", 1e9 / 8),
)
_Share = Annotated[float, Field(gt=0, le=1)]
_Measured: Any = _measured_section()


class Nodes(Section):
    """What a cluster file may say of nodes that are alike."""

    device: str = Field(description="a row of the table of devices")
    devices_per_node: PositiveInt | None = Field(None, description="devices of one node; default: the table's")
    memory_gib: PositiveFloat | None = Field(None, description="memory of one device; default: the table's")
    host_memory_gib: PositiveFloat | None = Field(None, description="memory of one node's host; default: not checked")
    inside_gbyte_s: PositiveFloat | None = Field(None, description="between devices of a node, one direction")
    between_gbit_s: PositiveFloat | None = Field(None, description="network of one device, one direction")
    measured: Annotated[_Measured, Field(description="figures of this machine, under the names of the table")] = (
        _Measured()
    )


class ClusterFile(Nodes):
    """A cluster file where all nodes are alike."""

    nodes: PositiveInt = Field(1, description="number of nodes; or a list of kinds of nodes")


class Kind(Nodes):
    """One kind of nodes of several."""

    count: PositiveInt = Field(1, description="number of nodes")


class MixedFile(Section):
    """A cluster file with several kinds of nodes."""

    nodes: tuple[Kind, ...] = Field(strict=False, description="kinds of nodes")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file. Raises UserError: missing, not YAML, unknown keys, impossible figures."""
    if not path.is_file():
        raise UserError(
            f"There is no cluster file at {path}. Write one of two lines, `nodes: 2` and `device: H100` (devices: "
            f"{', '.join(DEVICES)}), or name a device with --device and --nodes."
        )
    tree = read_tree(path)
    schema: type[Section] = MixedFile if isinstance(tree.values.get("nodes"), list) else ClusterFile
    try:
        file: Any = schema.model_validate(tree.values)
    except ValidationError as error:
        problems = explain(error.errors(), tree, schema, "A cluster file")
        raise UserError(f"The cluster file {path} cannot be used." + "".join(f"\n  - {p}" for p in problems)) from None
    if isinstance(file, ClusterFile):
        return _cluster_of(file, file.nodes, tree, (), path)
    if not file.nodes:
        raise UserError(
            f"{tree.origin(('nodes',))}: the list of nodes is empty. Name a kind: - {{device: H100, count: 4}}."
        )
    kinds = [_cluster_of(kind, kind.count, tree, ("nodes", str(index)), path) for index, kind in enumerate(file.nodes)]
    if len({kind.of_nodes(1) for kind in kinds}) < len(kinds):
        raise UserError(
            f"{tree.origin(('nodes',))}: two kinds of nodes are alike. Write them as one, with the sum as count."
        )
    return replace(kinds[0], others=tuple(kinds[1:]))


def _cluster_of(kind: Nodes, nodes: int, tree: Tree, keys: Keys, path: Path) -> Cluster:
    """One kind of nodes. keys: where in the file it stands. Raises UserError: no such device, impossible figures."""
    try:
        cluster = make_cluster(kind.device, nodes, kind.devices_per_node)
    except UserError as error:
        raise UserError(f"{tree.origin((*keys, 'device'))}: {error}") from None
    given = {name: value for name, value in kind.measured.model_dump().items() if value is not None}
    for key, name, unit in _UNITS:
        if (value := getattr(kind, key)) is None:
            continue
        if name in given:
            raise UserError(
                f"{tree.origin((*keys, key))}: {key} and measured.{name} say the same thing, {value * unit:.4g} and "
                f"{given[name]:.4g}. Remove one of them."
            )
        given[name] = value * unit
    if kind.host_memory_gib is not None and not cluster.device.offloads_to_host:
        raise UserError(
            f"{tree.origin((*keys, 'host_memory_gib'))}: devices of kind {cluster.device.name} are processes, whose memory is "
            "the host's: a plan counts that by memory_gib, of each. Remove host_memory_gib."
        )
    cluster = replace(
        cluster,
        device=_replaced(cluster.device, given),
        rates=_replaced(cluster.rates, given),
        host_bytes=None if kind.host_memory_gib is None else kind.host_memory_gib * GIB,
    )
    device = cluster.device
    if device.matmul_flops > device.flops:
        raise UserError(
            f"{tree.origin((*keys, 'measured'))}: large products of {device.name} cannot reach {device.matmul_flops:.4g} "
            f"operations a second (measured.matmul_flops) where its peak is {device.flops:.4g} (measured.flops). Correct "
            "one of them."
        )
    if cluster.usable_bytes <= 0:
        raise UserError(
            f"{path}: a device of {device.memory_bytes / GIB:.1f} GiB holds nothing beside the "
            f"{cluster.rates.reserved_bytes / GIB:.1f} GiB of context and communicators. Raise memory_gib, or lower "
            "measured.reserved_bytes if that was measured."
        )
    return cluster


def _replaced(thing: Any, given: dict[str, float]) -> Any:
    names = {field.name for field in dataclasses.fields(thing)}
    return replace(thing, **{name: value for name, value in given.items() if name in names})


def _smooth_to(most: int) -> list[int]:
    """Every number from 1 to this whose prime factors are all among _SMOOTH."""
    found = [1]
    for factor in _SMOOTH:
        for number in found:  # those that this adds come by in turn
            if number * factor <= most:
                found.append(number * factor)
    return found
