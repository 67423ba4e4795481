"""Which samples are kept, on lists written by hand."""

from __future__ import annotations

from megarl.core.types import Status
from megarl.recipe.schema import Eval
from megarl.rollout import filters
from megarl.rollout.sample_facts import eval_facts
from tests.rollout.samples import make_sample


def test_failed_and_ungraded_samples_are_left_out() -> None:
    good, truncated = make_sample("a", 1.0), make_sample("a", status=Status.TRUNCATED)
    failed, ungraded = make_sample("a", status=Status.FAILED), make_sample("b", grade_failure="timeout")
    assert filters.usable([good, failed, ungraded, truncated]) == [good, truncated]


def test_a_held_out_episode_that_a_grader_failed_at_is_not_right_by_what_its_environment_gave() -> None:
    half = make_sample("a", 1.0, grade_failure="judge: timeout")
    half.reward_parts = {"environment": 1.0, "judge": None}
    facts = eval_facts([0], [half], Eval())
    assert (facts.scores.tolist(), facts.rewards.tolist()) == ([0.0], [0.0])
    # Who is named says so alone.
    assert eval_facts([0], [half], Eval(grader="environment")).scores.tolist() == [1.0]
