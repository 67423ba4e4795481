"""How many servers a run on a CPU starts where its recipe leaves that open, and with how many threads each computes."""

from __future__ import annotations

import math

import psutil

from megarl.core.platform import get_platform
from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.placement.sizes import kv_bytes
from megarl.placement.workload import read_model
from megarl.recipe.load import Loaded
from megarl.recipe.sampling_rules import overlaps
from megarl.recipe.schema import Recipe
from megarl.run.begin import say

# Seen on two cores with the model, prompts and lengths of bench/peers_trl, rounded down; START_S by `python -m bench.start`.
LAYER_PASS_S = 0.003  # of a layer of a small model, to decode a token of each of some thirty requests
SAVED = 0.2  # of that, by a second server: what a server does between products is work for one core
START_S = 6.0  # that one more server takes of a core to start
MOST = 4  # more were never tried
FEWEST_REQUESTS = 32  # of a step, for a server: few end soon, and then all but one server waits
PROCESS_BYTES = 2 * 2**30
# FLOPs of a layer in one step of decoding, for each thread: with less, waiting for one another takes longer than it saves, and
# one core is left to the server's other processes. Seen on two cores: 2e8 ran faster with one thread, 4e8 with two.
THREAD_FLOPS = 2e8


def servers_for(recipe: Recipe, model: ModelConfig, cores: int, memory_bytes: int) -> int:
    """One server a core, where that saves more than their start takes and all fit half of the memory; else one.

    memory_bytes: the machine's.
    """
    rollout = recipe.rollout
    requests = rollout.prompts_per_step * rollout.samples_per_prompt
    count = min(cores, MOST, requests // FEWEST_REQUESTS, memory_bytes // 2 // _server_bytes(recipe, model))
    decode_s = recipe.train.steps * rollout.max_response_tokens * model.num_layers * LAYER_PASS_S
    return count if count > 1 and decode_s * SAVED > START_S * (count - 1) else 1


def server_threads(recipe: Recipe, model: ModelConfig, most: int) -> int:
    """Threads of each server, up to `most`: as many as one step of all requests that it may have at once keeps busy."""
    rollout, one = recipe.rollout, forward_flops(model, [1])
    requests = math.ceil(rollout.prompts_per_step * rollout.samples_per_prompt / rollout.num_servers)
    layer = (one.projections + one.mlp) / model.num_layers / rollout.tp
    return min(most, math.ceil(layer * min(requests, rollout.max_running_requests) / THREAD_FLOPS))


def _server_bytes(recipe: Recipe, model: ModelConfig) -> int:
    """What a server takes: its processes, weights and the cache, both with the copies that a CPU computes with."""
    weights = sum(file.stat().st_size for file in recipe.model.path.glob("*.safetensors"))
    token = int(kv_bytes(model, 1, 4))
    return PROCESS_BYTES + 2 * weights + 2 * (recipe.rollout.kv_tokens or 0) * token


def share_cores(loaded: Loaded[Recipe]) -> Loaded[Recipe]:
    """The recipe with its number of servers, where nobody gave one and servers and ranks take turns on this machine's cores."""
    recipe = loaded.recipe
    given = "rollout.servers" in loaded.sources or recipe.placement.name is not None or bool(recipe.placement.pools)
    cores = get_platform(recipe.cluster.platform).threads(1)  # None where cores are not what computes
    if given or cores is None or recipe.rollout.tp > 1 or overlaps(recipe):
        return loaded
    count = servers_for(recipe, read_model(recipe.model.path), cores, psutil.virtual_memory().total)
    if count == 1:
        return loaded
    say(f"rollout.servers: {count} (not given; this machine has {cores} cores, and each server keeps one busy)")
    rollout = recipe.rollout.model_copy(update={"servers": count})
    return loaded.with_recipe(recipe.model_copy(update={"rollout": rollout}))
