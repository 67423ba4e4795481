"""A reward that a random model already earns some of, so that there is something to learn in three steps; an advantage."""

from __future__ import annotations

from typing import Any


def share_of_digits(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def taught(token_rewards: Any, logprobs: Any, teacher_logprobs: Any, mask: Any, reward_share: float) -> Any:
    """How much likelier the teacher has each token, and a share of its reward: [T]."""
    return mask * (teacher_logprobs - logprobs) + reward_share * token_rewards
