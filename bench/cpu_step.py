"""Where the seconds of a step go on this machine, against what arithmetic and memory need: a roofline by part.

    python -m bench.cpu_step

The step is that of bench/peers_trl's second comparison: a random 12M model in float32 that ends responses by chance (mean 300
tokens, at most 768), 64 samples. As many servers as the run starts, of its own settings, are asked by a bare client: once for
one token of each sample, which is prefill, and once for whole responses. The lengths that come back are what HF generate is
held against, and what an engine of one rank is given: log-probs, then an update, timed by forward, backward and optimizer.
Last, a whole run with the recipe's defaults: what its step takes beyond the parts is the gap. A part's bound is the longest of
its multiplications at this machine's own matmul rate, and its bytes at the rate at which all cores read memory (weights once a
pass, keys and values once a token, what Adam reads and writes); processes use all cores. Seconds are for 1,000 response
tokens.
Exit code 0 only where no part is faster than its bound: else the bound was measured on a machine that was busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import aiohttp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.peers_trl import environment, recipe
from bench.support.measure import in_fresh_process, write
from bench.support.peers import Size, make_model, make_prompts
from bench.support.quickstart import ROOT, metrics
from bench.support.seconds import fastest
from megarl.core.platform import get_platform
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import load_prompts
from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops, train_flops
from megarl.models.hf_config import load_model_config
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.cores import share_cores
from megarl.run.server_spec import server_spec
from megarl.serving.client import ServerClient
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerProcess

KEY = "key-of-the-bench"
START_S = 300.0
PHASES = ("rollout", "logprobs", "update", "sync")
FLOAT = 4  # bytes
ADAM_BYTES = (
    9 * FLOAT
)  # of a parameter: the norm reads its gradient; Adam reads it, weight and moments, and writes three back; zeroing
QUICK = Size(hidden=64, layers=1, heads=4, kv_heads=2, mean=10, longest=24, prompts=2, samples=2, steps=1)


@dataclass(frozen=True)
class Rates:
    """flops_s: of the best of several products. bytes_s: read from memory, by all cores."""

    flops_s: float
    bytes_s: float


@dataclass(frozen=True)
class Need:
    """What a part of the step cannot do without."""

    flops: float
    num_bytes: float

    def seconds(self, rates: Rates) -> tuple[float, str]:
        """The longest of both, and which it is."""
        sides = {"arithmetic": self.flops / rates.flops_s, "memory": self.num_bytes / rates.bytes_s}
        bound = max(sides, key=lambda side: sides[side])
        return sides[bound], bound


def together(needs: Sequence[Need]) -> Need:
    """What several servers need, each of its own."""
    return Need(sum(need.flops for need in needs), sum(need.num_bytes for need in needs))


def measure_rates() -> Rates:
    """Of this machine, with the threads that the process has."""
    import torch

    products = []
    for width in (512, 1024, 2048):
        left, right = torch.randn(width, width), torch.randn(width, width)
        products.append(2 * width**3 / fastest(partial(torch.matmul, left, right), 8)[1])
    block = torch.zeros(64 * 2**20)  # far beyond the caches
    return Rates(max(products), block.nbytes / fastest(block.sum, 8)[1])


def weights(config: ModelConfig) -> int:
    """Parameters that each pass reads: all but the embedding, of which it looks up some rows."""
    return int(forward_flops(config, [1]).linear / 2)


def cache_bytes(config: ModelConfig) -> int:
    """Keys and values of one token."""
    return int(2 * FLOAT * config.num_layers * config.num_kv_heads * config.head_dim)


def decode_need(config: ModelConfig, prompts: Sequence[int], responses: Sequence[int]) -> Need:
    """All samples at once, a token each in every pass, until the longest ends. The first token is prefill's."""
    whole = forward_flops(config, [p + r - 1 for p, r in zip(prompts, responses, strict=True)])
    first = forward_flops(config, list(prompts))
    seen = sum(sum(range(p + 1, p + r)) for p, r in zip(prompts, responses, strict=True))  # tokens looked at
    passes = max(responses) - 1
    return Need(whole.total - first.total, passes * weights(config) * FLOAT + seen * cache_bytes(config))


