"""Builds what the engine differentiates: from log-probs of the labels to a scalar, with metrics.

The mathematics is in megarl/algorithms; here it meets micro-batches, weights and names. A loss is always
`sum(weights * per-token loss)`: the denominator is in the weights (see core/types.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.policy_loss import clipped_policy_loss
from megarl.recipe.schema import Algorithm
from megarl.training.batch import DeviceBatch
from megarl.training.logprob import TokenScores
from megarl.training.metrics import LossOutput


@dataclass(frozen=True)
class Loss:
    """A loss function, and what it has to be given."""

    fn: Callable[[TokenScores, DeviceBatch], LossOutput]
    columns: frozenset[str]  # names of the columns that it reads
    with_entropy: bool = True
    entropy_grad: bool = False


def policy_loss(algorithm: Algorithm) -> Loss:
    """The clipped policy loss, plus kl_coef times the KL to the reference, minus entropy_coef times the entropy.

    Columns: old_logprobs, advantages, and ref_logprobs where there is a KL. GRPO: arXiv 2402.03300, equation 3.
    """

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        logprobs, entropy = scores.logprobs, scores.entropy
        assert entropy is not None, "the policy loss reports entropy"
        old, mask, weights = batch.columns["old_logprobs"], batch.mask, batch.weights
        per_token, clipped, _ = clipped_policy_loss(
            logprobs, old, batch.columns["advantages"], algorithm.clip_low, algorithm.clip_high
        )
        policy = total = (weights * per_token).sum()
        weighted = {"actor/pg_loss": policy}
        if algorithm.kl_coef > 0:
            kl = (weights * kl_estimate(logprobs, batch.columns["ref_logprobs"], algorithm.kl_kind)).sum()
            total = total + algorithm.kl_coef * kl
            weighted["actor/kl_loss"] = kl
        if algorithm.entropy_coef > 0:
            total = total - algorithm.entropy_coef * (weights * entropy).sum()
        difference = _masked((batch.rollout_logprobs - old).abs(), mask)
        return LossOutput(
            loss=total,
            num_tokens=mask.sum(),
            weighted={"actor/loss": total, **weighted},
            sums={
                "actor/pg_clipfrac": _masked(clipped.float(), mask).sum(),
                # KL(old || new) from samples of old: k3 with the new policy in the reference's place.
                "actor/approx_kl": _masked(kl_estimate(old, logprobs.detach(), "k3"), mask).sum(),
                "actor/entropy": _masked(entropy.detach(), mask).sum(),
                "rollout/logprob_diff_mean": difference.sum(),
            },
            maxima={"rollout/logprob_diff_max": difference.max()},
        )

    columns = {"old_logprobs", "advantages"} | ({"ref_logprobs"} if algorithm.kl_coef > 0 else set())
    return Loss(fn, frozenset(columns), entropy_grad=algorithm.entropy_coef > 0)


def sft_loss() -> Loss:
    """Cross entropy of the demonstrations' labels."""

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        loss = -(batch.weights * scores.logprobs).sum()
        return LossOutput(loss=loss, num_tokens=batch.mask.sum(), weighted={"sft/loss": loss})

    return Loss(fn, frozenset(), with_entropy=False)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values on trained labels, 0 elsewhere: [T]. Not a product: what lies outside the mask may be infinite."""
    return values.where(mask > 0, 0)
