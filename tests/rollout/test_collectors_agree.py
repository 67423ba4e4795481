"""A step comes to the same however its groups lie in collectors: every preset's advantage, and what stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.recipe.functions import needs_one_collector
from megarl.rollout.local_advantages import column_names
from megarl.rollout.step_advantages import StepAdvantages
from tests.rollout.advantage_cases import CASES, OF_TOKENS, roles_of
from tests.rollout.steps import learn, random_step

# Sums over collectors: of tokens' weights and moments. All else is a sum over samples, in their order.
ROUNDED = {"critic/explained_variance", "rollout/correction_ess"}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), num_collectors=st.integers(2, 4))
def test_collectors_agree(name: str, seed: int, num_collectors: int) -> None:
    recipe, step = CASES[name], random_step(seed, num_collectors)
    assert not needs_one_collector(recipe.algorithm)
    one, several = StepAdvantages(recipe), StepAdvantages(recipe)
    for _ in range(2):  # the second with another weight of the KL, where it is steered
        expected, metrics = learn(one, recipe, step.in_one_place(), roles_of(recipe))
        found, theirs = learn(several, recipe, step, roles_of(recipe))
        assert set(found) == set(expected) == set(column_names(recipe))
        assert one.state() == several.state()
        assert set(theirs) == set(metrics)
        for key, value in metrics.items():
            assert theirs[key] == (pytest.approx(value, rel=1e-6, abs=1e-6) if key in ROUNDED else value), key
        for column, samples in expected.items():
            exact = column == "old_logprobs" or recipe.algorithm.advantage not in OF_TOKENS
            largest = max(float(np.abs(values).max()) for values in samples.values())
            assert set(found[column]) == set(samples) == set(range(len(step.samples)))
            for sample, values in samples.items():
                if exact:
                    assert np.array_equal(found[column][sample], values), (column, sample)
                else:
                    assert np.allclose(found[column][sample], values, rtol=1e-6, atol=1e-6 * largest), (column, sample)
