"""Seconds of a plan, and the bound below which no plan of these devices comes. Rates are those of placement/weight_sync.py.

A broadcast gathers, sends and loads; each of the three has two buckets, so that neighbouring buckets overlap. In shared
memory a bucket is put together on every device while the servers load the one before, out of the same memory. Over the disk
versions are whole: what changed between two of them is known only once they are there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.models.fp8_weights import quantised
from megarl.placement.cluster import Cluster
from megarl.placement.lengths import Floats
from megarl.placement.weight_sync import (
    assemble_s,
    between_bytes_s,
    engine_s,
    inside_bytes_s,
    load_s,
    quantise_s,
    read_s,
    send_bytes_s,
    write_s,
)
from megarl.sync.plan import Bucket, SyncPlan
from megarl.sync.senders import Tensor

SCALE_BYTES = 4  # of a block's scale, float32


@dataclass(frozen=True)
class Price:
    """Seconds of moving the bytes, from the first gather to the last load.

    bound_s: see `bound`. gather_s, send_s, load_s: what each would take alone; in shared memory nothing is sent.
    engine_s: what an engine takes beside, loading one tensor after another.
    """

    seconds: float
    bound_s: float
    gather_s: float
    send_s: float
    load_s: float
    engine_s: float

    @property
    def ratio(self) -> float:
        """Seconds over the bound."""
        return self.seconds / self.bound_s


@dataclass(frozen=True)
class Times:
    """When a bucket is put together, sent and loaded; seconds from the start."""

    gather_from: float
    gathered: float
    send_from: float
    sent: float
    load_from: float
    loaded: float


def price(plan: SyncPlan, cluster: Cluster, *, quantized: bool = False) -> Price:
    """Seconds of a plan on a cluster.

    quantized: senders quantise what they have put together (FP8), and send and write that.
    """
    times = timeline(plan, cluster, quantized=quantized)
    return Price(
        seconds=max(each.loaded for each in times),
        bound_s=bound(plan, cluster, quantized=quantized),
        gather_s=sum(each.gathered - each.gather_from for each in times),
        send_s=sum(each.sent - each.send_from for each in times),
        load_s=sum(each.loaded - each.load_from for each in times),
        engine_s=cluster.rates.sync_s + engine_s(cluster, plan.trainer.config),
    )


def timeline(plan: SyncPlan, cluster: Cluster, *, quantized: bool = False) -> list[Times]:
    """The times of each bucket, in the plan's order. Over the disk `sent` is written; servers load all at once."""
    if plan.transport == "shared_memory":
        assert not quantized, "rows do not quantise"
        return _shared(plan, cluster)
    wire = _Wire.of(plan, quantized=quantized)
    return (_disk if plan.transport == "disk" else _broadcast)(plan, wire, cluster)


@dataclass(frozen=True)
class _Wire:
    """What of each bucket is sent, in bytes; and seconds of making that, by bytes (before, after) that are quantised."""

    nbytes: tuple[int, ...]
    made: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: SyncPlan, *, quantized: bool) -> _Wire:
        scales = quantised(plan.trainer.config) if quantized else {}
        made = []
        for bucket in plan.buckets:
            found = [tensor for tensor in bucket.tensors if tensor.name in scales]
            after = sum(math.prod(tensor.shape) + SCALE_BYTES * math.prod(scales[tensor.name]) for tensor in found)
            made.append((sum(tensor.nbytes for tensor in found), after))
        sent = (bucket.nbytes - before + after for bucket, (before, after) in zip(plan.buckets, made, strict=True))
        return cls(tuple(sent), tuple(made))

    def gather_s(self, plan: SyncPlan, bucket: Bucket, cluster: Cluster) -> float:
        """Until the bucket is as it is sent."""
        assert bucket.sender is not None
        return _gather_s(plan, bucket, bucket.sender, cluster) + quantise_s(cluster, *self.made[bucket.number])


