"""What a step is learned from, over all collectors: advantages of samples, moments for whitening, the weight of the KL.

The coordinator's side of the two turns of local_advantages.py; it sees numbers, never tokens. For each step:

    measured = [LocalAdvantages.measure(samples, blocks, columns, kl_coef=step.kl_coef) at each collector]
    settled  = step.settle(facts, measured)                     # one for each collector; steers the weight of the KL
    learned  = [LocalAdvantages.finish(settled[i]) at collector i]
    metrics  = step.metrics(measured, [each.sums for each in learned])

Advantages of samples are the same to the bit however samples lie in collectors; those of tokens up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.correction import WeightSums, add_up
from megarl.algorithms.inputs import call
from megarl.algorithms.kl_control import AdaptiveKl, FixedKl, KlController
from megarl.algorithms.moments import merge, moments
from megarl.algorithms.returns import explained_variance, whiten
from megarl.core.types import FloatArray, IntArray
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.functions import advantage_function, asked, is_per_token, is_whitened, settings
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import StepSamples
from megarl.rollout.drift import MEASURED
from megarl.rollout.facts import Flags
from megarl.rollout.local_advantages import Measured, Settled, checked, graders_of, sample_rewards
from megarl.rollout.sequences import joined


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step's N samples, in the order of the step, and of its G groups.

    rewards: [N] float32, the graders'. group_index: [N] int64 from 0. response_tokens, trained_tokens: [N] int64.
    mean_nll: [N] float32. truncated: [N] bool. reward_parts: [N, K] float64, of StepSamples. greedy_rewards: [G] float32, of the
    greedy answer to each group's prompt, less the overlong penalty; looked at only where `StepAdvantages.needs_greedy`, and then
    every number has to be finite. step: its number, from 1.
    """

    step: int
    rewards: FloatArray
    group_index: IntArray
    response_tokens: IntArray
    trained_tokens: IntArray
    mean_nll: FloatArray
    truncated: Flags
    reward_parts: NDArray[np.float64]
    greedy_rewards: FloatArray

    @classmethod
    def of(cls, samples: StepSamples) -> StepFacts:
        """Of these samples."""
        return cls(
            samples.step,
            samples.rewards,
            samples.group_index,
            samples.response_tokens,
            samples.trained_tokens,
            samples.mean_nll,
            samples.truncated,
            samples.reward_parts,
            samples.greedy_rewards,
        )


