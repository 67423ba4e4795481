"""Held-out answers of collectors as one result."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from megarl.core.metrics import check_names
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.held_out import Eval, EvalSet
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


def test_what_is_counted_of_answers_is_the_same_whoever_told_of_it_first() -> None:
    """Also where some have nothing of it. The sums of these numbers depend on their order."""
    counted = {"turns": np.array([0.1, 0.7]), "by/share": np.array([1e17, np.nan])}
    parts = [
        replace(facts(0, 3, lengths=[1, 1], failed=[False, False]), numbers=counted),
        replace(facts(2, lengths=[1], failed=[False]), numbers={"by/share": np.array([-1e17])}),
        replace(facts(1, lengths=[1], failed=[False]), numbers={"turns": np.array([0.4]), "by/share": np.array([3.0])}),
    ]
    told = [result(list(order), recipe_of(Algorithm()), 1, 1).metrics for order in permutations(parts)]
    assert all(each == told[0] for each in told)
    assert told[0]["eval/by/share"] == 0 and told[0]["eval/turns_mean"] == pytest.approx(0.4)


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


def test_a_prompt_counts_the_same_however_many_answers_its_set_is_asked_for() -> None:
    recipe = recipe_of(Algorithm())
    sets = {"a": EvalSet(samples_per_prompt=4), "c": EvalSet(samples_per_prompt=2)}
    held_out = Eval(samples_per_prompt=2, temperature=1.0, set_key="source", sets=sets)
    recipe = recipe.model_copy(update={"eval": held_out})
    part = facts(0, 0, 0, 0, 1, 1, lengths=[1] * 6, failed=[False] * 6)
    right = np.array([1, 0, 0, 0, 1, 1], np.float32)
    found = result([replace(part, scores=right, rewards=right, sets=(*"aaaabb",))], recipe, 1, 1)
    assert (found.num_prompts, found.num_samples, found.accuracy) == (2, 6, (0.25 + 1) / 2)
    assert found.reward == found.accuracy
    assert {name: value for name, value in found.metrics.items() if name.endswith(("accuracy", "at_2", "at_4"))} == {
        "eval/accuracy": (0.25 + 1) / 2,
        "eval/pass_at_2": pytest.approx(
            (3 / 6 + 1) / 2
        ),  # of 6 pairs 3 have the right one; no prompt of b has 4 answers
        "eval/set/a/accuracy": 0.25,
        "eval/set/a/pass_at_2": pytest.approx(3 / 6),
        "eval/set/a/pass_at_4": 1.0,
        "eval/set/b/accuracy": 1.0,
        "eval/set/b/pass_at_2": 1.0,
    }
    check_names(found.metrics)


def test_of_several_answers_the_share_of_prompts_with_a_right_one_is_told_for_fewer_too() -> None:
    """By the definition: the mean over all ways to take K of a prompt's answers."""
    right = {0: [1, 0, 0], 1: [0, 0, 0], 2: [1, 1, 0]}
    recipe = recipe_of(Algorithm())
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"samples_per_prompt": 3})})
    parts = []
    for rows in ([2, 0], [1]):
        part = facts(*np.repeat(rows, 3), lengths=[1] * 3 * len(rows), failed=[False] * 3 * len(rows))
        scores = np.array([each for row in rows for each in right[row]], np.float32)
        parts.append(replace(part, scores=scores, sets=tuple("ab"[row == 1] for row in rows for _ in range(3))))
    found = result(parts, recipe, 1, 1).metrics

    def taken(count: int, rows: list[int]) -> float:
        return float(np.mean([np.mean([any(each) for each in combinations(right[row], count)]) for row in rows]))

    assert found["eval/accuracy"] == pytest.approx(1 / 3)
    assert {name: value for name, value in found.items() if "pass_at" in name} == {
        "eval/pass_at_2": pytest.approx(taken(2, [0, 1, 2])),
        "eval/pass_at_3": pytest.approx(2 / 3),
        "eval/set/a/pass_at_2": pytest.approx(taken(2, [0, 2])),
        "eval/set/a/pass_at_3": 1.0,
        "eval/set/b/pass_at_2": 0.0,
        "eval/set/b/pass_at_3": 0.0,
    }
    check_names(found)
