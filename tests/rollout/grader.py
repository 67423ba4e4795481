"""A reward function of a user."""

from __future__ import annotations

from typing import Any


def picky(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """The number that the response is; raises where it is none."""
    return float(response)