def prefill_need(config: ModelConfig, prompts: Sequence[int]) -> Need:
    """Prompts that differ, each once: the others of a group find it in the cache."""
    return Need(forward_flops(config, list(prompts)).total, weights(config) * FLOAT)


def engine_needs(config: ModelConfig, lengths: Sequence[int], passes: int) -> dict[str, Need]:
    """Of the log-prob pass and the three parts of an update, in so many micro-batches."""
    forward, trained = forward_flops(config, list(lengths)).total, train_flops(config, list(lengths))
    count, read = weights(config), passes * weights(config) * FLOAT
    embedding = config.vocab_size * config.hidden_size
    return {
        "log-probs": Need(forward, read),
        "forward": Need(forward, read),
        "backward": Need(trained - forward, 3 * read),  # reads weights, reads and writes gradients
        "optimizer": Need(0.0, (count + embedding) * ADAM_BYTES),
    }


@contextmanager
def served(made: Recipe, folder: Path) -> Iterator[list[ServerProcess]]:
    """The run's own servers, with the threads that a run gives them."""
    platform, count = get_platform("cpu"), made.rollout.num_servers
    spec = server_spec(made, threads=platform.threads(count))
    place = ProcessPlace(folder / "logs", KEY, temp=folder)
    servers = [ServerProcess(f"server {index}", spec, platform, place) for index in range(count)]
    try:
        start_all(servers, START_S)
        yield servers
    finally:
        for server in servers:
            server.stop()


async def ask_all(
    servers: Sequence[ServerProcess], shares: Sequence[Sequence[list[int]]], longest: int
) -> tuple[float, list[list[int]]]:
    """Each server its share, at the same time: seconds of the slowest, and tokens of each response."""
    answers = await asyncio.gather(*(ask(*pair, longest) for pair in zip(servers, shares, strict=True)))
    return max(seconds for seconds, _ in answers), [lengths for _, lengths in answers]


