"""What a collector tells of its samples: numbers, made of tokens that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import Sample, Status, VersionSpan
from megarl.recipe.held_out import Eval
from megarl.rollout import filters
from megarl.rollout.facts import Flags, GroupFacts
from megarl.rollout.tasks import EvalFacts


def group_facts(
    group: int,
    samples: Sequence[Sample],
    greedy: Sequence[Sample],
    *,
    recorded: bool = False,
    learned: Sequence[Sample] | None = None,
) -> GroupFacts:
    """What is told of a finished group. recorded: the journal had it. learned: the same samples, as they are trained on."""
    learned = samples if learned is None else learned
    names = sorted({name for sample in samples for name in sample.reward_parts})
    parts = {
        name: np.array([_number(sample.reward_parts.get(name)) for sample in samples], np.float64) for name in names
    }
    answered = [sample for sample in greedy if filters.is_usable(sample)]
    grades = [sample.grade_failure for sample in [*samples, *greedy] if sample.grade_failure is not None]
    return GroupFacts(
        group=group,
        prompt_tokens=np.array([len(sample.prompt.token_ids) for sample in samples], np.int64),
        response_tokens=np.array([len(sample.response_ids) for sample in samples], np.int64),
        trained_tokens=np.array([int(sample.loss_mask.sum()) for sample in learned], np.int64),
        rewards=filters.rewards(samples),
        mean_nll=filters.mean_nll(samples),
        usable=np.array([filters.is_usable(sample) for sample in samples], np.bool_),
        truncated=_are(samples, Status.TRUNCATED),
        failed=_are(samples, Status.FAILED),
        ungraded=np.array([sample.grade_failure is not None for sample in samples], np.bool_),
        spans=tuple(_trained_spans(sample) for sample in learned),
        greedy_reward=answered[0].reward if answered else float("nan"),
        greedy_tokens=len(answered[0].response_ids) if answered else 0,
        parts=parts,
        numbers=_numbers(samples),
        failure=_failure([*samples, *greedy]),
        grade_failure=grades[0] if grades else "",
        num_greedy=len(greedy),
        greedy_ungraded=sum(sample.grade_failure is not None for sample in greedy),
        greedy_failed=sum(sample.status is Status.FAILED for sample in greedy),
        recorded=recorded,
        sequences=tuple(map(_sequence_tokens, samples)) if any(sample.starts for sample in samples) else (),
    )


def eval_facts(rows: Sequence[int], samples: Sequence[Sample], settings: Eval) -> EvalFacts:
    """What is told of held-out answers. rows: of each of them."""
    versions = [span.version for sample in samples for span in sample.versions]
    grades = [sample.grade_failure for sample in samples if sample.grade_failure is not None]
    return EvalFacts(
        rows=np.array(rows, np.int64),
        rewards=filters.scores(samples, None),
        scores=filters.scores_by(samples, [settings.of_row(sample.prompt.metadata).grader for sample in samples]),
        response_tokens=np.array([len(sample.response_ids) for sample in samples], np.int64),
        truncated=_are(samples, Status.TRUNCATED),
        failed=_are(samples, Status.FAILED),
        ungraded=np.array([sample.grade_failure is not None for sample in samples], np.bool_),
        versions=(min(versions), max(versions)) if versions else None,
        failure=_failure(samples),
        grade_failure=grades[0] if grades else "",
        numbers=_numbers(samples),
        sets=() if settings.set_key is None else tuple(sample.prompt.metadata[settings.set_key] for sample in samples),
    )


def _trained_spans(sample: Sample) -> tuple[VersionSpan, ...]:
    """The sample's spans, counted in trained tokens."""
    before = np.concatenate([[0], np.cumsum(sample.loss_mask > 0)])
    spans = (VersionSpan(span.version, int(before[span.start]), int(before[span.end])) for span in sample.versions)
    return tuple(span for span in spans if span.end > span.start)


def _sequence_tokens(sample: Sample) -> tuple[int, ...]:
    bounds = [0, *(len(sample.prompt.token_ids) + start for start in sample.starts), sample.num_tokens]
    return tuple(end - begin for begin, end in pairwise(bounds))


def _are(samples: Sequence[Sample], status: Status) -> Flags:
    return np.array([sample.status is status for sample in samples], np.bool_)


def _failure(samples: Sequence[Sample]) -> str:
    return next((str(sample.metadata["failure"]) for sample in samples if sample.status is Status.FAILED), "")


def _number(score: float | None) -> float:
    return float("nan") if score is None else score


def _numbers(samples: Sequence[Sample]) -> Mapping[str, NDArray[np.float64]]:
    names = sorted({name for sample in samples for name in sample.numbers})
    return {name: np.array([_number(sample.numbers.get(name)) for sample in samples], np.float64) for name in names}
