"""From graded samples and the roles' columns to what the update learns from: advantages, returns, weights. No engines.

All sequences of a step are laid end to end, shard by shard, because whitening is over the whole step; columns come and go
as the object store has them, one a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.algorithms import correction as importance
from megarl.algorithms.inputs import call
from megarl.algorithms.kl_control import AdaptiveKl
from megarl.algorithms.ragged import sequence_sums
from megarl.algorithms.returns import AdvantagesAndReturns, explained_variance, kl_penalty, token_rewards, whiten
from megarl.algorithms.shaping import overlong_penalty
from megarl.core.errors import MegarlError
from megarl.core.types import Column, FloatArray, MicroBatch, Sample, Shard
from megarl.data.pack import FILLER_INDEX
from megarl.recipe.algorithm import Correction
from megarl.recipe.functions import advantage_function, asked, is_per_token, is_whitened, settings
from megarl.recipe.schema import Recipe
from megarl.rollout import filters
from megarl.rollout.local_advantages import column_names
from megarl.rollout.step_advantages import kl_weight

Columns = Mapping[str, Sequence[Column]]  # by name; one column a shard


@dataclass(frozen=True)
class Learnable:
    """What a step is learned from. columns: by name, one a shard: see `column_names`."""

    columns: dict[str, list[Column]]
    metrics: dict[str, float]


class Step:
    """A step's sequences end to end: T positions, S sequences."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._micros = [micro for shard in shards for mini in shard.mini_batches for micro in mini.micro_batches]
        self.mask = self._joined([micro.loss_mask for micro in self._micros])  # [T]
        lengths = [np.diff(micro.cu_seqlens) for micro in self._micros]
        self.cu_seqlens = np.concatenate([[0], *lengths]).cumsum()  # [S + 1]
        # [S], the sample of each sequence; FILLER_INDEX where there is none.
        self.sample_index = self._joined([micro.sample_index for micro in self._micros]).astype(np.int64)

    @staticmethod
    def _joined(parts: Sequence[Any]) -> FloatArray:
        joined: FloatArray = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return joined

    def own(self, name: str) -> FloatArray:
        """A column that the micro-batches carry themselves: [T]."""
        return self._joined([getattr(micro, name) for micro in self._micros])

    def flat(self, columns: Sequence[Column]) -> FloatArray:
        """A column of every shard as [T], 0 outside of the mask."""
        joined = self._joined([part for column in columns for mini in column for part in mini])
        return np.where(self.mask > 0, joined, 0).astype(np.float32)

    def at_ends(self, columns: Sequence[Column]) -> FloatArray:
        """What a column says at the last token of each sequence: [S]."""
        joined = self._joined([part for column in columns for mini in column for part in mini])
        ends: FloatArray = joined[self.cu_seqlens[1:] - 1] if len(joined) else joined
        return ends

    def after_label(self, columns: Sequence[Column]) -> FloatArray:
        """At each trained position what a column says one token later, of the state after the label: [T]."""
        joined = self._joined([part for column in columns for mini in column for part in mini])
        return np.where(self.mask > 0, np.append(joined[1:], np.float32(0)), 0).astype(np.float32)

    def by_sequence(self, values: FloatArray) -> FloatArray:
        """One number a sample [N] as one a sequence [S]; fillers have 0."""
        padded = np.append(values, np.float32(0))
        chosen: FloatArray = padded[np.where(self.sample_index == FILLER_INDEX, len(values), self.sample_index)]
        return chosen

    def by_sample(self, values: FloatArray, count: int) -> FloatArray:
        """One number a sequence [S] as one a sample [count]."""
        result = np.zeros(count, np.float32)
        real = self.sample_index != FILLER_INDEX
        result[self.sample_index[real]] = values[real]
        return result

    def spread(self, values: FloatArray) -> FloatArray:
        """One number a sample [N] at each of its trained positions: [T]."""
        return np.where(self.mask > 0, np.repeat(self.by_sequence(values), np.diff(self.cu_seqlens)), 0).astype(
            np.float32
        )

    def columns(self, values: FloatArray) -> list[Column]:
        """[T] as one column a shard."""
        result: list[Column] = []
        first = 0

        def piece(micro: MicroBatch) -> FloatArray:
            nonlocal first
            first += micro.num_tokens
            return np.ascontiguousarray(values[first - micro.num_tokens : first], np.float32)

        for shard in self._shards:
            result.append([[piece(micro) for micro in mini.micro_batches] for mini in shard.mini_batches])
        return result


