"""Thousands of episodes at once against a stub server: how much of a bare asyncio client's rate remains. One command:

    python -m bench.agent_load

The stub answers at once, from a process of its own; what is measured is the collector's side alone. Bare: requests of the same
sizes by aiohttp and orjson, and nothing else. In process: an environment. Endpoint: a coroutine that asks the OpenAI-compatible
endpoint by aiohttp in the same process, so that both ends of that connection are in its time. Added milliseconds: of a turn, one
episode at a time, the median. Writes a table and bench/results/agent_load.json.
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


async def timed(play: Play, episodes: int) -> dict[str, float]:
    """All at once, then one after the other."""
    began = time.monotonic()
    await asyncio.gather(*(play(index) for index in range(episodes)))
    seconds = time.monotonic() - began
    alone = []
    for index in range(ALONE // TURNS):
        start = time.monotonic()
        await play(index)
        alone.append((time.monotonic() - start) / TURNS)
    return {"turns_per_s": episodes * TURNS / seconds, "turn_ms": 1000 * statistics.median(alone)}


async def measure(url: str, model: Path, episodes: int) -> dict[str, dict[str, float]]:
    tokenizer = load_tokenizer(model)
    template = ChatTemplate(tokenizer)
    prompt, between = template.prompt(ASKED)[0].tolist(), template.following([TOLD]).tolist()
    asker_of: Callable[[ServerClient], Asker] = lambda client: Asker(  # noqa: E731
        client, Gate(episodes, 1), lambda ids: str(tokenizer.decode(list(ids))), deadline_s=DEADLINE_S
    )
    settings = EpisodeSettings(Talk, template, 1000, TURNS, None, DEADLINE_S, DEADLINE_S)
    budgets = Budgets(1000, TURNS, None, DEADLINE_S)
    found = {}
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
            await asyncio.gather(*(play(index) for index in range(50)))  # warm
            found[name] = await timed(play, episodes)
            found[name]["peak_mib"] = peak_bytes(get_platform("cpu")) / 2**20
        await harnesses.close()
    return found


def main(
    concurrency: Annotated[int, typer.Option(help="Episodes at once.")] = 2000,
    quick: Annotated[bool, typer.Option(help="Few episodes: proves nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result.")] = None,
) -> None:
    """Measure and tabulate."""
    episodes = 60 if quick else concurrency
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    stub = context.Process(target=serve_stub, args=(told,), daemon=True)
    stub.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            call("tools/make_tiny_model.py", "--out", folder)
            found: dict[str, Any] = asyncio.run(measure(told.get(), Path(folder), episodes))
    finally:
        stub.kill()
        stub.join()
    table = Table(title=f"{episodes} episodes of {TURNS} turns of {len(TURN)} tokens, against a stub")
    for column in ("way", "turns/s", "of bare", "ms a turn alone", "added ms", "peak MiB so far"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        share, added = row["turns_per_s"] / found["bare"]["turns_per_s"], row["turn_ms"] - found["bare"]["turn_ms"]
        table.add_row(
            *(name, f"{row['turns_per_s']:.0f}", f"{share:.0%}", f"{row['turn_ms']:.2f}"),
            *(f"{added:.2f}", f"{row['peak_mib']:.0f}"),
        )
    Console().print(table)
    write("agent_load", {"episodes": episodes, "turns": TURNS, "ways": found}, out)


if __name__ == "__main__":
    typer.run(main)
