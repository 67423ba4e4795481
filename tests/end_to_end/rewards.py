"""A reward that a random model already earns some of, so that there is something to learn in three steps; an advantage."""

from __future__ import annotations

import time
from typing import Any


def share_of_digits(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def share_of_digits_slowly(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """For runs that go on until something has happened to them: processors are left to who makes it happen."""
    time.sleep(0.1)
    return share_of_digits(prompt, response, answer, metadata)


def taught(token_rewards: Any, logprobs: Any, teacher_logprobs: Any, mask: Any, reward_share: float) -> Any:
    """How much likelier the teacher has each token, and a share of its reward: [T]."""
    return mask * (teacher_logprobs - logprobs) + reward_share * token_rewards
