"""Functions as a user writes them, for recipes that name them by import path."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.algorithms.policy_loss import PolicyLoss, reinforce_loss


def scaled_loss(logprobs: Any, old_logprobs: Any, advantages: Any, scale: float = 1.0) -> PolicyLoss:
    """REINFORCE, times two and a number."""
    return reinforce_loss(logprobs, old_logprobs, 2.0 * scale * advantages)


def scaled_advantages(rewards: Any, group_index: Any, scale: float = 1.0) -> Any:
    """Rewards above 0.4, times a number."""
    return scale * (rewards - 0.4)


def plain_loss(logprobs: Any, teacher_logprobs: Any) -> PolicyLoss:
    """No advantages: how far the policy is from a teacher."""
    return reinforce_loss(logprobs, logprobs.detach(), teacher_logprobs - logprobs)


def shapeless_advantages(mask: Any, logprobs: Any) -> Any:
    """Asks for no rewards."""
    return logprobs


def of_samples_at_tokens(rewards: Any, mask: Any, lengths: Any) -> Any:
    """One number a token, and asks for the rewards of samples alone."""
    return mask * rewards.mean()


class Told:
    """A writer of metrics."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        return None

    def close(self, failed: bool) -> None:
        return None


class Talk:
    """An environment: each row has a number of turns of its own, and some take their time."""

    def __init__(self, turns: int = 3) -> None:
        self._turns, self._slow = turns, False

    async def start(self, row: EpisodeRow) -> list[Message]:
        self._slow = int(row.answer) % 5 == 0
        return [*row.messages]

    async def step(self, response: Response) -> Turn | Done:
        if self._slow:
            await asyncio.sleep(0.05)
        if response.turn + 1 >= self._turns:
            return Done(float(len(response.token_ids) % 3), {"length": float(len(response.token_ids))})
        return Turn([{"role": "user", "content": "user"}], 0.25 * len(response.token_ids))

    def peek(self) -> str:
        """A tool of the episode."""
        return str(self._turns)

    async def close(self) -> None:
        return None


async def converse(base_url: str, key: str, row: EpisodeRow) -> float:
    """A harness of two turns; what the model is called is worth something, and the address where it is asked."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        async with session.get(f"{base_url}/models") as answer:
            name = (await answer.json())["data"][0]["id"]
        messages: list[Message] = [*row.messages]
        for _ in range(2):
            body = {"model": name, "messages": messages}
            async with session.post(f"{base_url}/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return 0.0
                messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "on"}]
    return float(len(name)) + int(str(urlsplit(base_url).hostname)[-1])


async def shout(base_url: str, key: str, row: EpisodeRow) -> float:
    """Another harness."""
    return 2.0 * await converse(base_url, key, row)


async def look(far: bool = False) -> str:
    """A tool that takes its time."""
    await asyncio.sleep(0.03)
    return "user"


def hear() -> str:
    """Another tool."""
    return "assistant"
