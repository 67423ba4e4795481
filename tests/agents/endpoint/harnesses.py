"""Episodes that harnesses play at the endpoint, against a fake server, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openai import AsyncOpenAI

from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.session import Budgets
from megarl.agents.environment import Done, EpisodeRow
from megarl.agents.harness import Harnesses, HarnessSettings
from megarl.agents.harness_kinds import FunctionHarness, Harness
from megarl.agents.observer import Observer
from megarl.core.types import Prompt, Sample
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt
from megarl.rollout.gate import Gate
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import ends_of, make_tokenizer
from tests.agents.playing import LONG_S, make_row
from tests.support.fake_sglang import FakeSglang

TOKENIZER = make_tokenizer("qwen3")
END = ends_of("qwen3")[0]
MODEL = "gpt-4o-mini"

Play = Callable[[AsyncOpenAI, EpisodeRow], Awaitable[Any]]


def ids_of(text: str, tokenizer: Any = TOKENIZER) -> list[int]:
    """Tokens of a text, and the end of a turn."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], END]


def writing(*turns: str | list[int], **changes: Any) -> FakePolicy:
    """A policy that writes these turns, one after the other; the last again and again."""
    left = [turn if isinstance(turn, list) else ids_of(turn) for turn in turns]

    def write(*_: Any) -> list[int]:
        return left.pop(0) if len(left) > 1 else left[0]

    return FakePolicy(write, lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True), ends={END}, **changes)


def playing(play: Play) -> FunctionHarness:
    """A coroutine with the stock client, given what it needs."""

    async def harness(base_url: str, key: str, row: EpisodeRow) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
            return await play(client, row)

    return FunctionHarness(harness)


def budgets(**changes: Any) -> Budgets:
    """Those that do not run out, but for these."""
    plain: dict[str, Any] = {"max_prompt_tokens": 1000, "max_turns": 100, "turn_tokens": None, "timeout_s": LONG_S}
    return Budgets(**plain | changes)


def harnessed(
    fake: FakeSglang,
    harness: Harness | Play,
    *,
    prompt: Prompt | None = None,
    sampling: Sampling = Sampling(10_000),  # noqa: B008
    indices: Sequence[int] = (0,),
    parser: Any = None,
    graded: bool = False,
    most: int | None = None,
    beside: Callable[[Harnesses], Awaitable[None]] | None = None,
    tokenizer: Any = TOKENIZER,
    observer: Observer | None = None,
    **limits: Any,
) -> list[Sample]:
    """One episode for each index."""

    async def go() -> list[Sample]:
        async with fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as client:
            gate = Gate(4, 1)
            asker = Asker(client, gate, tokenizer.decode, deadline_s=LONG_S)
            player = harness if hasattr(harness, "play") else playing(harness)  # type: ignore[arg-type]
            settings = HarnessSettings(player, budgets(**limits), graded=graded, most=most)
            harnesses = Harnesses(settings, Model(MODEL, tokenizer, parser, observer))
            attempts = [Attempt(prompt or make_row(), sampling, 1, "train", 3, index) for index in indices]
            together = asyncio.gather(*(harnesses.play(attempt, asker) for attempt in attempts))
            if beside is not None:
                await beside(harnesses)
            samples = await together
            await harnesses.close()
            assert gate.running == gate.queued == 0
            return list(samples)

    return asyncio.run(asyncio.wait_for(go(), 300))


async def guess(client: AsyncOpenAI, row: EpisodeRow) -> Done:
    """Guess the number, as the environment of that name plays it."""
    messages: list[Any] = list(row.messages)
    for turn in range(7):
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        said = answer.choices[0].message
        number = "".join(letter for letter in said.content or "" if letter.isdigit())
        if number == row.answer:
            return Done(1.0, {"guesses": turn + 1.0, "solved": 1.0})
        if turn == 6:
            break
        word = "no number" if not number else "higher" if int(number) < int(row.answer) else "lower"
        messages += [said, {"role": "user", "content": word}]
    return Done(0.0, {"solved": 0.0})
