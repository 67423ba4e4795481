"""The exact grader: the response is the answer, or it is not. For tests and for tasks with one spelling."""

from __future__ import annotations

from typing import Any

from megarl.data.answers import Answer, accepted


def exact(prompt: str, response: str, answer: Answer, metadata: dict[str, Any]) -> float:
    """1.0 where the response equals the answer, or one of several, white space around both left out of account; else 0.0."""
    return float(response.strip() in [each.strip() for each in accepted(answer)])
