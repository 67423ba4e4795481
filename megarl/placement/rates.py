"""What software gets out of a device: shares of what it could do, and fixed costs that no data sheet knows.

One set for all GPUs: what differs between them follows from what they can do, and from what a model asks of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megarl.placement.devices import DEVICES, GB, GIB, WITHOUT_NVLINK


@dataclass(frozen=True)
class Rates:
    """What software gets out of a device.

    Shares: matmul (of Device.product_flops, by a training model's products), serving (the same by a server's), attention (of
    the same, by its core's forward pass), memory (of the device's bandwidth), links (inside a node), reduce_links (inside a
    node, by a server's all-reduces, which are small), network (between nodes), host (copies to and from it). traffic: bytes
    that norms, activations and the like move, for each byte that they read and write at least.

    Seconds at any size: layer_s (launching one layer's forward pass), expert_layer_s (the same with experts, whose counts the
    host waits for), decode_layer_s and decode_expert_layer_s (one layer of one decode step), decode_sequence_s (in it one
    sequence, where attention takes them one by one), decode_s (the rest of a decode step), decode_request_s (in it the host's
    work on one running request), reduce_s (one all-reduce of a server), hop_s (one hop of any other collective), update_s (one
    optimizer step), wake_s (a server going to sleep and coming back), barrier_s (one stage of a step: packing, metrics),
    request_s (one sample's way through router, client and grader). micro_s (one micro-batch's forward pass beside its layers),
    sequence_s (one sequence in one layer, where attention takes packed ones one by one), cut_sequence_s (the same under context
    parallel), call_s (one pass or update of a role), call_sample_s (the dispatch of one sample in it, to the ranks and back),
    sync_s (one weight sync), load_tensor_s (in it one HF tensor, which an engine loads after another). copy_bytes_s: weights from
    the ranks into servers on the same devices, where they take longer than their copies. disk_bytes_s: what one node writes
    into a folder of weight versions, or reads from it: a guess, no data sheet of a device knows it. at_once: devices of a node
    that work at full speed at the same time, and servers_at_once likewise servers' devices: processes that stand for devices
    share cores. reserved_bytes: context, communicators. server_bytes: what a server of one rank holds on its device beside
    weights and KV cache; started_bytes: of it before it looks how much is free, of which its share is weights and cache;
    offloaded_bytes: of it while it sleeps; server_rank_bytes: more of all three for each further rank.
    fragmentation: share of the memory that the allocator cannot use. host_rank_bytes,
    host_server_bytes: what a rank, and a server's part on one device, hold in the host's memory beside what a run has there:
    guesses, no run on a GPU was measured.

    reserved_bytes are half a GiB of context, 0.1 of workspaces (32 MiB each: cuBLAS' of two threads, Transformer Engine's) and
    1.1 of four communicators of 288 MiB (the rings of placement/communicators.py): all ranks, data parallel, tensor parallel,
    and the gradient's norm.

    matmul: AMD's typical attained FLOPs are 0.74 to 0.81 of the most that is achievable (ROCm blog, "Typical Attained FLOPs").
    attention: FlashAttention-3 on H100, causal, 2,048 tokens. memory: copies and triads on H100 reach 0.9 of the data sheet.
    reduce_s, reduce_links: custom all-reduces of 0.5 KiB to 1 MiB on 2, 4 and 8 H100 (SGLang, pull request 2904). traffic,
    update_s, call_sample_s, decode_layer_s and decode_request_s are fitted to runs of one model on H100, expert_layer_s to half
    of the runs of another (bench/plan_published.py). decode_expert_layer_s lies between what two sources speak for: 0.6 ms
    (verl's runs there, as slow as without graphs) and 0.1 ms (NeMo-RL's). load_tensor_s: slime's colocated sync of Qwen3-30B-A3B
    on 8 H200 takes 3.0 s, 2.5 s of them in the engine's load of 18,867 tensors. offloaded_bytes and server_rank_bytes: SGLang
    gives back weights and KV cache alone, and keeps what it reserves itself (0.5.21, arg_groups/memory_hook.py): 0.5 GiB for
    attention's metadata, 0.5 for decode graphs of up to 256 sequences, 0.45 for 58 graphs of prompts, an eighth for each rank's
    communicators; and 0.15 for logits in float32 (graph_shared_output.py), as much as a prompt's 8,192 tokens take in one layer
    in the graphs' pool (0.1 to 0.6), and 0.5 for the context.
    """

    matmul: float = 0.78
    attention: float = 0.7
    serving: float = 0.78
    memory: float = 0.85
    links: float = 0.75
    reduce_links: float = 0.13
    network: float = 0.7
    host: float = 0.6
    traffic: float = 2.8
    layer_s: float = 0.3e-3
    expert_layer_s: float = 1.6e-3
    decode_layer_s: float = 19e-6
    decode_expert_layer_s: float = 350e-6
    decode_s: float = 1e-3
    decode_request_s: float = 37e-6
    reduce_s: float = 5e-6
    hop_s: float = 5e-6
    update_s: float = 0.09
    wake_s: float = 3.0
    barrier_s: float = 1.0
    request_s: float = 0.0
    micro_s: float = 0.0
    sequence_s: float = 0.0
    decode_sequence_s: float = 0.0
    cut_sequence_s: float = 0.0
    call_s: float = 0.0
    call_sample_s: float = 1.6e-3
    sync_s: float = 0.0
    load_tensor_s: float = 0.13e-3
    at_once: float = math.inf
    servers_at_once: float = math.inf
    copy_bytes_s: float = math.inf
    disk_bytes_s: float = 1.0 * GB
    reserved_bytes: float = 2.0 * GIB
    server_bytes: float = 3.0 * GIB
    started_bytes: float = 0.5 * GIB
    offloaded_bytes: float = 2.75 * GIB
    server_rank_bytes: float = GIB / 8
    fragmentation: float = 0.04
    host_rank_bytes: float = 4.0 * GIB
    host_server_bytes: float = 6.0 * GIB


# Rates that are shares of something: none is above 1.
SHARES = ("matmul", "attention", "serving", "memory", "links", "reduce_links", "network", "host", "fragmentation")

_CPU_RATES = Rates(
    matmul=0.7,
    attention=0.5,
    serving=0.65,
    memory=0.8,
    links=1.0,
    reduce_links=1.0,
    network=0.6,
    host=0.6,
    traffic=1.0,
    layer_s=0.8e-3,
    expert_layer_s=1.5e-3,
    decode_layer_s=0.36e-3,
    decode_expert_layer_s=2e-3,
    decode_s=2e-3,
    decode_request_s=0.0,
    reduce_s=4e-3,
    hop_s=2e-3,
    update_s=0.005,
    wake_s=0.05,
    barrier_s=0.01,
    request_s=1e-3,
    micro_s=1e-3,
    sequence_s=0.1e-3,
    cut_sequence_s=0.2e-3,
    decode_sequence_s=40e-6,
    call_s=2e-3,
    call_sample_s=0.0,
    sync_s=0.04,
    load_tensor_s=0.0,
    copy_bytes_s=0.3 * GB,
    reserved_bytes=1.0 * GIB,
    server_bytes=1.5 * GIB,
    started_bytes=1.5 * GIB,
    offloaded_bytes=1.5 * GIB,
    server_rank_bytes=0.0,
    fragmentation=0.02,
)

RATES: Mapping[str, Rates] = MappingProxyType(
    {name: Rates() for name in DEVICES}
    | {name: replace(Rates(), hop_s=25e-6, reduce_s=25e-6) for name in WITHOUT_NVLINK}
    | {"cpu": _CPU_RATES}
)
