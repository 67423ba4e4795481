"""Thousands of episodes at once against a stub server: how much of a bare asyncio client's rate remains. One command:

    python -m bench.agent_load

The stub is a process of its own; what is measured is the collector's side alone, on the event loop that Ray gives a collector.
Bare: requests of the same sizes by aiohttp and orjson, and nothing else. In process: an environment. Endpoint: a coroutine that
asks the OpenAI-compatible endpoint by aiohttp in the same process, so that both ends of that connection are in its time. The
stub answers at once, which shows what a turn costs, and after some seconds, as a server does that has tokens to sample, which
shows whether the episodes keep up with it. Added milliseconds: of a turn, one episode at a time at the stub that answers at
once, the median. Writes a table and bench/results/agent_load.json.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import orjson
import typer
from ray._private.async_compat import get_new_event_loop
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import call
from bench.support.stub_policy import TURN, serve_stub
from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.session import Budgets
from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.agents.episode import Episodes, EpisodeSettings
from megarl.agents.harness import Harnesses, HarnessSettings
from megarl.agents.harness_kinds import FunctionHarness
from megarl.agents.template import ChatTemplate
from megarl.core.platform import get_platform, peak_bytes
from megarl.core.types import Prompt, Status
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import MESSAGES_KEY
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt, Player
from megarl.rollout.gate import Gate
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling

TURNS = 8
ANSWERS_AFTER_S = (0.0, 2.0, 4.0)  # 100 and 200 tokens of a server that samples 50 a second for each request
ALONE = 200  # turns of one episode after the other, for latency
DEADLINE_S = 600.0
ASKED: list[Message] = [{"role": "user", "content": "Guess."}]
TOLD: Message = {"role": "user", "content": "higher"}

Play = Callable[[int], Awaitable[None]]


class Talk:
    """Goes on for so many turns."""

    async def start(self, row: EpisodeRow) -> list[Message]:
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        return Done(1.0) if response.turn + 1 == TURNS else Turn([TOLD])

    async def close(self) -> None:
        return None


def bare(url: str, session: aiohttp.ClientSession, prompt: list[int], between: list[int]) -> Play:
    """The requests alone."""

    async def play(index: int) -> None:
        context = list(prompt)
        for _ in range(TURNS):
            body = {"input_ids": context, "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}
            async with session.post(f"{url}/generate", data=orjson.dumps(body)) as answer:
                context += orjson.loads(await answer.read())["output_ids"] + between

    return play


def of_player(player: Player, asker: Asker) -> Play:
    """Episodes as a collector plays them."""
    row = Prompt("rows.jsonl:1", np.array([1], np.int32), "Guess.", "1", {MESSAGES_KEY: ASKED})

    async def play(index: int) -> None:
        sample = await player.play(Attempt(row, Sampling(10_000), 1, "train", 1, index), asker)
        assert sample.status is Status.COMPLETED, sample.metadata

    return play


def harness(sessions: list[aiohttp.ClientSession]) -> FunctionHarness:
    """Talks at the endpoint."""

    async def talk(base_url: str, key: str, row: EpisodeRow) -> float:
        messages, headers = list(row.messages), {"Authorization": f"Bearer {key}"}
        for _ in range(TURNS):
            body = orjson.dumps({"model": "policy", "messages": messages})
            async with sessions[0].post(f"{base_url}/chat/completions", data=body, headers=headers) as answer:
                said = orjson.loads(await answer.read())
            messages += [said["choices"][0]["message"], TOLD]
        return 1.0

    return FunctionHarness(talk)


async def timed(play: Play, episodes: int) -> float:
    """Turns a second, all at once."""
    began = time.monotonic()
    await asyncio.gather(*(play(index) for index in range(episodes)))
    return episodes * TURNS / (time.monotonic() - began)


async def alone(play: Play) -> float:
    """Milliseconds of a turn, one after the other."""
    found = []
    for index in range(ALONE // TURNS):
        start = time.monotonic()
        await play(index)
        found.append((time.monotonic() - start) / TURNS)
    return 1000 * statistics.median(found)


async def measure(url: str, model: Path, episodes: int, *, at_once: bool) -> dict[str, dict[str, float]]:
    """Of one stub. at_once: it answers so, and episodes are looked at one by one as well."""
    tokenizer = load_tokenizer(model)
    template = ChatTemplate(tokenizer)
    prompt, between = template.prompt(ASKED)[0].tolist(), template.following([TOLD]).tolist()
    asker_of: Callable[[ServerClient], Asker] = lambda client: Asker(  # noqa: E731
        client, Gate(episodes, 1), lambda ids: str(tokenizer.decode(list(ids))), deadline_s=DEADLINE_S
    )
    settings = EpisodeSettings(Talk, template, 1000, TURNS, None, DEADLINE_S, DEADLINE_S)
    budgets = Budgets(1000, TURNS, None, DEADLINE_S)
    found: dict[str, dict[str, float]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        ServerClient(ServerEndpoint("stub", url, "")) as client,
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        harnesses = Harnesses(HarnessSettings(harness([session]), budgets), Model("policy", tokenizer, None))
        ways: dict[str, Play] = {
            "bare": bare(url, session, prompt, between),
            "in process": of_player(Episodes(settings), asker_of(client)),
            "endpoint": of_player(harnesses, asker_of(client)),
        }
        for name, play in ways.items():
            if at_once:
                await asyncio.gather(*(play(index) for index in range(50)))  # warm
            found[name] = {"turns_per_s": await timed(play, episodes)}
            if at_once:
                found[name]["turn_ms"] = await alone(play)
            found[name]["peak_mib"] = peak_bytes(get_platform("cpu")) / 2**20
        await harnesses.close()
    return found


def at_stub(seconds: float, model: Path, episodes: int) -> dict[str, dict[str, float]]:
    """Everything at a stub that answers after so many seconds."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    stub = context.Process(target=serve_stub, args=(told, seconds), daemon=True)
    stub.start()
    try:
        with asyncio.Runner(loop_factory=get_new_event_loop) as runner:
            return runner.run(measure(told.get(), model, episodes, at_once=not seconds))
    finally:
        stub.kill()
        stub.join()