def _disk(plan: SyncPlan, wire: _Wire, cluster: Cluster) -> list[Times]:
    """A sender gathers its next bucket while it writes one; the senders of a node share what it writes a second.

    Once all is written every node reads the version, puts it together, and its servers load it.
    """
    nodes = plan.trainer.nodes
    writers = Counter(nodes[sender] for sender in plan.sent_bytes)
    latest = dict.fromkeys(plan.sent_bytes, (0.0, 0.0, 0.0))  # its last gather's end, its last write's begin, and end
    found = []
    for bucket in plan.buckets:
        assert bucket.sender is not None
        last_gathered, last_begun, last_written = latest[bucket.sender]
        begin = max(last_gathered, last_begun)
        gathered = begin + wire.gather_s(plan, bucket, cluster)
        send_from = max(gathered, last_written)
        sent = send_from + write_s(cluster, wire.nbytes[bucket.number] * writers[nodes[bucket.sender]])
        latest[bucket.sender] = gathered, send_from, sent
        found.append((begin, gathered, send_from, sent))
    there, whole = max(sent for *_, sent in found), sum(wire.nbytes)
    loads = max((float(load_s(cluster, whole, each.tp)) for each in plan.receivers), default=0.0)
    taken = (read_s(cluster, whole) if plan.receivers else 0.0) + loads
    return [
        Times(*times, there + taken * index / len(found), there + taken * (index + 1) / len(found))
        for index, times in enumerate(found)
    ]


def _broadcast(plan: SyncPlan, wire: _Wire, cluster: Cluster) -> list[Times]:
    """A rank has a bucket in flight (its own, or one that it helps with) and one that it gathers, no third."""
    routes = _Routes(plan)
    latest = dict.fromkeys(plan.sent_bytes, (0.0, 0.0))  # its last gather's end, its last send's begin
    times: list[Times] = []
    for bucket in plan.buckets:
        assert bucket.sender is not None
        begin = max(latest[bucket.sender])
        gathered = begin + wire.gather_s(plan, bucket, cluster)
        # Servers take one bucket at a time, and have a second to load from.
        before = times[-1].sent if times else 0.0
        freed = times[-2].loaded if len(times) > 1 else 0.0
        send_from = max(gathered, before, freed)
        nbytes = wire.nbytes[bucket.number]
        sent = send_from + routes.send_s(bucket.sender, nbytes, cluster)
        load_from = max(sent, times[-1].loaded if times else 0.0)
        loads = (float(load_s(cluster, nbytes, each.tp)) for each in plan.receivers)
        times.append(Times(begin, gathered, send_from, sent, load_from, load_from + max(loads, default=0.0)))
        latest[bucket.sender] = gathered, send_from
    return times


def _shared(plan: SyncPlan, cluster: Cluster) -> list[Times]:
    """All devices go from bucket to bucket together. While one is put together the one before is loaded, from the same memory."""
    flows = _flows(plan)
    nbytes = np.array([[bucket.nbytes] for bucket in plan.buckets], np.float64)
    links = np.maximum(
        (flows.near + flows.far) / inside_bytes_s(cluster), flows.far / (between_bytes_s(cluster) * flows.links)
    ).max(axis=1)
    memory = assemble_s(cluster, flows.own, flows.near + flows.far).max(axis=1)
    loads = load_s(cluster, nbytes, flows.tp).max(axis=1)
    now = load = 0.0
    times: list[Times] = []
    for link, assembled, next_load in zip(links, memory, loads, strict=True):
        done = now + float(max(link, assembled + load))
        if times:
            times[-1] = replace(times[-1], load_from=done - load, loaded=done)
        load = float(next_load)
        times.append(Times(now, done, done, done, done, done + load))
        now = done
    return times


@dataclass(frozen=True)
class _Flows:
    """[buckets, hosts] bytes that each host puts together: of its own memory, of ranks of its node, of other nodes.

    links: [hosts] devices of the node, which share what comes from other nodes and then pass it on. tp: [hosts] of the
    server beside it.
    """

    own: Floats
    near: Floats
    far: Floats
    links: Floats
    tp: Floats


def _flows(plan: SyncPlan) -> _Flows:
    nodes, hosts = plan.trainer.nodes, plan.hosts
    # Tensors with the same holders are one column for each part.
    columns: dict[tuple[int, int | None, int, int], tuple[int, Tensor]] = {}
    width = 0
    for tensor in (tensor for bucket in plan.buckets for tensor in bucket.tensors):
        if tensor.held not in columns:
            columns[tensor.held] = width, tensor
            width += len(tensor.parts)
    nbytes = np.zeros((len(plan.buckets), width))
    for row, bucket in zip(nbytes, plan.buckets, strict=True):
        for tensor in bucket.tensors:
            start, _ = columns[tensor.held]
            row[start : start + len(tensor.parts)] += tensor.parts
    givers = np.zeros((width, len(hosts)), np.int64)
    for start, tensor in columns.values():
        for index, host in enumerate(hosts):
            givers[start : start + len(tensor.parts), index] = plan.holders(tensor, host)
    own = givers == np.array(hosts)
    here = np.array(nodes)[givers] == np.array(nodes)[list(hosts)]
    sizes = {each.name: each.tp for each in plan.receivers}
    return _Flows(
        own=nbytes @ own,
        near=nbytes @ (here & ~own),
        far=nbytes @ ~here,
        links=np.array([len(plan.trainer.ranks_on(nodes[host])) for host in hosts], np.float64),
        tp=np.array([min(sizes[name] for name in plan.served(host)) for host in hosts], np.float64),
    )


