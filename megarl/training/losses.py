"""Builds what the engine differentiates: from log-probs of the labels to a scalar, with metrics.

The mathematics is in megarl/algorithms; here it meets micro-batches, weights and names. A loss is always
`sum(weights * per-token loss)`: the denominator is in the weights (see core/types.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.inputs import LOSS_INPUTS, call, wanted
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.sequences import sequence_sums, spread_means
from megarl.algorithms.value_loss import clipped_value_loss
from megarl.core.errors import MegarlError
from megarl.core.types import TEACHER_TOP
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.functions import OF_TOP, is_own, policy_loss_function, settings
from megarl.training.batch import DeviceBatch, split_top
from megarl.training.logprob import TokenScores
from megarl.training.metrics import LossOutput
from megarl.training.pair_losses import dpo_fn, reward_fn
from megarl.training.spec import (
    DpoObjective,
    KtoObjective,
    Objective,
    PolicyObjective,
    RewardObjective,
    SftObjective,
    ValueObjective,
)
from megarl.training.unpaired_loss import kto_fn

OLD = "old_logprobs"
# Inputs of a policy loss that are no columns, or not of every mini-batch.
MADE = frozenset({"logprobs", OLD, "sequence_log_ratio", "sequence_mean"}) | OF_TOP

LossFn = Callable[[TokenScores, DeviceBatch], LossOutput]


@dataclass(frozen=True)
class Loss:
    """A loss function, and what it has to be given. group: where the gradient norm and the learning rate are reported.

    later: names of those that it reads from the second optimizer step of an update on; in the first it does without.
    at_kl: the function at a KL of policy and reference, where it asks for one; `fn` is that at 0.
    """

    fn: LossFn
    columns: frozenset[str]  # names of the columns that it reads in every optimizer step
    group: str = "actor"
    with_entropy: bool = True
    entropy_grad: bool = False
    later: frozenset[str] = frozenset()
    at_kl: Callable[[float], LossFn] | None = None

    def at(self, kl: float) -> Loss:
        """The loss at this KL, in nats; the same where it asks for none."""
        return self if self.at_kl is None else replace(self, fn=self.at_kl(kl))

    def read(self, step: int) -> frozenset[str]:
        """Names of the columns that an update's optimizer step reads. step: from 0."""
        return self.columns | self.later if step else self.columns

    def check(self, columns: Collection[str], num_steps: int = 1) -> None:
        """Raises MegarlError where the update of so many optimizer steps was given too few columns. columns: names."""
        missing = sorted(self.read(num_steps - 1) - set(columns))
        if missing:
            raise MegarlError(f"The loss needs the columns {missing}; the update was given {sorted(columns)}.")


def build_loss(objective: Objective, over_context: Callable[[Tensor], Tensor]) -> Loss:
    """The loss of an objective. over_context: sums a tensor over the ranks that hold parts of the same sequences.

    The sum has to be differentiable for the losses of pairs.
    """
    match objective:
        case PolicyObjective(algorithm, old_given):
            return policy_loss(algorithm, over_context, old_given=old_given)
        case ValueObjective(clip):
            return value_loss(clip)
        case SftObjective(dft):
            return sft_loss(dft=dft)
        case RewardObjective(center_coef):
            return Loss(reward_fn(center_coef, over_context), frozenset(), "rm", with_entropy=False)
        case DpoObjective(chosen):
            columns = frozenset({"ref_logprobs"} if chosen.with_reference else ())
            return Loss(dpo_fn(chosen, over_context), columns, "dpo", with_entropy=False)
        case KtoObjective(chosen):
            at_kl = partial(kto_fn, chosen, over_context)
            return Loss(at_kl(0.0), frozenset({"ref_logprobs"}), "kto", with_entropy=False, at_kl=at_kl)


def policy_loss(
    algorithm: Algorithm, over_context: Callable[[Tensor], Tensor] = lambda part: part, *, old_given: bool = True
) -> Loss:
    """The algorithm's policy loss, plus kl_coef times the KL to the reference, minus entropy_coef times the entropy.

    Columns: old_logprobs, those that the policy loss asks for, and ref_logprobs where a KL is in the loss. teacher_top where it
    asks for what policy and teacher say of the teacher's likeliest labels.
    over_context: sums a tensor over the ranks that hold parts of the same sequences. old_given: off, old_logprobs are a column
    from the second optimizer step on: in the first, whose weights are still those that sampled, the loss is given its own,
    without their gradient.
    """
    function, chosen = policy_loss_function(algorithm), settings(algorithm)
    asked = wanted(function, LOSS_INPUTS)
    flat = asked - MADE
    with_kl = algorithm.kl_in == "loss" and algorithm.kl_coef > 0

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        assert scores.entropy is not None, "the policy loss reports entropy"
        mask, weights = batch.mask, batch.weights
        # Masked before anything is computed: a weight of zero would not silence an infinity, nor its gradient.
        logprobs, entropy = _masked(scores.logprobs, mask), _masked(scores.entropy, mask)
        old = _old(batch, logprobs)
        given: dict[str, Any] = {name: _masked(batch.columns[name], mask) for name in flat} | {OLD: old}
        given |= {"logprobs": logprobs, "sequence_mean": partial(_sequence_mean, batch, over_context)}
        if "sequence_log_ratio" in asked:
            given["sequence_log_ratio"] = given["sequence_mean"](logprobs - old)
        if asked & OF_TOP:
            given |= _top_inputs(scores, batch)
        per_token, clipped = _checked(call(function, {**chosen, **given}), mask, algorithm)
        policy = total = (weights * per_token).sum()
        weighted = {"actor/pg_loss": policy}
        if with_kl:
            reference = _masked(batch.columns["ref_logprobs"], mask)
            kl = (weights * kl_estimate(logprobs, reference, algorithm.kl_kind)).sum()
            total = total + algorithm.kl_coef * kl
            weighted["actor/kl_loss"] = kl
        if algorithm.entropy_coef > 0:
            total = total - algorithm.entropy_coef * (weights * entropy).sum()
        # Where the rollout's own are the old ones, these would be compared with themselves.
        trainers = logprobs.detach() if algorithm.old_logprobs == "rollout" else old
        difference = (_masked(batch.rollout_logprobs, mask) - trainers).abs()
        rest = given["teacher_top_logprobs"][:, -1].exp() * mask if asked & OF_TOP else None
        return LossOutput(
            loss=total,
            num_tokens=mask.sum(),
            weighted={"actor/loss": total, **weighted},
            sums={
                "actor/pg_clipfrac": (clipped * mask).sum(),
                # KL(old || new) from samples of old: k3 with the new policy in the reference's place.
                "actor/approx_kl": kl_estimate(old, logprobs.detach(), "k3").sum(),
                "actor/entropy": entropy.detach().sum(),
                "rollout/logprob_diff_mean": difference.sum(),
                **({} if rest is None else {"actor/teacher_rest": rest.sum()}),
            },
            maxima={"rollout/logprob_diff_max": difference.max()},
        )

    read = flat | ({"ref_logprobs"} if with_kl else set()) | ({TEACHER_TOP} if asked & OF_TOP else set())
    always = read | {OLD} if old_given else read
    return Loss(fn, always, entropy_grad=algorithm.entropy_coef > 0, later=frozenset({OLD}) - always)