def show(episodes: int, stubs: list[dict[str, Any]]) -> None:
    """A line for each way at each stub."""
    table = Table(title=f"{episodes} episodes of {TURNS} turns of {len(TURN)} tokens, against a stub")
    for column in ("it answers after", "way", "turns/s", "of bare", "added ms a turn", "peak MiB so far"):
        table.add_column(column, justify="right")
    for stub in stubs:
        bare = stub["ways"]["bare"]
        for name, row in stub["ways"].items():
            added = f"{row['turn_ms'] - bare['turn_ms']:.2f}" if "turn_ms" in row else ""
            table.add_row(
                *(f"{stub['answers_after_s']:g} s", name, f"{row['turns_per_s']:.0f}"),
                *(f"{row['turns_per_s'] / bare['turns_per_s']:.0%}", added, f"{row['peak_mib']:.0f}"),
            )
    Console().print(table)


def main(
    concurrency: Annotated[int, typer.Option(help="Episodes at once.")] = 2000,
    quick: Annotated[bool, typer.Option(help="Few episodes, and a stub that hardly waits: proves nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result.")] = None,
) -> None:
    """Measure and tabulate."""
    episodes, waits = (60, (0.0, 0.1)) if quick else (concurrency, ANSWERS_AFTER_S)
    with tempfile.TemporaryDirectory() as folder:
        call("tools/make_tiny_model.py", "--out", folder)
        stubs = [{"answers_after_s": seconds, "ways": at_stub(seconds, Path(folder), episodes)} for seconds in waits]
    show(episodes, stubs)
    write("agent_load", {"episodes": episodes, "turns": TURNS, "stubs": stubs}, out)


if __name__ == "__main__":
    typer.run(main)
