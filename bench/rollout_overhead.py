"""What generation through megarl costs, against a bare client on the same SGLang server. The trainer is stubbed.

    python -m bench.rollout_overhead

Both sides ask the same server for the same prompts with the same sampling and the same number of requests in flight.
The bare client posts to the server and reads the answers. megarl's side is a step of the coordinator and of one collector,
both in this process: through the router, with grading in another process, filters, journal, and packing into shards. Calls
alternate; tokens a second of the whole call; the ratio is the median over pairs of neighbouring calls, so that a machine that
slows down meanwhile does not favour a side, and comes with a bootstrap interval. Greedy outputs of both are checked to be
equal. Exit code 0 only where the whole interval is at or above 0.95: a machine that is busy with something else proves nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from megarl.core.platform import get_platform
from megarl.core.types import Prompt
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import PromptSet, load_prompts
from megarl.models.hf_config import load_model_config
from megarl.recipe.schema import Recipe
from megarl.rewards.combine import Graders
from megarl.rollout.collector import Collector
from megarl.rollout.coordinator import Coordinator
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import start_all
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

TARGET = 0.95
KEY = "bench"
VERSION = 1  # of the server's weights
START_S = 300.0


@dataclass(frozen=True)
class Measured:
    """One call. tokens: response tokens."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def make_recipe(folder: Path, data: Path, *, prompts: int, samples: int, tokens: int, steps: int) -> Recipe:
    """As a run on this machine would be."""
    return Recipe.model_validate(
        {
            "run": {"dir": folder, "name": "bench"},
            "model": {"path": folder / "model", "dtype": "float32"},
            "data": {"train": data, "max_prompt_tokens": 64, "shuffle": False},
            "rollout": {
                "prompts_per_step": prompts,
                "samples_per_prompt": samples,
                "max_response_tokens": tokens,
                "kv_tokens": 65536,
            },
            "train": {"steps": steps},
        }
    )


async def bare(server: ServerEndpoint, prompts: tuple[Prompt, ...], recipe: Recipe) -> Measured:
    """A minimal client: as many requests in flight as the recipe allows, answers read and counted."""
    sampling = {"max_new_tokens": recipe.rollout.max_response_tokens, "temperature": recipe.rollout.temperature}
    room = asyncio.Semaphore(recipe.rollout.most_in_flight)
    headers = {"Authorization": f"Bearer {server.api_key}"}
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: Prompt) -> int:
            body = {"input_ids": prompt.token_ids.tolist(), "sampling_params": sampling, "return_logprob": True}
            async with room, session.post(f"{server.url}/generate", json=body) as answer:
                return len((await answer.json())["output_ids"])

        count = recipe.rollout.samples_per_prompt
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts for _ in range(count)))
    return Measured(sum(counts), time.monotonic() - began)


async def through_megarl(coordinator: Coordinator, collector: Collector, step: int) -> Measured:
    """One step's samples, graded and packed."""
    began = time.monotonic()
    await coordinator.release(VERSION)
    plan = await coordinator.next(step, VERSION)
    await collector.part(plan.parts[0])
    seconds = time.monotonic() - began
    assert plan.info.metrics["rollout/failed"] == 0, plan.info.metrics
    return Measured(plan.info.response_tokens, seconds)


async def greedy_equal(server: ServerEndpoint, router: ServerEndpoint, prompts: tuple[Prompt, ...], tokens: int) -> int:
    """How many of the prompts are answered alike, token for token, directly and through the router."""
    sampling = Sampling(tokens, temperature=0.0)
    async with ServerClient(server) as direct, ServerClient(router) as routed:
        mine = await asyncio.gather(*(direct.generate(prompt.token_ids, sampling) for prompt in prompts))
        theirs = await asyncio.gather(*(routed.generate(prompt.token_ids, sampling) for prompt in prompts))
    return sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(mine, theirs, strict=True))


