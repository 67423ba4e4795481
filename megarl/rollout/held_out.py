"""Held-out answers of all collectors as one result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from megarl.core.errors import MegarlError
from megarl.core.types import EvalResult
from megarl.recipe.held_out import Eval
from megarl.recipe.keep import pass_counts, pass_counts_of_all
from megarl.recipe.schema import Recipe
from megarl.rollout.episode_metrics import eval_metrics
from megarl.rollout.step_metrics import describe_failures, refuse_grades
from megarl.rollout.tasks import EvalFacts

CORRECT = 0.5  # a reward, or the score of eval.grader's grader, of at least this counts as a right answer


def result(parts: Sequence[EvalFacts], recipe: Recipe, step: int, version: int) -> EvalResult:
    """What the recipe wants to know of held-out answers. version: of the weights that should have given them.

    Every prompt counts the same in what is right and in the reward, however many answers its set is asked for. One without an
    answer or a grade is not right: held-out figures count every prompt, but for the length of responses, which is that of those
    there are. Raises MegarlError where other weights answered, where too many have no grade, or none an answer.
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
    _, prompts, answers = np.unique(joined("rows"), return_inverse=True, return_counts=True)
    accuracy, reward = (_mean(values, prompts, answers) for values in (right, rewards))
    return EvalResult(
        num_prompts=len(answers),
        num_samples=len(failed),
        accuracy=accuracy,
        reward=reward,
        metrics={
            "eval/accuracy": accuracy,
            "eval/reward": reward,
            "eval/response_len_mean": float(joined("response_tokens")[~failed].mean()),
            "eval/truncated": float(joined("truncated").mean()),
            "eval/failures": float((failed | ungraded).sum()),
            **eval_metrics([_numbers(parts, order)]),
            **_pass_rates("eval", right, prompts, pass_counts_of_all(recipe.eval)),
            **_by_set(joined("sets"), right, rewards, prompts, recipe.eval),
        },
        failure=failure,
    )


def _numbers(parts: Sequence[EvalFacts], order: np.ndarray) -> dict[str, np.ndarray]:
    """What is counted of answers, by name, in their order: sums are then the same whoever answered what. nan: nothing."""
    names = sorted({name for part in parts for name in part.numbers})
    nothing = [np.full(len(part.rows), np.nan) for part in parts]
    return {
        name: np.concatenate([part.numbers.get(name, none) for part, none in zip(parts, nothing, strict=True)])[order]
        for name in names
    }


def _mean(values: np.ndarray, prompts: np.ndarray, answers: np.ndarray) -> float:
    """Over prompts, of the mean over a prompt's answers. prompts: [N], of each answer; answers: [P], how many a prompt has."""
    if (answers == answers[0]).all():
        return float(values.mean())
    return float(np.average(values, weights=1 / answers[prompts]))


def _pass_rates(group: str, right: np.ndarray, prompts: np.ndarray, counts: Sequence[int]) -> dict[str, float]:
    """For each of these numbers of answers, the share of prompts of which one of so many is right. prompts: [N], of each answer.

    Without bias from the answers there are: 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al., arXiv 2107.03374, eq. 1).
    """
    _, inverse, samples = np.unique(prompts, return_inverse=True, return_counts=True)
    cases = Counter(zip(samples.tolist(), np.bincount(inverse, right).astype(int).tolist(), strict=True))
    found = {}
    for count in counts:
        misses = [num * math.comb(n - c, count) / math.comb(n, count) for (n, c), num in cases.items()]
        found[f"{group}/pass_at_{count}"] = 1 - math.fsum(misses) / len(samples)
    return found


def _by_set(
    sets: np.ndarray, right: np.ndarray, rewards: np.ndarray, prompts: np.ndarray, settings: Eval
) -> dict[str, float]:
    """The figures of each set of held-out rows, where the recipe names a field that says which one a row is of."""
    found: dict[str, float] = {}
    for name in np.unique(sets):
        own, counts = sets == name, pass_counts(settings.of_set(str(name)).samples_per_prompt)
        found |= {
            f"eval/set/{name}/accuracy": float(right[own].mean()),
            f"eval/set/{name}/reward": float(rewards[own].mean()),
            **_pass_rates(f"eval/set/{name}", right[own], prompts[own], counts),
        }
    return found
