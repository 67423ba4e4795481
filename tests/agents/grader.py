"""A grader of conversations."""

from __future__ import annotations

from typing import Any


def turns(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """How often the assistant spoke."""
    said = sum(message["role"] == "assistant" for message in metadata["messages"])
    assert response and answer == "42" and prompt
    return float(said)
