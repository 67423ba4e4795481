"""Steps of random samples in random places: shards, collectors, masks with holes, samples without a trained token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.types import Block, FloatArray, Sample, Status
from megarl.data.blocks import sample_block
from megarl.recipe.agent_rules import score_names
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from megarl.rollout import filters
from megarl.rollout.local_advantages import LocalAdvantages, SampleNumbers
from megarl.rollout.step_advantages import StepAdvantages, StepFacts
from tests.rollout.samples import group_index, make_prompt, make_sample

MOST = 6
ROLES = ("old_logprobs", "ref_logprobs", "values", "teacher_logprobs", "scores")


def recipe_of(algorithm: Algorithm, **sections: Any) -> Recipe:
    """A recipe with this section, not checked."""
    return Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t")),
        rollout=Rollout(prompts_per_step=2, samples_per_prompt=2, max_response_tokens=MOST),
        train=Train(steps=1),
        algorithm=algorithm,
        **sections,
    )


@dataclass(frozen=True)
class Step:
    """Samples in their order; shard and collector of each; what roles say of each position of each sample."""

    samples: list[Sample]
    shard_of: np.ndarray
    collector_of: np.ndarray
    said: Mapping[str, list[FloatArray]]
    greedy_rewards: FloatArray
    num_shards: int = 1
    num_collectors: int = 1

    def in_one_place(self) -> Step:
        """The same step with a single collector."""
        return replace(self, collector_of=np.zeros_like(self.collector_of), num_collectors=1)

    def at(self, shard: int, collector: int) -> list[int]:
        """The samples that lie there."""
        return np.flatnonzero((self.shard_of == shard) & (self.collector_of == collector)).tolist()


def random_step(seed: int, num_collectors: int, num_groups: int = 5, num_shards: int = 2) -> Step:
    """A step of groups of one to four samples; a group lies in one collector."""
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    collector_of: list[int] = []
    for group in range(int(random.integers(1, num_groups + 1))):
        collector = int(random.integers(num_collectors))
        prompt = replace(make_prompt("p0"), token_ids=np.arange(random.integers(1, 5)))
        for _ in range(random.integers(1, 5)):
            length = int(random.integers(1, MOST + 1))
            reward = float(np.float32(random.choice([0, 0.25, 0.7, 1])))
            samples.append(
                replace(
                    make_sample(f"1/p{group}", reward),
                    reward_parts={"math": reward} if length > 1 else {},
                    prompt=prompt,
                    response_ids=np.arange(length),
                    loss_mask=(random.random(length) < random.choice([0, 0.7, 1, 1])).astype(np.uint8),
                    rollout_logprobs=-random.exponential(size=length).astype(np.float32),
                )
            )
            collector_of.append(collector)
    said = {
        name: [random.normal(-1, 0.4, sample.num_tokens).astype(np.float32) for sample in samples] for name in ROLES
    }
    # Old log-probs are the rollout's, nearly: ratios are then about 1.
    said["old_logprobs"] = [
        label_aligned(sample, sample.rollout_logprobs) + random.normal(0, 0.4, sample.num_tokens).astype(np.float32)
        for sample in samples
    ]
    greedy = random.random(len({sample.group_id for sample in samples})).astype(np.float32)
    shard_of = random.integers(num_shards, size=len(samples))
    return Step(samples, shard_of, np.array(collector_of), said, greedy, num_shards, num_collectors)


def label_aligned(sample: Sample, response: np.ndarray) -> FloatArray:
    """What is said of response tokens, at the positions that predict them: [L]."""
    return np.concatenate([np.zeros(len(sample.prompt.token_ids) - 1), response, [0]]).astype(np.float32)


def end_to_end(parts: Sequence[np.ndarray], dtype: Any = np.float32) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def block_of(step: Step, indices: Sequence[int]) -> Block:
    """These samples, as a shard's part that lies in a collector."""
    # Nobody looks at the weights here.
    return sample_block([step.samples[at] for at in indices], np.array(indices, np.int64), np.ones(len(indices)))


def facts_of(step: Step, names: Sequence[str] = ()) -> StepFacts:
    """What a coordinator knows of the samples. names: of graders."""
    return StepFacts(
        step=1,
        rewards=filters.rewards(step.samples),
        group_index=group_index(step.samples),
        response_tokens=np.array([len(sample.response_ids) for sample in step.samples], np.int64),
        trained_tokens=np.array([sample.loss_mask.sum() for sample in step.samples], np.int64),
        mean_nll=filters.mean_nll(step.samples),
        reward_parts=np.array(
            [sample.reward_parts.get(name, np.nan) for sample in step.samples for name in names], np.float64
        ).reshape(len(step.samples), len(names)),
        truncated=np.array([sample.status is Status.TRUNCATED for sample in step.samples], np.bool_),
        greedy_rewards=step.greedy_rewards,
    )


def numbers_of(step: Step, indices: Sequence[int], kl_coef: float, names: Sequence[str] = ()) -> SampleNumbers:
    """What a collector has to know of these samples. names: of graders."""
    facts = facts_of(step, names)
    at = np.array(indices, np.int64)
    samples = [step.samples[index] for index in indices]
    numbers = group_index(samples)  # counted where they are
    return SampleNumbers(
        facts.rewards[at],
        numbers,
        facts.response_tokens[at],
        facts.mean_nll[at],
        facts.truncated[at],
        facts.reward_parts[at],
        kl_coef,
        step.greedy_rewards,
    )


Learnt = dict[str, dict[int, FloatArray]]  # column -> sample -> its positions


def learn(maker: StepAdvantages, recipe: Recipe, step: Step, roles: Sequence[str]) -> tuple[Learnt, dict[str, float]]:
    """The two turns over the step's collectors: columns and metrics. roles: columns that are there."""
    here = [[step.at(shard, collector) for shard in range(step.num_shards)] for collector in range(step.num_collectors)]
    locals_ = [LocalAdvantages(recipe) for _ in here]
    measured = [
        local.measure(
            numbers_of(step, sorted(index for part in indices for index in part), maker.kl_coef, score_names(recipe)),
            [block_of(step, part) for part in indices],
            {name: [end_to_end([step.said[name][index] for index in part]) for part in indices] for name in roles},
        )
        for local, indices in zip(locals_, here, strict=True)
    ]
    settled = maker.settle(facts_of(step, score_names(recipe)), measured)
    learned = [local.finish(each) for local, each in zip(locals_, settled, strict=True)]
    found: Learnt = {}
    for indices, each in zip(here, learned, strict=True):
        for name, columns in each.columns.items():
            mine = found.setdefault(name, {})
            for part, column in zip(indices, columns, strict=True):
                assert column.dtype == np.float32 and column.flags.c_contiguous
                cuts = np.cumsum([step.samples[index].num_tokens for index in part])
                assert len(column) == (cuts[-1] if part else 0)
                mine |= dict(zip(part, np.split(column, cuts[:-1]), strict=False))
    return found, maker.metrics(measured, [each.sums for each in learned])