def _old(batch: DeviceBatch, logprobs: Tensor) -> Tensor:
    """The old log-probs: the column, or those of the update's own forward pass where there is none."""
    column = batch.columns.get(OLD)
    return logprobs.detach() if column is None else _masked(column, batch.mask)


def _top_inputs(scores: TokenScores, batch: DeviceBatch) -> dict[str, Tensor]:
    """What policy and teacher say of the teacher's likeliest labels and of all others: [T, k + 1], 0 where not trained."""
    assert scores.top is not None, "the engine scores the teacher's labels"
    _, theirs = split_top(batch.columns[TEACHER_TOP])
    mine, theirs = (_masked(logprobs, batch.mask[:, None]) for logprobs in (scores.top, theirs))
    return {"top_logprobs": mine, "teacher_top_logprobs": theirs}


def _checked(found: Any, mask: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """What a policy loss gave, loss and clipped, both [T]. Raises MegarlError where it is a user's and gave something else."""
    if not is_own(algorithm.policy_loss):
        return found.loss, found.clipped
    who = f"algorithm.policy_loss: {algorithm.policy_loss} gave"
    if not isinstance(found, PolicyLoss):
        raise MegarlError(f"{who} a {type(found).__name__}; a megarl.algorithms.policy_loss.PolicyLoss is needed.")
    for name, values in (("loss", found.loss), ("clipped", found.clipped)):
        if values.shape != mask.shape:
            raise MegarlError(
                f"{who} a {name} of shape {tuple(values.shape)}; {tuple(mask.shape)} is needed: one number for each token, "
                "which are weighted and summed elsewhere."
            )
    if not (finite := found.loss.isfinite()).all():
        inside, outside = (int((~finite & chosen).sum()) for chosen in (mask > 0, mask == 0))
        raise MegarlError(
            f"{who} losses that are not finite, of {inside} trained tokens and {outside} others. Where a token is not trained on "
            "all inputs are 0, and so are advantages where all rewards of a group are equal: divide by nothing that can be 0."
        )
    return found.loss, found.clipped


def _sequence_mean(batch: DeviceBatch, over_context: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Mean of values [T] over the trained tokens of each position's sequence: [T], no gradient."""
    number = len(batch.cu_seqlens) - 1
    both = torch.stack(
        [sequence_sums(each, batch.sequence, number) for each in (_masked(values.detach(), batch.mask), batch.mask)]
    )
    sums, counts = over_context(both)
    return spread_means(sums, counts, batch.sequence)


def value_loss(clip_range: float | None) -> Loss:
    """The clipped value loss of a critic, whose score head stands in the place of log-probs.

    Columns: values, of the critic before the step, and returns.
    """

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        mask = batch.mask
        values, old, returns = (
            _masked(x, mask) for x in (scores.logprobs, batch.columns["values"], batch.columns["returns"])
        )
        per_token, clipped = clipped_value_loss(values, old, returns, clip_range)
        loss = (batch.weights * per_token).sum()
        return LossOutput(
            loss=loss,
            num_tokens=mask.sum(),
            weighted={"critic/vf_loss": loss},
            sums={
                "critic/vf_clipfrac": (clipped * mask).sum(),
                "critic/values": values.detach().sum(),
                "critic/returns": returns.sum(),
            },
        )

    return Loss(fn, frozenset({"values", "returns"}), "critic", with_entropy=False)


def sft_loss(*, dft: bool = False) -> Loss:
    """Cross entropy of the demonstrations' labels.

    dft: each label's times its probability, without the gradient of the latter (arXiv 2508.05629, equation 9).
    """

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        logprobs = _masked(scores.logprobs, batch.mask)
        per_token = -logprobs * logprobs.detach().exp() if dft else -logprobs
        loss = (batch.weights * per_token).sum()
        return LossOutput(loss=loss, num_tokens=batch.mask.sum(), weighted={"sft/loss": loss})

    return Loss(fn, frozenset(), with_entropy=False)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values on trained labels, 0 elsewhere: [T]; stops gradients elsewhere."""
    return values.where(mask > 0, 0)
