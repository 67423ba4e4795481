"""Episodes against a fake server, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.agents.episode import Episodes, EpisodeSettings
from megarl.agents.template import ChatTemplate
from megarl.core.types import Prompt, Sample
from megarl.data.prompts import MESSAGES_KEY
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt
from megarl.rollout.gate import Gate
from megarl.rollout.pictures import Pictures
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.support.fake_sglang import FakeSglang

LONG_S = 120.0  # for what is not to be late: an upper bound, also where the machine is busy


def make_row(content: str = "Guess.", answer: str = "42", **fields: Any) -> Prompt:
    """A row whose own tokens nobody looks at."""
    metadata = {**fields, MESSAGES_KEY: [{"role": "user", "content": content}]}
    return Prompt("rows.jsonl:1", np.array([1], np.int32), content, answer, metadata)


def make_settings(make: Callable[[], Any], tokenizer: Any, **changes: Any) -> EpisodeSettings:
    """Without budgets that run out."""
    settings = EpisodeSettings(
        make=make,
        template=ChatTemplate(tokenizer),
        max_prompt_tokens=1000,
        max_turns=100,
        turn_tokens=None,
        timeout_s=LONG_S,
        step_timeout_s=LONG_S,
    )
    return replace(settings, **changes)


def play(
    fake: FakeSglang,
    settings: EpisodeSettings,
    tokenizer: Any,
    *,
    prompt: Prompt | None = None,
    sampling: Sampling = Sampling(10_000),  # noqa: B008
    indices: Sequence[int] = (0,),
    pictures: Pictures | None = None,
) -> list[Sample]:
    """One episode for each index."""

    async def go() -> list[Sample]:
        async with fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as client:
            gate = Gate(4, 1)
            asker = Asker(client, gate, tokenizer.decode, deadline_s=LONG_S)
            episodes = Episodes(settings)
            asked = prompt or make_row()
            attempts = [Attempt(asked, sampling, 1, "train", 3, index, pictures=pictures) for index in indices]
            samples = await asyncio.gather(*(episodes.play(attempt, asker) for attempt in attempts))
            await episodes.close()
            assert gate.running == gate.queued == 0
            return list(samples)

    return asyncio.run(asyncio.wait_for(go(), 300))