def _gather_s(plan: SyncPlan, bucket: Bucket, sender: int, cluster: Cluster) -> float:
    """Seconds of a bucket's way into its sender's memory."""
    nodes, given = plan.trainer.nodes, plan.contributions(bucket, sender)
    own = given.pop(sender, 0)
    far = sum(nbytes for rank, nbytes in given.items() if nodes[rank] != nodes[sender])
    near = sum(given.values()) - far
    links = near / inside_bytes_s(cluster) + far / between_bytes_s(cluster)
    return max(links, float(assemble_s(cluster, own, near + far))) + (cluster.rates.hop_s if given else 0.0)


@dataclass
class _Routes:
    """How fast each sender's group is: it is the same for all of its buckets."""

    plan: SyncPlan
    _rates: dict[int, float] = field(default_factory=dict)

    def send_s(self, sender: int, nbytes: float, cluster: Cluster) -> float:
        if sender not in self._rates:
            home, here = self.plan.trainer.nodes[sender], receiving(self.plan)
            away = [devices for node, devices in here.items() if node != home]
            members = 1 + len(self.plan.helpers(sender))
            fewest = min(away, default=1)
            self._rates[sender] = send_bytes_s(cluster, members, fewest, across=bool(away))
        return nbytes / self._rates[sender] + cluster.rates.hop_s


def receiving(plan: SyncPlan) -> dict[int, int]:
    """Node -> devices there that receive: servers of one node are members of the same groups, and it receives once."""
    return Counter(node for receiver in plan.receivers for node in receiver.nodes)


def bound(plan: SyncPlan, cluster: Cluster, *, quantized: bool = False) -> float:
    """Seconds below which no order and no overlap comes, at the makers' figures: links and memories do nothing else.

    Broadcast: all bytes leave over the network of the ranks on senders' nodes, enter each node over that of its devices that
    receive, reach each device from its peers but for what it received itself, and are copied out of the bucket. Shared
    memory: what a device does not hold arrives from its peers, or over the node's network; its own is copied into the
    bucket, and its server's share out of it. Disk: the node that writes most writes, and a node of servers reads all of it once.
    """
    device = cluster.device
    if plan.transport == "shared_memory":
        return _bound_shared(plan, cluster)
    wire, nodes = _Wire.of(plan, quantized=quantized), plan.trainer.nodes
    nbytes = sum(wire.nbytes)
    if plan.transport == "disk":
        written: Counter[int] = Counter()
        for bucket in plan.buckets:
            assert bucket.sender is not None
            written[nodes[bucket.sender]] += wire.nbytes[bucket.number]
        reading = nbytes / cluster.rates.disk_bytes_s if plan.receivers else 0.0
        return write_s(cluster, max(written.values())) + reading
    links = len({rank for sender in plan.sent_bytes for rank in (sender, *plan.helpers(sender))})
    homes = {nodes[sender] for sender in plan.sent_bytes}
    found = [2 * nbytes / each.tp / device.memory_bytes_s for each in plan.receivers]
    for node, devices in receiving(plan).items():
        if node in homes:
            found.append(nbytes / (device.inside_bytes_s + device.between_bytes_s))
            continue
        found.append(nbytes / (device.between_bytes_s * devices))
        found.append(nbytes / (device.between_bytes_s * links))
        found.append(nbytes * (1 - 1 / devices) / device.inside_bytes_s)
    return max(found)


def _bound_shared(plan: SyncPlan, cluster: Cluster) -> float:
    device, flows = cluster.device, _flows(plan)
    own, near, far = flows.own.sum(axis=0), flows.near.sum(axis=0), flows.far.sum(axis=0)
    copied = 2 * own + near + far + 2 * plan.nbytes / flows.tp
    links, network = (near + far) / device.inside_bytes_s, far / (device.between_bytes_s * flows.links)
    return float(max(links.max(), network.max(), (copied / device.memory_bytes_s).max()))
