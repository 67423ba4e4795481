"""Samples as numbers, and which of them can be trained on at all. What a step takes is batcher.py's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megarl.core.types import FloatArray, Sample, Status

Truncated = Literal["learn", "mask"]


def is_usable(sample: Sample) -> bool:
    """Whether it has a response and a grade: a reward of zero in the place of one would teach a falsehood."""
    return sample.status is not Status.FAILED and sample.grade_failure is None


def learned(samples: Sequence[Sample], truncated: Truncated) -> list[Sample]:
    """The samples as they are trained on. truncated: mask takes all tokens of those that ended at a limit out."""
    return [
        replace(sample, loss_mask=np.zeros_like(sample.loss_mask), memory=None)
        if truncated == "mask" and sample.status is Status.TRUNCATED
        else sample
        for sample in samples
    ]


def mean_nll(samples: Sequence[Sample]) -> FloatArray:
    """Minus the mean log-prob, at rollout, of the tokens that each sample trains on: [N] float32, 0 where there are none."""
    means = [
        -float(sample.rollout_logprobs[sample.loss_mask > 0].mean()) if sample.loss_mask.any() else 0.0
        for sample in samples
    ]
    return np.array(means, dtype=np.float32)


def rewards(samples: Sequence[Sample]) -> FloatArray:
    """[N] float32."""
    return np.array([sample.reward for sample in samples], dtype=np.float32)


def scores(samples: Sequence[Sample], grader: str | None) -> FloatArray:
    """The score of one grader, or, without a name, the reward: [N] float32. 0 where there is none.

    A sample without a grade has no reward, whatever its environment gave: what that grader would have said is missing.
    """
    if grader is None:
        return np.where([sample.grade_failure is None for sample in samples], rewards(samples), np.float32(0))
    return np.array([sample.reward_parts.get(grader) or 0.0 for sample in samples], dtype=np.float32)


def scores_by(samples: Sequence[Sample], graders: Sequence[str | None]) -> FloatArray:
    """`scores` of samples that are not all graded by the same one: [N] float32. graders: of each."""
    found = np.zeros(len(samples), np.float32)
    for grader in dict.fromkeys(graders):
        here = [at for at, each in enumerate(graders) if each == grader]
        found[here] = scores([samples[at] for at in here], grader)
    return found
