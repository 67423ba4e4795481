"""What a collector spends on a token: receiving, parsing, samples, and packing, against stub servers. No model runs.

    python -m bench.collector

Each collector is a process that asks a stub server (bench/support/stub_server.py) for responses of 8,192 tokens, so many in
flight, through the client and the sampler of the product, and deals every so many samples to blocks. Counted are CPU
seconds of the collector's own process, user and system: with few cores its neighbours take turns with it, and the clock
would show theirs. Every sample's tokens, log-probs and versions are checked against what the stub sent.

Then whole steps of 16,384 samples, long and short ones, through collectors in Ray actors (bench/support/collected_step.py): the
most memory that a collector holds, and the seconds of the clock from its last answer until all its blocks can be
fetched. Exit code 0 only where every collector is within all targets.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.stub_server import PROMPT_TOKENS, VARIANTS, VERSION, answer, stub_server
from megarl.core.types import FloatArray, Prompt, Sample, Status, VersionSpan
from megarl.data.pack import pack_samples
from megarl.rollout.asking import Request
from megarl.rollout.attempt import Attempt
from megarl.rollout.single_turn import to_sample
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling

TARGET = 2e6  # tokens a CPU second
MICRO_BATCH_TOKENS = 32768
# What a collector may hold beside the samples of one part: answers in flight in their bytes and lists, and what it imports.
MOST_BYTES = 3 * 2**30
# Of a whole step: beside its samples and their texts, and from the last answer until its blocks can be fetched.
BESIDE_BYTES = 512 * 2**20
MOST_READY_S = 1.0
SHORT_TOKENS = 256


@dataclass(frozen=True)
class Spent:
    """One collector. tokens: response tokens. peak_bytes: its largest resident size."""

    tokens: int
    cpu_s: float
    pack_cpu_s: float
    seconds: float
    peak_bytes: int

    @property
    def rate(self) -> float:
        """Tokens a CPU second."""
        return self.tokens / self.cpu_s


async def collect(
    client: ServerClient, prompt: Prompt, first: int, count: int, tokens: int, in_flight: int
) -> list[Sample]:
    """So many samples, as a collector makes them."""
    room = asyncio.Semaphore(in_flight)
    sampling = Sampling(tokens)

    async def one(index: int) -> Sample:
        async with room:
            attempt = Attempt(prompt, sampling, 0, "train", 1, index)
            answer = await Request(prompt.token_ids, sampling).go_on(client, lambda _: "", deadline_s=600.0)
            assert answer is not None, "the stub cut a request off"
            return to_sample(attempt, answer)

    return list(await asyncio.gather(*(one(first + index) for index in range(count))))


def check(samples: list[Sample], sent: dict[int, dict[str, Any]], tokens: int) -> None:
    """That each sample is what the stub sent, and not another's."""
    for sample in samples:
        assert sample.status is Status.COMPLETED, sample.metadata
        expected = sent[int(sample.response_ids[0])]
        assert np.array_equal(sample.response_ids, expected["output_ids"])
        assert np.array_equal(sample.rollout_logprobs, logprobs_of(expected))
        assert sample.versions == (VersionSpan(VERSION, 0, tokens),)


def sent_by_stub(tokens: int) -> dict[int, dict[str, Any]]:
    """The stub's answers, by their first token."""
    bodies = (orjson.loads(answer(tokens, seed)) for seed in range(VARIANTS))
    return {body["output_ids"][0]: body for body in bodies}


def logprobs_of(body: dict[str, Any]) -> FloatArray:
    """[R]."""
    return np.array([row[0] for row in body["meta_info"]["output_token_logprobs"]], np.float32)


