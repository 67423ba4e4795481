"""What an SGLang server gives back while it is offloaded, on this machine: memory before, while and after, and its answers.

    python -m bench.server_sleep

A random model of about 210 MB of float32 weights is served with a KV cache of about as much. Memory is that of all the
server's processes: of the device on cuda, resident on cpu. Exit code 0 only where the answers after are those before.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.support.measure import no_options, write
from megarl.core.platform import get_platform
from megarl.recipe.roles import ServerPart
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.support.tiny import write_tiny_model

MIB = 2**20
LAYERS, HIDDEN, KV_TOKENS = 4, 768, 16384
PARTS: tuple[ServerPart, ...] = ("kv_cache", "weights")
PROMPTS = [[7, 8, 9], [30, 31, 32, 33, 34], [11] * 9]


def held(server: ServerProcess) -> float:
    """MiB of all processes of a server."""
    root = psutil.Process(server.pid)
    tree = [root, *root.children(recursive=True)]
    if get_platform().name == "cpu":
        return sum(process.memory_info().rss for process in tree) / MIB
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


async def answers(client: ServerClient) -> list[tuple[list[int], list[float]]]:
    found = [await client.generate(prompt, Sampling(16, 0.0)) for prompt in PROMPTS]
    return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in found]


async def measure(server: ServerProcess) -> dict[str, Any]:
    async with ServerClient(server.endpoint) as client:
        first = await answers(client)
        memory = {"awake": held(server)}
        await client.sleep(PARTS)
        memory["offload"] = held(server)
        await client.wake(PARTS, serve=True)
        memory["awake again"] = held(server)
        same = await answers(client) == first
    return {"mib": memory, "freed_mib": memory["awake"] - memory["offload"], "same_answers": same}


def write_model(folder: Path) -> None:
    write_tiny_model(
        folder,
        "qwen3",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        head_dim=64,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64,
        vocab_size=8192,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        weights = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")) / MIB
        platform = get_platform()
        # No sync brings the weights here: a server that really gave them back keeps a copy on the host.
        extra = ("--enable-weights-cpu-backup",) if platform.has_device_memory else ()
        spec = ServerSpec(
            folder / "model", "float32", kv_tokens=KV_TOKENS, context_length=512, offloaded=True, extra=extra
        )
        server = ServerProcess("server", spec, platform, ProcessPlace(folder / "logs", "key-of-the-bench"))
        server.start()
        try:
            server.wait_ready(300.0)
            result = asyncio.run(measure(server))
        finally:
            server.stop()
    result |= {
        "weights_mib": weights,
        "cache_mib": 2 * KV_TOKENS * LAYERS * HIDDEN * 4 / MIB,
        "platform": platform.name,
    }
    table = Table(title=f"A server of {weights:.0f} MiB of weights, {result['cache_mib']:.0f} MiB of cache")
    for name in result["mib"]:
        table.add_column(f"{name}, MiB", justify="right")
    table.add_row(*(f"{value:.0f}" for value in result["mib"].values()))
    Console().print(table, f"freed {result['freed_mib']:.1f} MiB; same answers: {result['same_answers']}")
    write("server_sleep", result, None)
    sys.exit(0 if result["same_answers"] else 1)


if __name__ == "__main__":
    no_options(__doc__)
    main()