async def measure(
    server: ServerEndpoint, router: ServerEndpoint, recipe: Recipe, prompts: PromptSet, repeats: int
) -> dict[str, Any]:
    """Interleave both sides; the first call of each warms up and is not counted."""
    chosen = prompts.prompts
    equal = await greedy_equal(server, router, chosen, recipe.rollout.max_response_tokens)
    tokenizer = load_tokenizer(recipe.model.path)
    collector = Collector(
        recipe,
        prompts=prompts,
        eval_prompts=(),
        client=ServerClient(router),
        graders=Graders.open(recipe.reward),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )
    model, data = load_model_config(recipe.model.path), await collector.start()
    coordinator = Coordinator(recipe, [collector], data, model=model, num_shards=1, beside=False)
    sides: dict[str, list[Measured]] = {"bare": [], "megarl": []}
    async with ServerClient(server) as control:
        await control.set_weight_version(VERSION)
        for repeat in range(repeats + 1):
            # Who goes first alternates: a machine that warms up or slows down must favour neither.
            for side in ("bare", "megarl") if repeat % 2 else ("megarl", "bare"):
                await control.flush_cache()
                measured = await (
                    bare(server, chosen, recipe)
                    if side == "bare"
                    else through_megarl(coordinator, collector, repeat + 1)
                )
                if repeat:
                    sides[side].append(measured)
    await coordinator.close()
    await collector.close()
    rates = {side: [one.rate for one in measured] for side, measured in sides.items()}
    pairs = [mine / theirs for mine, theirs in zip(rates["megarl"], rates["bare"], strict=True)]
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "median_tokens_per_s": medians,
        "ratio": statistics.median(pairs),
        "ratio_interval": interval(pairs),
        "ratio_of_medians": medians["megarl"] / medians["bare"],
        "pairs": pairs,
        "greedy_equal": equal,
        "greedy_prompts": len(chosen),
        "calls": {side: [asdict(one) for one in measured] for side, measured in sides.items()},
    }


def interval(values: list[float], draws: int = 10_000) -> tuple[float, float]:
    """95% bootstrap interval of the median: what the machine's noise leaves open."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (draws, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def verdict(result: dict[str, Any]) -> str:
    """What the interval allows to be said of the target."""
    low, high = result["ratio_interval"]
    if low >= TARGET:
        return "reached"
    return "missed" if high < TARGET else "undecided: too noisy, measure on a quiet machine"


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title="Generation through megarl against a bare client, same SGLang server")
    for column in ("side", "median tokens/s", "lowest", "highest", "calls"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side, calls in result["calls"].items():
        rates = [call["tokens"] / call["seconds"] for call in calls]
        median = result["median_tokens_per_s"][side]
        table.add_row(side, f"{median:,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", str(len(rates)))
    table.add_section()
    low, high = result["ratio_interval"]
    table.add_row("ratio, median of pairs", f"{result['ratio']:.3f}", f"{low:.3f}", f"{high:.3f}", "95% interval")
    table.add_row("ratio of the medians", f"{result['ratio_of_medians']:.3f}", "", "", "")
    table.add_row("equal greedy answers", f"{result['greedy_equal']} of {result['greedy_prompts']}", "", "", "")
    console = Console()
    console.print(table)
    loads = " and ".join(f"{load:.1f}" for load in result["load_average"])
    console.print(
        f"Target {TARGET}: {verdict(result)}. Load average before and after: {loads} on {os.cpu_count()} cores."
    )


def main(
    *,
    repeats: Annotated[int, typer.Option(min=3, help="Counted calls of each side.")] = 15,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in one call.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model, 256 wide.")] = 4,
) -> None:
    """Measure what generation through megarl costs against a bare client."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="megarl-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model", layers=layers)
        make_arithmetic(folder / "data")
        train = folder / "data" / "train.jsonl"
        recipe = make_recipe(folder, train, prompts=prompts, samples=samples, tokens=tokens, steps=repeats + 1)
        everything = load_prompts(recipe.data.train, load_tokenizer(recipe.model.path), recipe.data)
        chosen = PromptSet(everything.prompts[:prompts], everything.num_dropped)
        place = ProcessPlace(folder / "logs", KEY, temp=folder)
        spec = ServerSpec(recipe.model.path, "float32", kv_tokens=recipe.rollout.kv_tokens)
        server = ServerProcess("server 0", spec, get_platform(), place)
        router = RouterProcess(RouterSpec(), place)
        try:
            start_all([router, server], START_S)
            router.add(server.endpoint)
            result = asyncio.run(measure(server.endpoint, router.endpoint, recipe, chosen, repeats))
        finally:
            router.stop()
            server.stop()
    result |= {"load_average": [load_before, os.getloadavg()[0]], "cores": os.cpu_count()}
    result |= {"prompts": prompts, "samples": samples, "max_tokens": tokens, "layers": layers}
    write("rollout_overhead", result, None)
    show(result)
    if verdict(result) != "reached" or result["greedy_equal"] < result["greedy_prompts"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
