"""Held-out answers of all collectors as one result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.core.errors import MegarlError
from megarl.core.types import EvalResult
from megarl.recipe.keep import pass_counts
from megarl.recipe.schema import Recipe
from megarl.rollout.episode_metrics import eval_metrics
from megarl.rollout.step_metrics import describe_failures, refuse_grades
from megarl.rollout.tasks import EvalFacts

CORRECT = 0.5  # a reward, or the score of eval.grader's grader, of at least this counts as a right answer


def result(parts: Sequence[EvalFacts], recipe: Recipe, step: int, version: int) -> EvalResult:
    """What the recipe wants to know of held-out answers. version: of the weights that should have given them.

    A prompt without an answer or a grade is not a right answer: held-out figures count every prompt, but for the length of
    responses, which is that of those there are. Raises MegarlError where other weights answered, where too many have no
    grade, or none an answer.
    """
    where = f"Evaluation at step {step}"
    for part in parts:
        if part.versions is not None and part.versions != (version, version):
            raise MegarlError(
                f"{where}: answers came from weight versions {part.versions[0]} to {part.versions[1]}; all servers should serve "
                f"version {version}."
            )
    order = np.argsort(np.concatenate([part.rows for part in parts]), kind="stable")

    def joined(name: str) -> np.ndarray:
        found: np.ndarray = np.concatenate([np.asarray(getattr(part, name)) for part in parts])
        return found[order] if len(found) else found

    failed, ungraded, rewards = joined("failed"), joined("ungraded"), joined("rewards")
    grade = next((part.grade_failure for part in parts if part.grade_failure), "")
    refuse_grades(where, int(ungraded.sum()), int((~failed).sum()), grade, recipe.reward.max_failed_share)
    first = next((part.failure for part in parts if part.failure), "")
    failure = describe_failures(int((failed | ungraded).sum()), len(failed), first, grade)
    if failed.all():
        raise MegarlError(f"{where}: no prompt was answered. {failure}")
    right = joined("scores") >= CORRECT
    accuracy = float(right.mean())
    return EvalResult(
        num_prompts=len(failed) // recipe.eval.samples_per_prompt,
        num_samples=len(failed),
        accuracy=accuracy,
        reward=float(rewards.mean()),
        metrics={
            "eval/accuracy": accuracy,
            "eval/reward": float(rewards.mean()),
            "eval/response_len_mean": float(joined("response_tokens")[~failed].mean()),
            "eval/truncated": float(joined("truncated").mean()),
            "eval/failures": float((failed | ungraded).sum()),
            **eval_metrics(part.numbers for part in parts),
            **_pass_rates("eval", right, recipe.eval.samples_per_prompt),
            **_by_set(joined("sets"), right, rewards, recipe.eval.samples_per_prompt),
        },
        failure=failure,
    )


def _pass_rates(group: str, right: np.ndarray, samples: int) -> dict[str, float]:
    """For 2, 4, 8 ... and all samples of a prompt, the share of prompts of which one of so many answers is right.

    Without bias from the answers there are: 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al., arXiv 2107.03374, eq. 1).
    """
    num_right = np.bincount(right.reshape(-1, samples).sum(axis=1), minlength=samples + 1)  # prompts by right answers
    found = {}
    for count in pass_counts(samples):
        misses = [math.comb(samples - each, count) / math.comb(samples, count) for each in range(samples + 1)]
        found[f"{group}/pass_at_{count}"] = 1 - float(num_right @ misses) / num_right.sum()
    return found


def _by_set(sets: np.ndarray, right: np.ndarray, rewards: np.ndarray, samples: int) -> dict[str, float]:
    """The figures of each set of held-out rows, where the recipe names a field that says which one a row is of."""
    found: dict[str, float] = {}
    for name in np.unique(sets):
        found |= {
            f"eval/set/{name}/accuracy": float(right[sets == name].mean()),
            f"eval/set/{name}/reward": float(rewards[sets == name].mean()),
            **_pass_rates(f"eval/set/{name}", right[sets == name], samples),
        }
    return found
