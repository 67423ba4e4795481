"""Losses over pairs of sequences: Bradley-Terry for reward models, DPO and its kin for policies; formulas: algorithms/preference.

Sequences 2i and 2i + 1 of a micro-batch are a pair (core/types.py). What is compared are sums over each sequence's masked
positions: of a score head the mask marks the last token alone, of a policy the response. Under context parallel a rank holds
parts of sequences, so the sums are added up over these ranks, with gradients. Each rank counts a pair by the weight of the
positions that it holds: its loss, and what it reports, is its share, and the shares add up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.preference import (
    accuracy,
    apo_down_loss,
    apo_zero_loss,
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    log_odds,
    robust_loss,
)
from megarl.algorithms.sequences import sequence_sums
from megarl.recipe.supervised import Dpo
from megarl.training.batch import DeviceBatch
from megarl.training.logprob import TokenScores
from megarl.training.metrics import LossOutput

OverContext = Callable[[Tensor], Tensor]


def reward_fn(center_coef: float, over_context: OverContext) -> Callable[[TokenScores, DeviceBatch], LossOutput]:
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, mean over pairs.

    The score head stands in the place of log-probs (arXiv 2203.02155, equation 1; centring: 2312.09244).
    over_context: sums a tensor over the ranks that hold parts of the same sequences, differentiably.
    """

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        chosen, rejected = _pairs(over_context(masked_sums(scores.logprobs, batch)))
        weights, lead = _weights(batch), chosen - rejected
        per_pair = bradley_terry_loss(lead - _margins(batch)) + center_coef * (chosen + rejected).square()
        loss = (weights * per_pair).sum()
        reported = {"loss": per_pair, "accuracy": accuracy(lead), "margin": lead, "score": (chosen + rejected) / 2}
        return LossOutput(loss, batch.mask.sum(), reported_as("rm", weights, reported), weights.sum())

    return fn


def dpo_fn(settings: Dpo, over_context: OverContext) -> Callable[[TokenScores, DeviceBatch], LossOutput]:
    """The loss of rewards of a response, of r_chosen - r_rejected - margin.

    r = beta (log-prob - reference's), summed over a response: DPO (arXiv 2305.18290, equation 7), cDPO, rDPO, the hinge, APO, IPO
    (2310.12036, equation 17); with length_normalized the mean over the response's tokens takes the place of the sum. Column:
    ref_logprobs.
    Without a reference, of the mean log-prob m of a response's tokens: r = beta m is SimPO (2405.14734, equation 6), r = the log
    odds of m is ORPO (2403.07691, equations 6 and 7), whose loss counts beta.
    sft_coef, 1 in ORPO, adds the better answer's own loss, -m (2404.19733, equation 1).
    over_context: sums a tensor over the ranks that hold parts of the same sequences, differentiably.
    """
    beta, sft_coef = settings.beta, 1.0 if settings.loss == "orpo" else settings.sft_coef

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        logprobs = scores.logprobs
        compared = logprobs - batch.columns["ref_logprobs"] if settings.with_reference else logprobs
        columns = compared, logprobs, torch.ones_like(batch.mask)
        ratios, said, counts = over_context(torch.stack([masked_sums(each, batch) for each in columns]))
        counts = counts.clamp(min=1)
        if settings.length_normalized or not settings.with_reference:
            ratios = ratios / counts
        chosen, rejected = map(log_odds, _pairs(ratios)) if settings.loss == "orpo" else _pairs(beta * ratios)
        weights, ahead = _weights(batch), chosen - rejected
        lead = ahead - _margins(batch) - settings.margin
        per_pair = _compared(settings, chosen, rejected, lead)
        if sft_coef:
            per_pair = per_pair - sft_coef * _pairs(said / counts)[0]
        loss = (weights * per_pair).sum()
        reported = {
            "loss": per_pair,
            "accuracy": accuracy(ahead),
            "margin": ahead,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        return LossOutput(loss, batch.mask.sum(), reported_as("dpo", weights, reported), weights.sum())

    return fn


def _compared(settings: Dpo, chosen: Tensor, rejected: Tensor, lead: Tensor) -> Tensor:
    """The loss of each pair, from its two rewards and from how far the chosen one leads by: all [P]."""
    match settings.loss:
        case "ipo":
            loss = ipo_loss(lead, settings.beta)
        case "hinge":
            loss = hinge_loss(lead)
        case "robust":
            loss = robust_loss(lead, settings.label_smoothing)
        case "apo_zero":
            loss = apo_zero_loss(chosen, rejected)
        case "apo_down":
            loss = apo_down_loss(chosen, lead)
        case "sigmoid" | "simpo":
            loss = bradley_terry_loss(lead, settings.label_smoothing)
        case "orpo":
            loss = settings.beta * bradley_terry_loss(lead, settings.label_smoothing)
    return loss


def masked_sums(values: Tensor, batch: DeviceBatch) -> Tensor:
    """Sum of the values at each sequence's masked positions on this rank: [S]; stops gradients elsewhere."""
    return sequence_sums(values.where(batch.mask > 0, 0), batch.sequence, len(batch.cu_seqlens) - 1)


def _pairs(of_sequences: Tensor) -> tuple[Tensor, Tensor]:
    """[S] -> (chosen, rejected), each [S // 2]; a filler is one sequence, and no pair."""
    end = len(of_sequences) // 2 * 2
    return of_sequences[0:end:2], of_sequences[1:end:2]


def _weights(batch: DeviceBatch) -> Tensor:
    """What each pair counts for on this rank: [S // 2]; over all ranks and micro-batches they sum to 1."""
    chosen, rejected = _pairs(masked_sums(batch.weights, batch))
    return chosen + rejected


def _margins(batch: DeviceBatch) -> Tensor:
    assert batch.margins is not None, "the micro-batch was not packed as pairs"
    return batch.margins


def reported_as(group: str, weights: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What metrics of these names are the weighted sums of: weights and each of the values are [S] or of pairs."""
    return {f"{group}/{name}": (weights * each.detach()).sum() for name, each in values.items()}
