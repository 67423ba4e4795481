"""Times real SGLang servers behind the router: few and many requests, short and long answers, one server and two."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl.core.janitor import RUN_ID_VARIABLE, register_segments
from megarl.core.platform import Platform, visible_cuda_devices
from megarl.core.scratch import Scratch
from megarl.models.config import ModelConfig
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.profiling.job import Dtype
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import start_all
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec

PROMPT_TOKENS = 16
# Requests and tokens of an answer.
CASES = ((8, 32), (64, 32), (64, 8))
REPEATS = 3
MAX_RUNNING = 64
CACHE_TOKENS = 16384


@dataclass(frozen=True)
class Generated:
    """Median seconds until so many requests for so many tokens each were answered. servers: that shared them."""

    servers: int
    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Pool:
    """Servers that are up, and their router."""

    servers: tuple[ServerProcess, ...]
    router: RouterProcess

    @property
    def endpoints(self) -> tuple[ServerEndpoint, ...]:
        """Of the servers."""
        return tuple(server.endpoint for server in self.servers)

    def measure(self, vocab: int) -> list[Generated]:
        """All cases with one server behind the router, then with every one."""
        found = []
        for count, server in enumerate(self.servers, 1):
            self.router.add(server.endpoint)
            if count in (1, len(self.servers)):
                found += asyncio.run(_measure(self.router.endpoint, count, vocab))
        return found


def served_bytes(config: ModelConfig, bytes_each: int) -> float:
    """Of weights and KV cache of one of these servers."""
    cache = kv_bytes(config, np.array([1], np.int64), bytes_each)[0]
    return float(model_sizes(config).total * bytes_each + CACHE_TOKENS * cache)


@contextmanager
def serving(
    model: Path, dtype: Dtype, platform: Platform, count: int, folder: Path, deadline_s: float, scratch: Scratch
) -> Iterator[Pool]:
    """Servers of a model, and a router that knows none of them yet; all ended on leaving. folder: for logs.

    scratch: learns of their shared memory, which outlives them where this process is killed.

    Each has a device of its own, behind the rank's; the only one, where there is one.
    """
    env = {RUN_ID_VARIABLE: scratch.run_id}
    place = ProcessPlace(folder / "logs", secrets.token_hex(16), env=env, temp=folder)
    devices = visible_cuda_devices() if platform.has_device_memory else []
    shares = len(devices) == 1
    spec = ServerSpec(model, dtype, max_running_requests=MAX_RUNNING, kv_tokens=CACHE_TOKENS, shares_devices=shares)
    own = devices if shares else devices[1:]
    places = [replace(place, env=env | {"CUDA_VISIBLE_DEVICES": device}) for device in own] or [place] * count
    servers = tuple(ServerProcess(f"server {index}", spec, platform, places[index]) for index in range(count))
    router = RouterProcess(RouterSpec(), place)
    register_segments(scratch.registry, sorted({name for server in servers for name in server.shm_names()}))
    start_all([*servers, router], deadline_s)
    try:
        register_segments(scratch.registry, sorted({name for server in servers for name in server.shm_names()}))
        yield Pool(servers, router)
    finally:
        for process in (*servers, router):
            process.stop()


async def _measure(endpoint: ServerEndpoint, servers: int, vocab: int) -> list[Generated]:
    found = []
    async with ServerClient(endpoint) as client:
        for requests, tokens in CASES:
            # The first has connections to make.
            seconds = [await _ask(client, requests, tokens, vocab) for _ in range(1 + REPEATS)][1:]
            found.append(Generated(servers, requests, tokens, statistics.median(seconds)))
    return found


async def _ask(client: ServerClient, requests: int, tokens: int, vocab: int) -> float:
    # Prompts of their own: none is answered from the cache of another.
    prompts = [[random.randrange(vocab - 1) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    sampling = Sampling(tokens)
    began = time.perf_counter()
    await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))
    return time.perf_counter() - began
