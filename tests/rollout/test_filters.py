"""Which samples are kept, on lists written by hand."""

from __future__ import annotations

from megarl.core.types import Status
from megarl.recipe.schema import Eval
from megarl.rollout import filters
from megarl.rollout.sample_facts import eval_facts, group_facts
from tests.rollout.samples import make_sample


def test_failed_and_ungraded_samples_are_left_out() -> None:
    good, truncated = make_sample("a", 1.0), make_sample("a", status=Status.TRUNCATED)
    failed, ungraded = make_sample("a", status=Status.FAILED), make_sample("b", grade_failure="timeout")
    assert [*map(filters.is_usable, (good, failed, ungraded, truncated))] == [True, False, False, True]


def test_what_was_cut_off_is_not_learned_where_the_recipe_says_so() -> None:
    whole, cut = make_sample("a", 1.0), make_sample("a", status=Status.TRUNCATED)
    before = cut.loss_mask.tolist()
    assert filters.learned([whole, cut], "learn") == [whole, cut]
    kept, masked = filters.learned([whole, cut], "mask")
    assert kept is whole and masked.loss_mask.tolist() == [0] * len(before)
    assert cut.loss_mask.tolist() == before != [0] * len(before)
    facts = group_facts(0, [whole, cut], [], learned=[kept, masked])
    assert facts.trained_tokens.tolist() == [int(whole.loss_mask.sum()), 0] and facts.spans[1] == ()
    # What it is like does not change: advantages may go by it.
    assert facts.mean_nll[1] == group_facts(0, [whole, cut], []).mean_nll[1] != 0


def test_a_held_out_episode_that_a_grader_failed_at_is_not_right_by_what_its_environment_gave() -> None:
    half = make_sample("a", 1.0, grade_failure="judge: timeout")
    half.reward_parts = {"environment": 1.0, "judge": None}
    facts = eval_facts([0], [half], Eval())
    assert (facts.scores.tolist(), facts.rewards.tolist()) == ([0.0], [0.0])
    # Who is named says so alone.
    assert eval_facts([0], [half], Eval(grader="environment")).scores.tolist() == [1.0]
