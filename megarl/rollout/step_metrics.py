"""What a step's samples were like, from what collectors told of their groups. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from megarl.core.errors import UnusableError
from megarl.core.types import BatchInfo, FloatArray, ShardPlan
from megarl.models.config import ModelConfig
from megarl.models.flops import train_flops
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import StepSamples, teaches, usable
from megarl.rollout.episode_metrics import episode_metrics
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import Ledger
from megarl.rollout.tasks import DataFacts


def sample_metrics(seen: Sequence[GroupFacts], *, greedy: bool) -> dict[str, float]:
    """Of all groups that a step has seen, those that were replaced because they teach nothing among them.

    At least one of their samples can be used.
    """
    kept = [facts.usable & (not greedy or not np.isnan(facts.greedy_reward)) for facts in seen]
    rewards = _joined(facts.rewards[flags] for facts, flags in zip(seen, kept, strict=True))
    lengths = _joined(facts.response_tokens[flags] for facts, flags in zip(seen, kept, strict=True))
    prompts = _joined(facts.prompt_tokens[flags] for facts, flags in zip(seen, kept, strict=True))
    groups = [facts for facts, flags in zip(seen, kept, strict=True) if flags.any()]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/failures": float(sum(facts.ungraded.sum() for facts in seen)),
        **_part_metrics(seen, kept),
        **episode_metrics(seen, kept),
        "rollout/prompt_len_mean": float(prompts.mean()),
        "rollout/response_len_mean": float(lengths.mean()),
        "rollout/response_len_max": float(lengths.max()),
        "rollout/truncated": float(_joined(facts.truncated for facts in seen).mean()),
        "rollout/failed": float(sum(facts.failed.sum() for facts in seen)),
        "rollout/zero_variance_groups": float(np.mean([not teaches(facts) for facts in groups])),
    }


def batch_info(
    samples: StepSamples,
    recipe: Recipe,
    model: ModelConfig,
    plans: Sequence[ShardPlan],
    version: int,
    metrics: dict[str, float],
    failure: str,
) -> BatchInfo:
    """What the driver knows of a step. metrics: what is known already, beside the work to train on it."""
    flops = train_flops(model, samples.sequence_tokens, weight_gradients=recipe.actor.lora is None)
    return BatchInfo(
        step=samples.step,
        weight_version=version,
        num_samples=len(samples),
        num_groups=samples.num_groups,
        prompt_tokens=int(samples.prompt_tokens.sum()),
        response_tokens=int(samples.response_tokens.sum()),
        metrics={
            **metrics,
            "rollout/num_samples": float(len(samples)),
            "perf/train_flops": recipe.actor.epochs * flops,
        },
        failure=failure,
    )


def version_metrics(taken: Sequence[GroupFacts], version: int, oldest: int) -> dict[str, float]:
    """How old the tokens are that a step trains on. version: of the weights that it trains."""
    behind: list[int] = []
    counts: list[int] = []
    old = new = stale = 0
    used: dict[int, int]  # version -> tokens
    for facts in taken:
        for spans, ok in zip(facts.spans, facts.usable, strict=True):
            used = {}
            for span in spans if ok else ():
                if span.version >= oldest:
                    used[span.version] = used.get(span.version, 0) + span.end - span.start
            if used:
                behind.append(version - min(used))
                counts.append(len(used))
                current = used.get(version, 0)
                old += sum(used.values()) - current
                new += current
            stale += bool(ok and spans and not used)
    if not behind:
        return {"rollout/stale_samples": float(stale)}
    shares = {f"rollout/staleness/{number}": count / len(behind) for number, count in sorted(Counter(behind).items())}
    return {
        "rollout/staleness_mean": float(np.mean(behind)),
        "rollout/staleness_max": float(max(behind)),
        **shares,
        "rollout/versions_per_sample": float(np.mean(counts)),
        "rollout/carried_tokens": old / max(1, old + new),
        "rollout/stale_samples": float(stale),
    }


def check_grades(where: str, seen: Sequence[GroupFacts], most: float) -> None:
    """Raises UnusableError where more of the answered samples have no grade than the recipe allows."""
    answered = sum(int((~facts.failed).sum()) + facts.num_greedy - facts.greedy_failed for facts in seen)
    failures = sum(int(facts.ungraded.sum()) + facts.greedy_ungraded for facts in seen)
    first = next((facts.grade_failure for facts in seen if facts.grade_failure), "")
    refuse_grades(where, failures, answered, first, most)


def check_usable(where: str, seen: Sequence[GroupFacts], most: float, *, greedy: bool) -> None:
    """Whether a step has something to learn from. where, most: as of `check_grades`. Raises UnusableError."""
    check_grades(where, seen, most)
    if not any(usable(facts, 0, greedy=greedy).any() for facts in seen):
        raise UnusableError(f"{where}: no sample can be used. {failure(seen)}")


def refuse_grades(where: str, failures: int, answered: int, first: str, most: float) -> None:
    """Raises UnusableError where failures are more than this share of the answered."""
    if failures > most * answered:
        raise UnusableError(
            f"{where}: {failures} of {answered} grades failed, and reward.max_failed_share is {most:g}. "
            f"The first: {first}. Mend the grader, or raise the bound: samples without a grade are left out. After editing a "
            "function of yours give --discard-journal too: grades of the function as it was are not trained on."
        )


def failure(seen: Sequence[GroupFacts]) -> str:
    """How many samples failed, and the first one's reason; empty where none did."""
    asked = sum(len(facts.rewards) + facts.num_greedy for facts in seen)
    failed = sum(
        int((facts.failed | facts.ungraded).sum()) + facts.greedy_failed + facts.greedy_ungraded for facts in seen
    )
    first = next((facts.failure for facts in seen if facts.failure), "")
    graded = next((facts.grade_failure for facts in seen if facts.grade_failure), "")
    return describe_failures(failed, asked, first, graded)