async def run(url: str, samples: int, tokens: int, in_flight: int, part: int) -> Spent:
    """Collect, check and pack part by part; checking is not counted."""
    prompt = Prompt("p:0", np.arange(PROMPT_TOKENS, dtype=np.int32), "", "")
    sent = sent_by_stub(tokens)
    cpu_s = pack_cpu_s = seconds = 0.0
    async with ServerClient(ServerEndpoint("stub", url, "bench")) as client:
        await collect(client, prompt, 0, in_flight, tokens, in_flight)  # connections and caches
        for first in range(0, samples, part):
            began, before = time.monotonic(), time.process_time()
            got = await collect(client, prompt, first, min(part, samples - first), tokens, in_flight)
            before_pack = time.process_time()
            pack_samples(
                got,
                num_shards=2,
                mini_batch_samples=len(got),
                micro_batch_tokens=MICRO_BATCH_TOKENS,
                reduction="token-mean",
                max_response_tokens=tokens,
            )
            cpu_s += time.process_time() - before
            pack_cpu_s += time.process_time() - before_pack
            seconds += time.monotonic() - began
            check(got, sent, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Spent(samples * tokens, cpu_s, pack_cpu_s, seconds, peak)


def collector(url: str, samples: int, tokens: int, in_flight: int, part: int) -> Spent:
    """The body of a collector's process."""
    return asyncio.run(run(url, samples, tokens, in_flight, part))


def measure(collectors: int, samples: int, tokens: int, in_flight: int, part: int) -> list[Spent]:
    """So many collectors side by side, each with a stub server of its own; they share the samples."""
    share = samples // collectors
    with ExitStack() as stack:
        urls = [stack.enter_context(stub_server(tokens)) for _ in range(collectors)]
        pool = stack.enter_context(ProcessPoolExecutor(collectors, mp_context=get_context("spawn")))
        return list(pool.map(collector, urls, *zip(*[(share, tokens, in_flight, part)] * collectors, strict=True)))


def show(results: dict[int, list[Spent]]) -> None:
    """The table."""
    table = Table(title="A collector's CPU, from a server's answer to blocks")
    columns = ("collectors", "tokens", "M tokens / CPU s of each", "of it packing", "M tokens/s of all", "peak GiB")
    for column in columns:
        table.add_column(column, justify="right")
    for count, spent in results.items():
        cpu_s = sum(one.cpu_s for one in spent)
        tokens = sum(one.tokens for one in spent)
        table.add_row(
            str(count),
            f"{tokens / 1e6:.1f} M",
            ", ".join(f"{one.rate / 1e6:.2f}" for one in spent),
            f"{sum(one.pack_cpu_s for one in spent) / cpu_s:.0%}",
            f"{tokens / max(one.seconds for one in spent) / 1e6:.2f}",
            f"{max(one.peak_bytes for one in spent) / 2**30:.2f}",
        )
    Console().print(table)


def steps(collectors: int, samples: int, tokens: int, in_flight: int) -> list[list[dict[str, float]]]:
    """Whole steps, which so many collectors share: [collector][step]."""
    # Not where processes of the first measurement would import Ray as well.
    from bench.support.collected_step import Size, measure_steps

    bodies = sent_by_stub(tokens)
    sent = {first: (np.array(body["output_ids"]), logprobs_of(body)) for first, body in bodies.items()}
    return measure_steps(collectors, Size(samples // collectors, tokens, in_flight), sent)


def within(made: list[dict[str, float]]) -> bool:
    """Whether a collector held no more than its samples and what it may hold beside, and was ready in time at the end."""
    last = made[-1]
    bound = last["sample_bytes"] + last["text_bytes"] + BESIDE_BYTES
    return last["peak_bytes"] <= bound and last["ready_s"] <= MOST_READY_S


def show_steps(found: dict[str, list[list[dict[str, float]]]]) -> None:
    """The table of whole steps."""
    table = Table(title="A whole step: what a collector holds, and from its last answer to blocks that can be fetched")
    columns = ("step", "M tokens", "bytes a token", "with texts", "most held", "GiB", "planned s", "ready s", "first")
    for column in columns:
        table.add_column(column, justify="right")
    for name, each in found.items():
        for made in each:
            step, num = made[-1], made[-1]["num_tokens"]
            table.add_row(
                name,
                f"{num / 1e6:.1f}",
                f"{step['sample_bytes'] / num:.2f}",
                f"{(step['sample_bytes'] + step['text_bytes']) / num:.2f}",
                f"{step['peak_bytes'] / num:.2f}",
                f"{step['peak_bytes'] / 2**30:.2f}",
                f"{step['plan_s']:.2f}",
                f"{step['ready_s']:.2f}",
                f"{made[0]['ready_s']:.2f}",
            )
    Console().print(table)


def main(
    *,
    samples: Annotated[int, typer.Option(min=2, help="Responses of all collectors together.")] = 2048,
    step_samples: Annotated[int, typer.Option(min=16, help="Responses of a whole step.")] = 16384,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 8192,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests in flight of each collector.")] = 64,
    part: Annotated[int, typer.Option(min=1, help="Samples that are packed together, and then let go.")] = 256,
    quick: Annotated[bool, typer.Option(help="A few short responses: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure what a collector spends on a token."""
    if quick:
        samples, step_samples, tokens, in_flight, part = 8, 16, 32, 2, 3
    counts = (1,) if quick else (1, 2)
    results = {count: measure(count, samples, tokens, in_flight, part) for count in counts}
    show(results)
    lengths = (tokens,) if quick else (tokens, SHORT_TOKENS)
    whole = {
        f"{count} x {step_samples // count:,} of {length:,} tokens": steps(count, step_samples, length, in_flight)
        for length in lengths
        for count in counts
    }
    show_steps(whole)
    collectors = {str(count): [asdict(one) | {"rate": one.rate} for one in spent] for count, spent in results.items()}
    sizes = {"samples": samples, "response_tokens": tokens, "in_flight": in_flight, "part": part}
    bounds = {"beside_bytes": BESIDE_BYTES, "ready_s": MOST_READY_S}
    write("collector", {"collectors": collectors, **sizes, "steps": whole, "bounds": bounds}, out)
    everyone = [one for spent in results.values() for one in spent]
    if any(one.peak_bytes > MOST_BYTES or (one.rate < TARGET and not quick) for one in everyone):
        sys.exit(1)
    if not quick and not all(within(made) for each in whole.values() for made in each):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
