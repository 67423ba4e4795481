"""What `rollout.deterministic` costs, and what it gives: the same samples whatever else a server does meanwhile.

    python -m bench.deterministic

One server as it is by default and one in deterministic mode are sent the same seeded requests in turns, each time in
another order and with another number in flight. Exits with 1 where the deterministic server did not always answer the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import ratios, summary, write
from megarl.core.platform import get_platform
from megarl.core.types import TokenArray
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import load_prompts
from megarl.recipe.schema import Data
from megarl.rollout.seeds import request_seed
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient
from megarl.serving.process import process_tree, start_all
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

SIDES = {"default": False, "deterministic": True}
START_S = 300.0
BYTES_A_TOKEN = 12  # of an answer: the token and its log-prob

Request = tuple[TokenArray, Sampling]
Answers = dict[int, bytes]


async def answer_all(client: ServerClient, requests: Sequence[Request], order: Sequence[int], limit: int) -> Answers:
    """What each request is answered, bit for bit: sent in this order, with so many in flight."""
    room = asyncio.Semaphore(limit)

    async def one(number: int) -> tuple[int, Generation]:
        async with room:
            return number, await client.generate(*requests[number])

    answers = await asyncio.gather(*(one(number) for number in order))
    return {number: answer.token_ids.tobytes() + answer.logprobs.tobytes() for number, answer in answers}


def cpu_seconds(server: ServerProcess) -> float:
    """Of the server and all of its processes: what other work on the machine does not change."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in process_tree(server.pid)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


async def measure(servers: dict[str, ServerProcess], requests: Sequence[Request], repeats: int) -> dict[str, Any]:
    """Seconds, tokens and equal answers of each side; the first turn warms up and counts for the answers alone."""
    seconds: dict[str, list[float]] = {side: [] for side in servers}
    rates: dict[str, list[float]] = {side: [] for side in servers}
    cpu: dict[str, list[float]] = {side: [] for side in servers}
    seen: dict[str, list[Answers]] = {side: [] for side in servers}
    for turn in range(repeats + 1):
        order = list(range(len(requests)))
        random.Random(turn).shuffle(order)
        # From the third turn on with fewer in flight: other batches. Those with most in flight are timed.
        limit = len(order) if turn % 3 < 2 else 7
        for side, server in servers.items():
            async with ServerClient(server.endpoint) as client:
                await client.flush_cache()
                began, worked = time.perf_counter(), cpu_seconds(server)
                answers = await answer_all(client, requests, order, limit)
                took = time.perf_counter() - began
            seen[side].append(answers)
            if turn and limit == len(order):
                tokens = sum(len(answer) for answer in answers.values()) / BYTES_A_TOKEN
                seconds[side].append(took)
                rates[side].append(tokens / took)
                cpu[side].append(1e3 * (cpu_seconds(server) - worked) / tokens)
    equal = {
        side: sum(len({answers[number] for answers in turns}) == 1 for number in range(len(requests)))
        for side, turns in seen.items()
    }
    return {
        "tokens_per_s": {side: summary(each) for side, each in rates.items()},
        "slower": summary(ratios(seconds, "deterministic", "default")),
        "cpu_ms_per_token": {side: summary(each) for side, each in cpu.items()},
        "more_cpu": summary(ratios(cpu, "deterministic", "default")),
        "equal_samples": equal,
        "samples": len(requests),
        "turns": repeats + 1,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title="SGLang on this machine, by default and in deterministic mode")
    for column in ("server", "tokens/s", "lowest", "highest", "CPU ms/token", "samples that were always the same"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for side, rates in result["tokens_per_s"].items():
        numbers = (f"{rates[name]:,.0f}" for name in ("median", "lowest", "highest"))
        table.add_row(
            side,
            *numbers,
            f"{result['cpu_ms_per_token'][side]['median']:.2f}",
            f"{result['equal_samples'][side]} of {result['samples']}",
        )
    console = Console()
    console.print(table)
    for what, ratio in (("as long", result["slower"]), ("as much CPU", result["more_cpu"])):
        console.print(
            f"The same samples take {ratio['median']:.2f} times {what} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})."
        )
    console.print(f"Load average {os.getloadavg()[0]:.1f}.")


def main(
    *,
    repeats: Annotated[int, typer.Option(min=2, help="Turns of each server after the first.")] = 9,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Its width.")] = 256,
    out: Annotated[Path | None, typer.Option(help="Folder of the result.")] = None,
) -> None:
    """Measure deterministic generation against the default."""
    with tempfile.TemporaryDirectory(prefix="megarl-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model", layers=layers, hidden_size=width)
        make_arithmetic(folder / "data")
        data = Data.model_validate({"train": folder / "data" / "train.jsonl", "max_prompt_tokens": 64})
        rows = load_prompts(data.train, load_tokenizer(folder / "model"), data).prompts[:prompts]
        sampling = Sampling(tokens, alone=True)
        requests = [
            (prompt.token_ids, replace(sampling, seed=request_seed(1, "train", 1, prompt.id, index)))
            for prompt in rows
            for index in range(samples)
        ]
        place = ProcessPlace(folder / "logs", "bench", temp=folder)
        spec = ServerSpec(
            folder / "model",
            "float32",
            max_running_requests=128,
            kv_tokens=len(requests) * (64 + tokens),
        )
        servers = {
            side: ServerProcess(side, replace(spec, deterministic=deterministic), get_platform(), place)
            for side, deterministic in SIDES.items()
        }
        try:
            start_all(list(servers.values()), START_S)
            result = asyncio.run(measure(servers, requests, repeats))
        finally:
            for server in servers.values():
                server.stop()
    result |= {
        "prompts": prompts,
        "samples_per_prompt": samples,
        "max_tokens": tokens,
        "layers": layers,
        "width": width,
    }
    write("deterministic", result, out)
    show(result)
    if result["equal_samples"]["deterministic"] < result["samples"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
