"""Steps whose rollout and trainer differ too much: by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.core.errors import DriftError
from megarl.recipe.algorithm import Algorithm
from megarl.rollout.drift import MEASURED, learns
from megarl.rollout.step_advantages import StepAdvantages
from tests.rollout.steps import Step, learn, random_step, recipe_of


@pytest.mark.parametrize("num_collectors", [1, 3])
def test_the_difference_is_the_mean_over_trained_tokens_whoever_holds_them(num_collectors: int) -> None:
    step = random_step(5, num_collectors)
    metrics = metrics_of(step, Algorithm(max_logprob_diff=0.1))
    found, tokens = 0.0, 0
    for sample, said in zip(step.samples, step.said["old_logprobs"], strict=True):
        first = len(sample.prompt.token_ids) - 1  # position t predicts the next token
        ours = said[first : first + len(sample.response_ids)]
        found += float(np.abs(ours - sample.rollout_logprobs)[sample.loss_mask > 0].sum())
        tokens += int(sample.loss_mask.sum())
    assert metrics[MEASURED] == pytest.approx(found / tokens, rel=1e-6)
    assert metrics[MEASURED] == metrics_of(step.in_one_place(), Algorithm(max_logprob_diff=0.1))[MEASURED]
    assert metrics["rollout/drifted"] == 1
    assert metrics_of(step, Algorithm(max_logprob_diff=1e9))["rollout/drifted"] == 0
    assert MEASURED not in metrics_of(step, Algorithm())


def metrics_of(step: Step, algorithm: Algorithm) -> dict[str, float]:
    recipe = recipe_of(algorithm)
    return learn(StepAdvantages(recipe), recipe, step, ["old_logprobs"])[1]


@pytest.mark.parametrize(("diff", "above"), [(0.1, False), (0.1001, True), (math.nan, True)])
def test_what_is_above_the_bound_is_left_out_or_ends_the_run(diff: float, above: bool) -> None:
    assert learns(Algorithm(max_logprob_diff=0.1, on_logprob_diff="skip"), 7, {MEASURED: diff}) is not above
    assert learns(Algorithm(), 7, {MEASURED: diff})
    if above:
        with pytest.raises(
            DriftError, match=r"^Step 7: .* nats apart in the mean, and algorithm.max_logprob_diff is 0.1;"
        ):
            learns(Algorithm(max_logprob_diff=0.1), 7, {MEASURED: diff})
