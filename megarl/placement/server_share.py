"""What a server's share of a device is: `--mem-fraction-static`, as SGLang 0.5.21 takes it, and as it chooses it.

A server looks how much is free once its context and its communicators are there. That share of it is weights, states, keys and
values (mem_cache/kv_cache_configurator.py); graphs, metadata and what a prompt's chunk takes come beside, out of the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.space import Servers

MIB = 2**20
# Of SGLang's own choice (arg_groups/memory_hook.py), all in MiB: by a device's memory, tokens of a prompt's chunk; for metadata;
# for each token of a chunk, each rank, each sequence of the largest graph of decode steps, each graph of prompts; for those of
# latent attention together; at least, on devices with more than 60 GiB.
CHUNKS = ((20 * 1024, 2048), (60 * 1024, 4096), (160 * 1024, 8192))
LARGEST_CHUNK, LATENT_CHUNK = 16384, 2048
METADATA, TOKEN, RANK, SEQUENCE, PROMPT_GRAPH, LATENT_GRAPHS = 512, 1.5, 128, 2, 8, 1536
LARGE, LEAST = 60 * 1024, 10 * 1024
# Lengths of prompts that graphs are captured for (arg_groups/cuda_graph_hook.py): first, last, from one to the next.
PROMPTS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, LARGEST_CHUNK, 512))

# Of models that see images, for which it captures no graphs of prompts but where attention is linear (configs/model_config.py):
# what its share is multiplied by, and how much less of that for each time that a tower is as large again as one 1024 wide, within
# these bounds.
SEEING, WIDTH, LESS, LESS_BOUNDS = 0.95, 1024, 0.1, (0.8, 1.05)


def further_bytes(choice: Servers, cluster: Cluster) -> Any:
    """[N] bytes that a server's rank holds more of, because it has others to talk to."""
    return (choice.tp - 1) * cluster.rates.server_rank_bytes


def beside_bytes(choice: Servers, cluster: Cluster) -> Any:
    """[N] bytes that a server's rank holds while awake beside its share."""
    return cluster.rates.server_bytes + further_bytes(choice, cluster)


def found_bytes(choice: Servers, cluster: Cluster) -> Any:
    """[N] bytes of a device that a server finds free when it starts, where nobody else is there yet."""
    rates = cluster.rates
    started = min(rates.started_bytes, rates.server_bytes) + further_bytes(choice, cluster)
    return cluster.device.memory_bytes - started


def share_bytes(choice: Servers, cluster: Cluster) -> Any:
    """[N] bytes of a server's weights, states, keys and values together, by its share."""
    return choice.share * found_bytes(choice, cluster)


def sharing(choice: Servers, cluster: Cluster, held: Any) -> Any:
    """[N] shares with which servers hold so many bytes in all."""
    return (held - beside_bytes(choice, cluster)) / found_bytes(choice, cluster)


def chosen_share(config: ModelConfig, tp: int, cluster: Cluster, max_running: int, most_tokens: int | None) -> float:
    """The share that a server takes which is told none. max_running: sequences of its largest graph of decode steps.

    most_tokens: that its cache is told to hold; None: nothing is said.
    """
    memory, latent = cluster.device.memory_bytes / MIB, config.mla is not None
    chunk = next((tokens for below, tokens in CHUNKS if memory < below), LARGEST_CHUNK)
    longest = min(LATENT_CHUNK if latent else chunk, most_tokens or LARGEST_CHUNK)
    graphs = sum(length <= longest for first, last, by in PROMPTS for length in range(first, last + 1, by))
    reserved = METADATA + TOKEN * chunk + RANK * tp + SEQUENCE * max_running
    if config.vision is None or config.linear_layers:
        reserved += LATENT_GRAPHS if latent else PROMPT_GRAPH * graphs
    if memory > LARGE:
        reserved = max(reserved, LEAST)
    share = float(np.round((memory - reserved) / memory, 3))
    if config.vision is None:
        return share
    wider = (config.vision.tower_width / WIDTH) ** 2 - 1
    return share * SEEING * float(np.clip(1 - LESS * wider, *LESS_BOUNDS))
