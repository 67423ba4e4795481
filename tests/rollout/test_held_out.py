"""Held-out answers of collectors as one result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.core.metrics import check_names
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


def test_each_set_of_rows_has_figures_of_its_own() -> None:
    """Whichever collectors answered them; names may have slashes, as those of the hub."""
    parts = [facts(0, 3, lengths=[1, 1], failed=[False, False]), facts(1, 2, lengths=[1, 1], failed=[False, False])]
    parts[0] = replace(
        parts[0], rewards=np.array([1, 0], np.float32), scores=np.array([1, 0]), sets=("openai/gsm8k", "aime")
    )
    parts[1] = replace(
        parts[1], rewards=np.array([0, 0.75], np.float32), scores=np.array([0, 0.75]), sets=("aime", "aime")
    )
    found = result(parts, recipe_of(Algorithm()), 1, 1).metrics
    assert {name: value for name, value in found.items() if name.startswith("eval/set/")} == {
        "eval/set/aime/accuracy": pytest.approx(1 / 3),
        "eval/set/aime/reward": 0.25,
        "eval/set/openai/gsm8k/accuracy": 1.0,
        "eval/set/openai/gsm8k/reward": 1.0,
    }
    assert found["eval/accuracy"] == 0.5
    check_names(found)
