"""Functions as a user writes them, for recipes that name them by import path."""

from __future__ import annotations

from typing import Any

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
