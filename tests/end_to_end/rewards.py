"""A reward that a random model already earns some of, so that there is something to learn in three steps."""

from __future__ import annotations

from typing import Any


def share_of_digits(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)
