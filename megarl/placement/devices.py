"""What devices can do: the makers' published figures, and what software really gets out of them.

`Device` is what a data sheet says. `Rates` is what is reached of it, and the fixed costs that no data sheet knows; a
cluster file replaces either by what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

GIB = 2**30
GB = 1e9


@dataclass(frozen=True)
class Device:
    """One kind of device. Bytes, bytes a second, floating-point operations a second (dense, not sparse).

    flops: in bfloat16 with float32 sums; fp32_flops: in float32. memory_bytes_s: of the device's own memory.
    inside_bytes_s: to its peers in the node, one direction. between_bytes_s: to other nodes, one direction, where the
    cluster file does not say. host_bytes_s: to the host's memory, one direction. per_node: devices of the usual node.
    rests_on_host: what rests can leave the device. source: where the figures are published.
    """

    name: str
    memory_bytes: float
    flops: float
    fp32_flops: float
    memory_bytes_s: float
    inside_bytes_s: float
    between_bytes_s: float
    host_bytes_s: float
    per_node: int
    source: str
    rests_on_host: bool = True

    def peak_flops(self, dtype: str) -> float:
        """Peak of one device in that dtype, operations a second."""
        return self.fp32_flops if dtype == "float32" else self.flops


@dataclass(frozen=True)
class Rates:
    """What software gets out of a device.

    Shares of a peak: matmul (large dense ones), experts (large grouped ones), attention (its core in training),
    prefill, memory (reads in decode), links (inside a node), network (between nodes), host (copies to and from it).
    Where a share is reached by half: half_tokens (tokens of a micro-batch on one rank), half_expert_tokens (tokens of
    one expert). Seconds at any size: layer_s (one layer's forward pass), expert_layer_s (the same with experts),
    decode_layer_s and decode_expert_layer_s (one layer of one decode step), decode_sequence_s (in it one sequence,
    where attention takes them one by one), decode_s (the rest of a decode step), hop_s (one hop of a collective),
    update_s (one optimizer step), wake_s (a server going to sleep and coming back), barrier_s (one stage of a step:
    dispatch, packing, metrics), request_s (one sample's way through router, client and grader). micro_s (one micro-
    batch's forward pass beside its layers), sequence_s (one sequence in one layer, where attention takes packed ones
    one by one), cut_sequence_s (the same under context parallel), call_s (one pass or update of a role), sync_s (one
    weight sync). copy_bytes_s: weights from the ranks into servers on the same devices. at_once: devices of a node
    that work at full speed at the same time, and servers_at_once likewise servers' devices: processes that stand for
    devices share cores. reserved_bytes: context, communicators. server_bytes: what a server holds beside weights and
    KV cache; resting_bytes: of it while it sleeps. fragmentation: share of the memory that the allocator cannot use.

    The defaults are of H100 with Megatron, fitted to published measurements (docs/placement.md says which and how well);
    other GPUs are assumed to reach the same shares, where RATES says nothing else.
    """

    matmul: float = 0.42
    experts: float = 0.145
    attention: float = 0.45
    prefill: float = 0.5
    memory: float = 0.7
    links: float = 0.7
    network: float = 0.7
    host: float = 0.6
    half_tokens: float = 320.0
    half_expert_tokens: float = 550.0
    layer_s: float = 0.34e-3
    expert_layer_s: float = 1.5e-3
    decode_layer_s: float = 77e-6
    decode_expert_layer_s: float = 350e-6
    decode_s: float = 0.9e-3
    hop_s: float = 12e-6
    update_s: float = 0.064
    wake_s: float = 3.0
    barrier_s: float = 1.0
    request_s: float = 0.0
    micro_s: float = 0.0
    sequence_s: float = 0.0
    decode_sequence_s: float = 0.0
    cut_sequence_s: float = 0.0
    call_s: float = 0.0
    sync_s: float = 0.0
    at_once: float = math.inf
    servers_at_once: float = math.inf
    copy_bytes_s: float = 4 * GB
    reserved_bytes: float = 2.0 * GIB
    server_bytes: float = 3.0 * GIB
    resting_bytes: float = 0.6 * GIB
    fragmentation: float = 0.04


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="A100-80",
                memory_bytes=80 * GIB,
                flops=312e12,
                fp32_flops=19.5e12,
                memory_bytes_s=2039 * GB,
                inside_bytes_s=300 * GB,
                between_bytes_s=25 * GB,
                host_bytes_s=32 * GB,
                per_node=8,
                source="NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB); HDR InfiniBand, 200 Gbit/s a device",
            ),
            Device(
                name="H100",
                memory_bytes=80 * GIB,
                flops=989e12,
                fp32_flops=67e12,
                memory_bytes_s=3350 * GB,
                inside_bytes_s=450 * GB,
                between_bytes_s=50 * GB,
                host_bytes_s=64 * GB,
                per_node=8,
                source="NVIDIA H100 Tensor Core GPU data sheet (SXM); NDR InfiniBand, 400 Gbit/s a device",
            ),
            Device(
                name="H200",
                memory_bytes=141 * GB,
                flops=989e12,
                fp32_flops=67e12,
                memory_bytes_s=4800 * GB,
                inside_bytes_s=450 * GB,
                between_bytes_s=50 * GB,
                host_bytes_s=64 * GB,
                per_node=8,
                source="NVIDIA H200 Tensor Core GPU data sheet (SXM); NDR InfiniBand, 400 Gbit/s a device",
            ),
            Device(
                name="B200",
                memory_bytes=180 * GB,
                flops=2250e12,
                fp32_flops=75e12,
                memory_bytes_s=8000 * GB,
                inside_bytes_s=900 * GB,
                between_bytes_s=50 * GB,
                host_bytes_s=64 * GB,
                per_node=8,
                source="NVIDIA DGX B200 data sheet (an eighth of the system); NDR InfiniBand, 400 Gbit/s a device",
            ),
            Device(
                name="L40S",
                memory_bytes=48 * GB,
                flops=362e12,
                fp32_flops=91.6e12,
                memory_bytes_s=864 * GB,
                inside_bytes_s=32 * GB,
                between_bytes_s=25 * GB,
                host_bytes_s=32 * GB,
                per_node=8,
                source="NVIDIA L40S data sheet (no NVLink: PCIe Gen4 x16); 200 Gbit/s a device",
            ),
            Device(
                name="cpu",
                memory_bytes=6 * GIB,
                flops=150e9,
                fp32_flops=100e9,
                memory_bytes_s=40 * GB,
                inside_bytes_s=1 * GB,
                between_bytes_s=0.1 * GB,
                host_bytes_s=5 * GB,
                per_node=2,
                source="one core of a desktop processor as a device, measured with this project; measure your own",
                rests_on_host=False,
            ),
        )
    }
)

_CPU_RATES = Rates(
    matmul=0.65,
    experts=0.4,
    attention=0.5,
    prefill=0.8,
    memory=0.8,
    links=1.0,
    network=0.6,
    host=0.6,
    half_tokens=14.0,
    half_expert_tokens=20.0,
    layer_s=1e-3,
    expert_layer_s=1.5e-3,
    decode_layer_s=0.4e-3,
    decode_expert_layer_s=2e-3,
    decode_s=2e-3,
    hop_s=2e-3,
    update_s=0.006,
    wake_s=0.05,
    barrier_s=0.01,
    request_s=1e-3,
    micro_s=0.1e-3,
    sequence_s=0.1e-3,
    cut_sequence_s=0.2e-3,
    decode_sequence_s=40e-6,
    call_s=2e-3,
    sync_s=0.04,
    copy_bytes_s=0.3 * GB,
    reserved_bytes=1.0 * GIB,
    server_bytes=1.5 * GIB,
    resting_bytes=1.5 * GIB,
    fragmentation=0.02,
)
# Megatron's whole training steps reach 51% to 56% of an A100's peak with models of 175B to 1T (arXiv 2205.05198, table 5), so
# that large products alone reach no less: beside its memory, an A100's tensor cores are slower than an H100's.
_A100_RATES = replace(Rates(), matmul=0.55)

RATES: Mapping[str, Rates] = MappingProxyType(
    {name: Rates() for name in DEVICES}
    # Without NVLink, ranks synchronise through PCIe.
    | {"A100-80": _A100_RATES, "L40S": replace(Rates(), hop_s=25e-6), "cpu": _CPU_RATES}
)