def describe_failures(failed: int, asked: int, first: str, first_grade: str) -> str:
    """One line for people; empty where nothing failed."""
    return f"{failed} of {asked} samples failed; the first: {first or f'grader {first_grade}'}" if failed else ""


def _part_metrics(seen: Sequence[GroupFacts], kept: Sequence[np.ndarray]) -> dict[str, float]:
    """Of each grader: mean and population deviation of its scores over the samples kept, and its failures over all."""
    metrics: dict[str, float] = {}
    for name in sorted({name for facts in seen for name in facts.parts}):
        scores = _joined(
            facts.parts[name][flags] for facts, flags in zip(seen, kept, strict=True) if name in facts.parts
        )
        failures = sum(
            int((np.isnan(facts.parts[name]) & ~facts.failed).sum()) for facts in seen if name in facts.parts
        )
        metrics[f"reward/by/{name}/mean"] = float(scores.mean()) if len(scores) else float("nan")
        metrics[f"reward/by/{name}/std"] = float(scores.std()) if len(scores) else float("nan")
        metrics[f"reward/by/{name}/failures"] = float(failures)
    return metrics


def _joined(parts: Iterable[np.ndarray]) -> FloatArray:
    found = list(parts)
    joined: FloatArray = np.concatenate(found) if found else np.zeros(0, np.float32)
    return joined


def place_metrics(ledger: Ledger, data: DataFacts, epochs: float) -> dict[str, float]:
    """Where the run is in its data, and what is under way. epochs: of the data that were handed out."""
    return {
        "data/epoch": epochs,
        "data/dropped_prompts": float(data.dropped),
        "rollout/groups_running": float(ledger.num("running")),
        "rollout/groups_finished": float(ledger.num("finished")),
        "rollout/groups_lost": float(ledger.lost),
        **{f"rollout/dropped/{why}": float(count) for why, count in sorted(ledger.dropped.items())},
    }
