"""Held-out answers of collectors as one result."""

from __future__ import annotations

import numpy as np

from megarl.recipe.algorithm import Algorithm
from megarl.rollout.held_out import result
from megarl.rollout.tasks import EvalFacts
from tests.rollout.steps import recipe_of


def facts(*rows: int, lengths: list[int], failed: list[bool]) -> EvalFacts:
    zeros = np.zeros(len(rows), np.bool_)
    ones = np.ones(len(rows), np.float32)
    return EvalFacts(np.array(rows), ones, ones, np.array(lengths), zeros, np.array(failed), zeros, (1, 1))


def test_a_prompt_without_an_answer_has_no_length() -> None:
    parts = [facts(0, 2, lengths=[10, 0], failed=[False, True]), facts(1, lengths=[20], failed=[False])]
    assert result(parts, recipe_of(Algorithm()), 1, 1).metrics["eval/response_len_mean"] == 15
