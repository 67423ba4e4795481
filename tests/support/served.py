"""A real SGLang server with its router, and an independent reference for its numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.core.platform import Platform
from megarl.core.types import FloatArray
from megarl.serving.client import ServerClient
from megarl.serving.process import start_all
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.support.olmo import unscale_local_layers
from tests.support.tiny import write_tiny_qwen

KEY = "key-of-the-tests-servers"
START_S = 300.0
TRIES = 5
CONTEXT = 2048  # all of the tiny model's
NEEDS = ("SGLang",)
# Of servers on devices: several share one, and the heads of tiny models are too narrow for the other kernels.
ON_DEVICES = ("--mem-fraction-static", "0.15", "--attention-backend", "triton")

Made = TypeVar("Made")


class HfModel:
    """The same weights under transformers, in float32 on one thread."""

    def __init__(self, folder: Path) -> None:
        self.model = unscale_local_layers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> FloatArray:
        """Log-probs of tokens 1.. given those before: [L - 1]."""
        labels = torch.tensor(list(token_ids[1:]))
        chosen = self.distributions(token_ids, temperature).gather(1, labels[:, None])
        found: FloatArray = chosen[:, 0].numpy().astype(np.float32)
        return found

    def distributions(self, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Log-probs of all tokens in the places of tokens 1.. : [L - 1, V]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([list(token_ids)])).logits[0, :-1] / temperature
        return torch.log_softmax(logits, -1)

    def perturb(self, seed: int) -> None:
        """Move every weight a little, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)

    def buckets(self, count: int = 3) -> Iterator[list[tuple[str, Tensor]]]:
        """All weights under HF names, in so many buckets."""
        items = list(self.model.state_dict().items())
        size = -(-len(items) // count)
        for start in range(0, len(items), size):
            yield items[start : start + size]


@dataclass(frozen=True)
class Pool:
    """Running servers and their router."""

    servers: list[ServerProcess]
    router: RouterProcess
    model: Path
    place: ProcessPlace


@contextmanager
def serving(folder: Path, platform: Platform, num_servers: int = 1) -> Iterator[Pool]:
    """Start servers and a router side by side on a tiny model; stop them in the end."""
    model = write_tiny_qwen(folder / "model")
    place = ProcessPlace(folder / "logs", KEY)
    # Shows SGLang's settings in its log, where the key must not be.
    extra = ("--log-level", "info", *(ON_DEVICES if platform.has_device_memory else ()))
    spec = ServerSpec(model, "float32", kv_tokens=16384, context_length=CONTEXT, extra=extra)
    servers = [ServerProcess(f"server {index}", spec, platform, place) for index in range(num_servers)]
    router = RouterProcess(RouterSpec(), place)
    try:
        # Kernels are compiled at the first start on a device.
        start_all([router, *servers], START_S * (3 if platform.has_device_memory else 1))
        for server in servers:
            router.add(server.endpoint)
        yield Pool(servers, router, model, place)
    finally:
        for process in [router, *servers]:
            process.stop()


async def begun(server: ServerClient, generate: Callable[[], Coroutine[Any, Any, Made]]) -> asyncio.Task[Made]:
    """A request in the middle of its generation: it has 40 tokens and more, and has not ended."""
    for _ in range(TRIES):
        running = asyncio.create_task(generate())
        async with asyncio.timeout(START_S):
            while not running.done() and not await _num_running(server):
                pass
        await server.generate([7, 8], Sampling(40, 0.0))  # batched with it, which has as many tokens by then
        if not running.done():
            return running
    raise AssertionError(f"{TRIES} requests in a row had ended before another of 40 tokens")


async def _num_running(server: ServerClient) -> int:
    told = await server.ask("/v1/loads")
    return sum(each["num_running_reqs"] for each in told["loads"])
