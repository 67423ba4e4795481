"""The exact grader: the response is the answer, or it is not. For tests and for tasks with one spelling."""

from __future__ import annotations

from typing import Any


def exact(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1.0 where the response equals the answer, white space around both left out of account; else 0.0."""
    return float(response.strip() == answer.strip())
