"""A reward function of a user."""

from __future__ import annotations

from typing import Any


def whole(prompt: str, response: str, answer: str, metadata: dict[str, Any], truncated: bool) -> float:
    """Whether the response ended by itself."""
    return float(not truncated)


def figured(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Says more than the score: how far it was off, always; whether it is even, of right answers alone."""
    right = response == answer
    return {
        "score": float(right),
        "off": abs(int(response) - int(answer)),
        **({"even": True} if right else {}),
        "pred": response,
    }


def picky(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """The number that the response is; raises where it is none."""
    return float(response)
