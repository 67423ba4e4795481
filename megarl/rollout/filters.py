"""Which of a step's samples are trained on. Every sample left out is counted; none is replaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.algorithms.advantage import zero_variance_groups
from megarl.core.types import FloatArray, IntArray, Sample, Status


def usable(samples: Sequence[Sample]) -> list[Sample]:
    """Without samples that have no response or no grade: a reward of zero in their place would teach a falsehood."""
    return [sample for sample in samples if sample.status is not Status.FAILED and sample.grade_failure is None]


def group_index(samples: Sequence[Sample]) -> IntArray:
    """The number of each sample's group, counted in the order of first appearance: [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(sample.group_id, len(numbers)) for sample in samples], dtype=np.int64)


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
    """The score of one grader, or, without a name, the reward: [N] float32. 0 where there is none."""
    if grader is None:
        return rewards(samples)
    return np.array([sample.reward_parts.get(grader) or 0.0 for sample in samples], dtype=np.float32)


def zero_variance_share(samples: Sequence[Sample]) -> float:
    """Groups whose rewards are all equal over groups; 0 where there are no samples."""
    if not samples:
        return 0.0
    return float(zero_variance_groups(rewards(samples), group_index(samples)).mean())


def drop_zero_variance(samples: Sequence[Sample]) -> list[Sample]:
    """Only groups whose rewards differ; all of them where none differ, because a step needs samples."""
    if not samples:
        return []
    groups = group_index(samples)
    dull = zero_variance_groups(rewards(samples), groups)
    if dull.all():
        return list(samples)
    return [sample for sample, group in zip(samples, groups, strict=True) if not dull[group]]


def num_teaching_groups(samples: Sequence[Sample]) -> int:
    """Groups whose rewards differ."""
    return int((~zero_variance_groups(rewards(samples), group_index(samples))).sum()) if samples else 0


def with_greedy(samples: Sequence[Sample], greedy: Sequence[Sample]) -> list[Sample]:
    """Without the samples of prompts whose greedy answer has no grade: there is nothing to compare them with."""
    known = {sample.group_id for sample in usable(greedy)}
    return [sample for sample in samples if sample.group_id in known]


def greedy_rewards(samples: Sequence[Sample], greedy: Sequence[Sample]) -> FloatArray:
    """The reward of the greedy answer to each group's prompt, by `group_index` of the samples: [G]; empty without any."""
    by_group = {sample.group_id: sample.reward for sample in usable(greedy)}
    groups = dict.fromkeys(sample.group_id for sample in samples)
    return np.array([by_group[group] for group in groups] if by_group else [], dtype=np.float32)
