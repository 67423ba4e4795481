"""Samples and prompts written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.types import IntArray, Prompt, Sample, Status, VersionSpan


def group_index(samples: Sequence[Sample]) -> IntArray:
    """The number of each sample's group, counted in the order of first appearance: [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(sample.group_id, len(numbers)) for sample in samples], dtype=np.int64)


def make_prompt(name: str, answer: str = "42") -> Prompt:
    """A prompt of three tokens, whose first tells prompts apart."""
    return Prompt(name, np.array([10 + int(name[1:]), 8, 9]), f"text of {name}", answer)


def make_sample(
    group: str, reward: float = 0.0, *, status: Status = Status.COMPLETED, grade_failure: str | None = None
) -> Sample:
    """A sample with a response of two tokens."""
    return Sample(
        id=f"{group}/0",
        group_id=group,
        prompt=make_prompt("p0"),
        response_ids=np.array([5, 2]),
        response_text="42",
        loss_mask=np.ones(2, np.uint8),
        rollout_logprobs=np.array([-1.0, -2.0], np.float32),
        versions=(VersionSpan(0, 0, 2),),
        status=status,
        reward=reward,
        grade_failure=grade_failure,
    )