async def ask(server: ServerProcess, prompts: Sequence[list[int]], longest: int) -> tuple[float, list[int]]:
    """All at once, by a client that only reads the answers: seconds, and tokens of each response."""
    sampling = {"max_new_tokens": longest, "temperature": 1.0}
    headers = {"Authorization": f"Bearer {server.endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(tokens: list[int]) -> int:
            body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
            async with session.post(f"{server.endpoint.url}/generate", json=body) as answer:
                answer.raise_for_status()
                return len((await answer.json())["output_ids"])

        async with ServerClient(server.endpoint) as control:
            await control.flush_cache(wait_s=5.0)
        began = time.perf_counter()
        lengths = list(await asyncio.gather(*map(one, prompts)))
        return time.perf_counter() - began, lengths


def hf_generate(model: Path, prompts: list[list[int]], longest: int) -> dict[str, float]:
    """transformers' own loop over the padded batch, with the threads of the process."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    widest, pad = max(map(len, prompts)), tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (widest - len(each)) + each for each in prompts])
    real = torch.tensor([[0] * (widest - len(each)) + [1] * len(each) for each in prompts])
    torch.manual_seed(0)
    began = time.perf_counter()
    with torch.no_grad():
        found = loaded.generate(
            tokens, attention_mask=real, do_sample=True, max_new_tokens=longest, top_k=0, pad_token_id=pad
        )
    seconds = time.perf_counter() - began
    ends = (found[:, widest:] == tokenizer.eos_token_id).int()
    counts = torch.where(ends.any(1), ends.argmax(1) + 1, found.shape[1] - widest)
    return {"tokens": int(counts.sum()), "seconds": seconds}


class Stopwatch:
    """When the engine's forward passes begin and end; what comes between the last and the optimizer is backward."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._part, self._since = "", 0.0

    def turn(self, part: str) -> None:
        """From now on it does this."""
        now = time.perf_counter()
        if self._part:
            self.spent[self._part] += now - self._since
        self._part, self._since = part, now


def run_engine(model: Path, lengths: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of log-probs and of an update's parts, the fastest of several; how many micro-batches there were."""
    from bench.support.training import one_rank, role, to_shard
    from megarl.training.engine import Engine
    from megarl.training.optimizer import Stepper
    from tests.training.samples import examples

    most = get_platform("cpu").micro_batch_tokens
    assert most is not None
    fewest = -(-sum(lengths) // most)
    passes = next(count for count in range(fewest, len(lengths) + 1) if len(lengths) % count == 0)  # as many in each
    made = examples(sorted(lengths), 256)
    shard, columns = to_shard([made[first::passes] for first in range(passes)])
    watch = Stopwatch()
    prepare, apply, step, zero = Engine._prepare, Engine._apply, Stepper.step, Stepper.zero_grad

    def timed(part: str, call: Any, after: str = "") -> Any:
        def run(*args: Any, **more: Any) -> Any:
            watch.turn(part)
            found = call(*args, **more)
            if after:
                watch.turn(after)
            return found

        return run

    with one_rank() as rank:
        rank.build("actor", role(model))
        _, logprobs_s = fastest(lambda: rank.logprobs("actor", shard), repeats)
        updates = []
        with (
            patch.object(Stepper, "zero_grad", timed("optimizer", zero)),
            patch.object(Engine, "_prepare", timed("forward", prepare)),
            patch.object(Engine, "_apply", timed("forward", apply, after="backward")),
            patch.object(Stepper, "step", timed("optimizer", step, after="")),
        ):
            for _ in range(repeats + 1):
                watch.spent = dict.fromkeys(watch.spent, 0.0)
                rank.update("actor", shard, columns)
                watch.turn("")
                updates.append(dict(watch.spent))
    best = min(updates[1:], key=lambda each: sum(each.values()))
    return {"passes": passes, "seconds": {"log-probs": logprobs_s, **best}}


def run_steps(folder: Path, size: Size) -> dict[str, float]:
    """The last step of a run with the recipe's defaults: seconds by phase, and its response tokens."""
    file = folder / "recipe.json"
    command = [sys.executable, "-m", "megarl", "train", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"megarl exited with {done.returncode}\n{done.stderr[-4000:]}")
    last = metrics(folder / "runs" / "float32")[-1]
    tokens = last["rollout/response_len_mean"] * size.prompts * size.samples
    return {
        "tokens": tokens,
        **{name: last.get(f"perf/{name}_s", 0.0) for name in ("step", *PHASES)},  # a step may need no log-prob pass
    }


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of parts and gaps, in seconds for 1,000 response tokens."""
    rows, rates = [], Rates(**found["rates"])
    for part, seconds in found["seconds"].items():
        bound, by = Need(**found["needs"][part]).seconds(rates)
        per = 1000 / found["tokens"]
        rows.append({"part": part, "s": seconds * per, "bound_s": bound * per, "of_bound": bound / seconds, "by": by})
    run, of = found["run"], {row["part"]: row["s"] for row in rows}
    per = 1000 / run["tokens"]
    gaps = {
        "gap: a run's rollout beyond its servers'": run["rollout"] * per - of["prefill"] - of["decode"],
        "gap: a run's log-probs beyond the engine's": (run["logprobs"] * per - of["log-probs"])
        if run["logprobs"]
        else 0.0,
        "gap: a run's update beyond the engine's": run["update"] * per
        - sum(of[part] for part in ("forward", "backward", "optimizer")),
        "gap: sync": run["sync"] * per,
        "gap: the rest of the step": (run["step"] - sum(run[name] for name in PHASES)) * per,
    }
    return rows + [{"part": name, "s": value} for name, value in gaps.items()]


def show(found: dict[str, Any]) -> None:
    """The table, and what others generate."""
    run = found["run"]
    whole = run["step"] / run["tokens"] * 1000
    shown = Table(title=f"A step on {found['cores']} cores: seconds for 1,000 response tokens; whole step {whole:.2f}")
    for column in ("part", "seconds", "bound", "share of bound", "bounded by", "share of step"):
        shown.add_column(column, justify="left" if column in ("part", "bounded by") else "right")
    for row in found["rows"]:
        bound = (f"{row['bound_s']:.3f}", f"{row['of_bound']:.0%}", row["by"]) if "by" in row else ("", "", "")
        shown.add_row(row["part"], f"{row['s']:.3f}", *bound, f"{row['s'] / whole:.1%}")
    rates = found["rates"]
    Console(width=130).print(
        shown,
        f"matmul {rates['flops_s'] / 1e9:.0f} GFLOP/s, memory {rates['bytes_s'] / 1e9:.1f} GB/s. Generation, tokens/s: "
        + ", ".join(f"{side} {value:,.0f}" for side, value in found["generation"].items()),
    )


def measure(folder: Path, size: Size, repeats: int) -> dict[str, Any]:
    """All of it, one after another."""
    cores = len(os.sched_getaffinity(0))
    rates = in_fresh_process(cores, measure_rates)
    make_model(folder / "model", size)
    train = make_prompts(folder / "data", size)
    file = folder / "recipe.json"  # JSON is YAML
    file.write_text(json.dumps(recipe(folder, size, "float32")))
    made = share_cores(load_recipe(file)).recipe
    config = load_model_config(made.model.path)
    chosen = load_prompts(train, load_tokenizer(made.model.path), made.data).prompts[: size.prompts]
    # Samples of a prompt are one server's, as in a run.
    parts = [chosen[first :: made.rollout.num_servers] for first in range(made.rollout.num_servers)]
    shares = [[prompt.token_ids.tolist() for prompt in part for _ in range(size.samples)] for part in parts]
    with served(made, folder) as servers:
        asyncio.run(ask_all(servers, [share[::-1] for share in shares], 2))  # warm
        prefill_s, _ = asyncio.run(ask_all(servers, shares, 1))
        whole_s, answered = asyncio.run(ask_all(servers, shares, size.longest))
    prompts, responses = list(chain(*shares)), list(chain(*answered))
    others = in_fresh_process(cores, hf_generate, made.model.path, prompts, size.longest)
    lengths = [len(prompt) + count for prompt, count in zip(prompts, responses, strict=True)]
    engine = in_fresh_process(cores, run_engine, made.model.path, lengths, repeats)
    run = run_steps(folder, size)
    needs = {
        "prefill": together([prefill_need(config, [len(prompt.token_ids) for prompt in part]) for part in parts]),
        "decode": together(
            [
                decode_need(config, [len(prompt) for prompt in share], lengths)
                for share, lengths in zip(shares, answered, strict=True)
            ]
        ),
        **engine_needs(config, lengths, engine["passes"]),
    }
    tokens = sum(responses)
    found: dict[str, Any] = {
        "size": asdict(size),
        "cores": cores,
        "servers": len(shares),
        "tokens": tokens,
        "rates": asdict(rates),
        "needs": {part: asdict(need) for part, need in needs.items()},
        "seconds": {"prefill": prefill_s, "decode": whole_s - prefill_s, **engine["seconds"]},
        "run": run,
        "generation": {
            "a run": run["tokens"] / run["rollout"],
            "bare servers": tokens / whole_s,
            "HF generate": others["tokens"] / others["seconds"],
        },
        "passes": {"decode": int(np.max(responses)) - 1, "engine": engine["passes"]},
    }
    return found | {"rows": table(found)}


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Counted calls of the engine; the fastest is shown.")] = 3,
    quick: Annotated[bool, typer.Option(help="A tiny model and few tokens: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure a step by part, and show it beside its bounds."""
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as name:  # Ray's sockets have long names
        found = measure(Path(name), QUICK if quick else Size(steps=2), repeats)
    show(found)
    write("cpu_step", found, out)
    if not quick and any(row.get("of_bound", 0.0) > 1.0 for row in found["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
