"""A sample of two weight versions under the default of a recipe with staleness: weights by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.types import VersionSpan
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.rollout.steps import Step
from tests.rollout.test_step_advantages import learned

ROLLOUT = np.array([-1.0, -2.0, -1.0], np.float32)  # versions 3, 3 and 4
TRAINER = {1: -0.5, 2: -1.0, 3: -1.25}  # at the start of the step, of weights 4; by position


def of_two_versions(step: Step) -> Step:
    first, *others = step.samples
    spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    return replace(step, samples=[replace(first, rollout_logprobs=ROLLOUT, versions=spans), *others])


@pytest.mark.parametrize("num_collectors", [1, 2])
def test_tokens_are_weighed_by_trainer_over_rollout_truncated(tmp_path: Path, num_collectors: int) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "{model: {path: m}, data: {train: t}, train: {steps: 1}, algorithm: {advantage: rloo},\n"
        "rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_response_tokens: 6, max_staleness: 1}}"
    )
    algorithm = load_recipe(file, [], Recipe).recipe.algorithm
    columns = {"old_logprobs": lambda index, at: TRAINER.get(at, -1.0) if index == 0 else -1.0}

    found, metrics = learned(algorithm, num_collectors, columns, change=of_two_versions)

    # Its advantage is 1: the ratios e^0.5, e^1 cut at 2, and e^-0.25, whatever the version of each token.
    assert found["advantages"][0] == pytest.approx([np.exp(0.5), 2.0, np.exp(-0.25)])
    assert found["advantages"][3] == pytest.approx([0.5, 0.5])  # trainer and rollout agree on the others
    assert metrics["rollout/correction_touched"] == pytest.approx(1 / 8)
