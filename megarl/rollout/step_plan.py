"""The plan of a step whose groups are chosen: its samples, who holds and who trains which, and its metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.models.config import ModelConfig
from megarl.recipe.agent_rules import score_names
from megarl.recipe.schema import Recipe
from megarl.rollout import batcher, step_metrics
from megarl.rollout.batcher import StepSamples
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import Entry
from megarl.rollout.local_advantages import StepPlan, by_length, numbers_of
from megarl.rollout.producer import Pace
from megarl.rollout.step_advantages import StepAdvantages


@dataclass(frozen=True)
class StepPlanner:
    """Plans the steps of a run. num_owners: collectors."""

    recipe: Recipe
    model: ModelConfig
    pace: Pace
    advantages: StepAdvantages
    num_owners: int
    num_shards: int

    def plan(
        self,
        entries: Sequence[Entry],
        step: int,
        version: int,
        dull: Sequence[GroupFacts],
        metrics: dict[str, float],
    ) -> tuple[StepSamples, StepPlan]:
        """The samples of a step, and its plan. dull: groups that were replaced, which count in its metrics.

        metrics: what else is told of the step. Raises UnusableError where no sample can be trained on, MegarlError where tokens
        came from other weights.
        """
        recipe, pace, greedy = self.recipe, self.pace, self.advantages.needs_greedy
        algorithm = recipe.algorithm
        taken = [entry.facts for entry in entries if entry.facts is not None]
        # In the order of asking: sums of metrics are then the same whoever finished first.
        seen, oldest = sorted([*taken, *dull], key=lambda facts: facts.group), version - pace.max_staleness
        batcher.check_versions(entries, version, pace.max_staleness)
        step_metrics.check_usable(f"Step {step}", seen, recipe.reward.max_failed_share, greedy=greedy)
        samples = batcher.select(
            entries,
            step,
            oldest,
            greedy=greedy,
            drop_dull=algorithm.drop_zero_variance_groups,
            keep=algorithm.keep_groups,
            names=score_names(recipe),
        )
        samples = replace(samples, greedy_rewards=by_length(recipe, samples.greedy_rewards, samples.greedy_tokens))
        plans, parts = batcher.assign(
            samples, recipe, num_owners=self.num_owners, num_shards=self.num_shards, oldest=oldest, groups=entries
        )
        told = step_metrics.sample_metrics(seen, greedy=greedy)
        told |= step_metrics.version_metrics(taken, version, oldest) if pace.max_staleness else {}
        told |= metrics
        info = step_metrics.batch_info(samples, recipe, self.model, plans, version, told, step_metrics.failure(seen))
        return samples, StepPlan(info, plans, parts, numbers_of(samples, self.num_owners, self.advantages.kl_coef))