class StepAdvantages:
    """Settles what collectors measured; keeps the weight of the KL, which may be steered."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._asked = asked(recipe.algorithm, "look")
        self._function = advantage_function(recipe.algorithm) if self._asked.advantages else None
        self._kl = kl_weight(recipe.algorithm)
        self._before: tuple[int, KlController] | None = None  # a step that was settled, and the KL's weight before it

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt has to be answered greedily too: ReMax."""
        return "greedy_rewards" in self._asked.advantage

    @property
    def kl_coef(self) -> float:
        """What a nat of the KL in the reward costs in the step that is settled next."""
        return self._kl.coef

    def state(self) -> dict[str, float]:
        """The KL's weight, for a checkpoint."""
        return {"kl_coef": self._kl.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on with a saved weight."""
        if isinstance(self._kl, AdaptiveKl):  # a weight that stays is the recipe's
            self._kl = replace(self._kl, coef=state["kl_coef"])

    def settle(self, facts: StepFacts, measured: Sequence[Measured]) -> list[Settled]:
        """One for each collector, in their order. It steers the weight of the KL: once a step, however often it is asked.

        Not while the critic alone learns: the actor stands still then, and its KL says nothing of the weight. Nor by a step that
        is left out: its samples are not trusted, and the KL is measured on them.

        measured: of all collectors that hold samples of the step, in any order, those without samples too if you like.
        Raises ValueError as the advantage does, for rewards that are not finite.
        """
        known = np.sort(joined([each.sample_index for each in measured]))
        assert np.array_equal(known, np.arange(len(facts.rewards))), "not every sample was measured once"
        if self._before is not None and self._before[0] == facts.step:
            self._kl = self._before[1]
        self._before = facts.step, self._kl
        kl, critic = _kl_mean(measured), self._recipe.critic
        moves = critic is None or facts.step > critic.warmup_steps
        if kl is not None and moves and not self._drifted(_drift(measured)):
            self._kl = self._kl.updated(kl, len(facts.rewards))
        if self._function is None:
            return [Settled() for _ in measured]
        if is_per_token(self._function):
            parts = [each.unwhitened for each in measured if each.unwhitened is not None]
            return [Settled(over=merge(parts) if parts else None) for _ in measured]
        advantages = self._of_samples(facts, measured)
        return [Settled(advantages=advantages[each.sample_index]) for each in measured]

    def metrics(self, measured: Sequence[Measured], sums: Sequence[WeightSums]) -> dict[str, float]:
        """Of a step, over all collectors. sums: `Learned.sums` of each."""
        found: dict[str, float] = {}
        if any(each.scores is not None for each in measured):
            scores = _by_sample([each.scores for each in measured], measured)
            found["reward/model_score"] = float(scores.mean()) if len(scores) else 0.0
        kl = _kl_mean(measured)
        if kl is not None:
            found["reward/kl"], found["reward/kl_coef"] = kl, measured[0].kl_coef
        if (drift := _drift(measured)) is not None:
            found[MEASURED] = drift
            found["rollout/drifted"] = float(self._drifted(drift))
        returns = [each.returns for each in measured if each.returns is not None]
        if returns:
            residuals = [each.residuals for each in measured if each.residuals is not None]
            found["critic/explained_variance"] = explained_variance(merge(residuals), merge(returns))
        if self._recipe.algorithm.correction is not None:
            whole = add_up(sums)
            found["rollout/correction_ess"] = whole.effective_sample_size
            found["rollout/correction_touched"] = whole.share_touched
        return found

    def _drifted(self, drift: float | None) -> bool:
        """Whether rollout and trainer are too far apart; what is no number is. drift: nats, None where nobody asked."""
        return drift is not None and not drift <= (self._recipe.algorithm.max_logprob_diff or math.inf)

    def _of_samples(self, facts: StepFacts, measured: Sequence[Measured]) -> FloatArray:
        """[N] float32."""
        assert self._function is not None, "nobody asked for advantages"
        scores = _by_sample([each.scores for each in measured], measured)
        rewards = sample_rewards(self._recipe, facts.rewards, facts.response_tokens, scores)
        given = {
            "rewards": rewards + _by_sample([each.token_rewards for each in measured], measured),
            "group_index": facts.group_index,
            "lengths": facts.trained_tokens,
            "mean_nll": facts.mean_nll,
            "truncated": facts.truncated,
            "reward_parts": facts.reward_parts,
            "greedy_rewards": facts.greedy_rewards,
            **graders_of(self._recipe),
            **settings(self._recipe.algorithm),
        }
        trained = facts.trained_tokens > 0
        advantages = checked(call(self._function, given), trained, self._recipe.algorithm)
        if not is_whitened(self._recipe.algorithm):
            return advantages
        return whiten(advantages, trained, over=moments(advantages, facts.trained_tokens))


def kl_weight(algorithm: Algorithm) -> KlController:
    """The controller of the KL's weight that a recipe asks for."""
    steered = algorithm.kl_control
    if steered is None:
        return FixedKl(algorithm.kl_coef)
    return AdaptiveKl(algorithm.kl_coef, target=steered.target, horizon=steered.horizon)


def _by_sample(parts: Sequence[NDArray[np.floating] | None], measured: Sequence[Measured]) -> NDArray[np.floating]:
    """Numbers of samples from all collectors in the order of the step: [N]; empty where nobody measured any."""
    known = [(part, each.sample_index) for part, each in zip(parts, measured, strict=True) if part is not None]
    whole = joined([part for part, _ in known])
    order = joined([index for _, index in known])
    return whole[np.argsort(order)]


def _kl_mean(measured: Sequence[Measured]) -> float | None:
    """Nats a trained token; None where the KL is not in the reward, or no token is trained on: that is no KL of 0."""
    if not any(each.trained_tokens for each in measured):
        return None
    return _mean([each.kl for each in measured], measured)


def _drift(measured: Sequence[Measured]) -> float | None:
    """Nats a trained token between rollout and trainer; None where that is not bounded."""
    return _mean([each.logprob_diff for each in measured], measured)


def _mean(parts: Sequence[NDArray[np.floating] | None], measured: Sequence[Measured]) -> float | None:
    """Of sums of samples, a trained token; None where nobody measured any. The sum is over samples in their order."""
    if all(part is None for part in parts):
        return None
    return float(_by_sample(parts, measured).sum() / max(1.0, float(sum(each.trained_tokens for each in measured))))