class Advantages:
    """Makes the columns of a step; keeps the weight of the KL, which may be steered."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        algorithm = recipe.algorithm
        self._asked = asked(algorithm, "look")
        self._function = advantage_function(algorithm) if self._asked.advantages else None
        self._kl = kl_weight(algorithm)

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt has to be answered greedily too: ReMax."""
        return "greedy_rewards" in self._asked.advantage

    def state(self) -> dict[str, float]:
        """The KL's weight, for a checkpoint."""
        return {"kl_coef": self._kl.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on with a saved weight."""
        if isinstance(self._kl, AdaptiveKl):  # a weight that stays is the recipe's
            self._kl = replace(self._kl, coef=state["kl_coef"])

    def of_step(
        self, samples: Sequence[Sample], shards: Sequence[Shard], columns: Columns, greedy_rewards: FloatArray
    ) -> Learnable:
        """columns: those of the roles: old_logprobs, ref_logprobs, values, teacher_logprobs, scores, where there are some.

        greedy_rewards: [G] by group, empty where the advantage does not ask for them.
        """
        recipe, step = self._recipe, Step(shards)
        flat = {name: step.flat(column) for name, column in columns.items()}
        rollout = step.own("rollout_logprobs")
        flat.setdefault("old_logprobs", rollout)
        metrics: dict[str, float] = {}
        made = {"old_logprobs": flat["old_logprobs"]}
        if self._asked.advantages:
            made |= self._learned(step, samples, columns, flat, greedy_rewards, metrics)
        if recipe.algorithm.correction is not None:
            weights = _correction(recipe.algorithm.correction, step, flat["old_logprobs"], rollout, metrics)
            made["advantages"] = made["advantages"] * weights
        return Learnable({name: step.columns(made[name]) for name in column_names(recipe)}, metrics)

    def _learned(
        self,
        step: Step,
        samples: Sequence[Sample],
        columns: Columns,
        flat: Mapping[str, FloatArray],
        greedy_rewards: FloatArray,
        metrics: dict[str, float],
    ) -> dict[str, FloatArray]:
        """Advantages, and the returns that a critic learns: [T]."""
        recipe = self._recipe
        rewards, per_token = self._rewards(step, samples, columns, metrics)
        kl = self._kl_in_reward(step, flat, len(samples), metrics)
        advantages, returns = self._advantages(step, samples, rewards, per_token - kl, flat, greedy_rewards)
        if recipe.critic is None:
            return {"advantages": advantages}
        if returns is None:
            raise MegarlError(
                f"algorithm.advantage: {recipe.algorithm.advantage} gave no returns, which the critic learns. "
                "Return megarl.algorithms.returns.AdvantagesAndReturns, or remove the section `critic`."
            )
        metrics["critic/explained_variance"] = explained_variance(flat["values"], returns, step.mask)
        return {"advantages": advantages, "returns": returns}

    def _rewards(
        self, step: Step, samples: Sequence[Sample], columns: Columns, metrics: dict[str, float]
    ) -> tuple[FloatArray, FloatArray]:
        """Of each sample [N], and of each token [T]: the graders' less the overlong penalty, and the reward model's."""
        recipe = self._recipe
        rewards, per_token = filters.rewards(samples), np.zeros(len(step.mask), np.float32)
        share, most = recipe.algorithm.overlong_buffer, recipe.rollout.max_response_tokens
        if share is not None:
            lengths = [len(sample.response_ids) for sample in samples]
            rewards = rewards + overlong_penalty(lengths, most, max(1, round(share * most)))
        model = recipe.reward_model
        if model is not None:
            scores = step.by_sample(step.at_ends(columns["scores"]), len(samples))
            metrics["reward/model_score"] = float(scores.mean()) if len(scores) else 0.0
            if model.level == "sequence":
                rewards = rewards + np.float32(model.weight) * scores
            else:
                per_token = np.float32(model.weight) * step.after_label(columns["scores"])
        return rewards, per_token

    def _kl_in_reward(
        self, step: Step, flat: Mapping[str, FloatArray], num_samples: int, metrics: dict[str, float]
    ) -> FloatArray:
        """What the KL to the reference costs at each token: [T]. Steers its weight for the next step."""
        algorithm = self._recipe.algorithm
        if algorithm.kl_in != "reward" or algorithm.kl_coef == 0 or not self._asked.token_rewards:
            return np.zeros(len(step.mask), np.float32)
        kl = kl_penalty(flat["old_logprobs"], flat["ref_logprobs"], algorithm.kl_kind) * (step.mask > 0)
        mean = float(kl.sum() / max(1.0, float((step.mask > 0).sum())))
        metrics["reward/kl"], metrics["reward/kl_coef"] = mean, self._kl.coef
        cost: FloatArray = (self._kl.coef * kl).astype(np.float32)
        self._kl = self._kl.updated(mean, num_samples)
        return cost

    def _advantages(
        self,
        step: Step,
        samples: Sequence[Sample],
        rewards: FloatArray,
        per_token: FloatArray,
        flat: Mapping[str, FloatArray],
        greedy_rewards: FloatArray,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Advantages and returns, [T]. per_token: rewards of tokens, beside those of samples."""
        algorithm, function = self._recipe.algorithm, self._function
        assert function is not None, "nobody asked for advantages"
        by_sample = {
            "group_index": filters.group_index(samples),
            "lengths": np.array([int(sample.loss_mask.sum()) for sample in samples], np.int64),
            "mean_nll": filters.mean_nll(samples),
            "greedy_rewards": greedy_rewards,
            **settings(algorithm),
        }
        if not is_per_token(function):
            tokens = sequence_sums(per_token, step.mask, step.cu_seqlens).astype(np.float32)
            given = {"rewards": rewards + step.by_sample(tokens, len(samples)), **by_sample}
            return step.spread(np.asarray(call(function, given), np.float32)), None
        given = {
            "rewards": rewards,
            "token_rewards": token_rewards(step.by_sequence(rewards), step.mask, step.cu_seqlens) + per_token,
            "mask": step.mask,
            "cu_seqlens": step.cu_seqlens,
            "logprobs": flat["old_logprobs"],
            **{name: flat[name] for name in ("values", "ref_logprobs", "teacher_logprobs") if name in flat},
            **by_sample,
        }
        result = call(function, given)
        if not isinstance(result, AdvantagesAndReturns):
            return np.asarray(result, np.float32), None
        white = algorithm.whiten and is_whitened(algorithm)
        return (whiten(result.advantages, step.mask) if white else result.advantages), result.returns


def _correction(
    chosen: Correction, step: Step, trainer: FloatArray, rollout: FloatArray, metrics: dict[str, float]
) -> FloatArray:
    """Importance weights between rollout and trainer: [T], with their diagnostics."""
    given = {
        "ratios": importance.importance_ratios(trainer, rollout, step.mask, step.cu_seqlens, chosen.level),
        "mask": step.mask,
        "cu_seqlens": step.cu_seqlens,
        "min_ratio": chosen.low,
        "max_ratio": chosen.high,
    }
    made: importance.Correction = call(importance.CORRECTIONS[chosen.kind], given)
    sums = importance.weight_sums(made, step.mask)
    metrics["rollout/correction_ess"] = sums.effective_sample_size
    metrics["rollout/correction_touched"] = sums.share_touched
    return made.weights
