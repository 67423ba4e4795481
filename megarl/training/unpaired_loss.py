"""The loss of answers that are labelled one by one: KTO. The formula: algorithms/preference.

As in the losses of pairs, sums are over each sequence's masked positions, added up over context-parallel ranks with gradients,
and each rank counts a sequence by the weight of the positions that it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.algorithms.preference import accuracy, kto_loss
from megarl.recipe.supervised import Kto
from megarl.training.batch import DeviceBatch
from megarl.training.logprob import TokenScores
from megarl.training.metrics import LossOutput
from megarl.training.pair_losses import OverContext, masked_sums, reported_as


def kto_fn(settings: Kto, over_context: OverContext, kl: float) -> Callable[[TokenScores, DeviceBatch], LossOutput]:
    """KTO's loss of rewards beta (log-prob - reference's), summed over a response, beside beta kl: mean over rows.

    Column: ref_logprobs. kl: nats, at least 0, of the policy to its reference; without gradient. `megarl/sft.py` takes what this
    loss reports as kto/log_ratio of mismatched rows.
    over_context: as of `dpo_fn`.
    """
    beta = settings.beta

    def fn(scores: TokenScores, batch: DeviceBatch) -> LossOutput:
        assert batch.desirable is not None, "the micro-batch was not packed with labels"
        ratios = over_context(masked_sums(scores.logprobs - batch.columns["ref_logprobs"], batch))
        weights, desirable = masked_sums(batch.weights, batch), batch.desirable > 0
        sides = torch.where(desirable, 1.0, -1.0)
        lead = sides * beta * (ratios - kl)
        per_row = kto_loss(lead, torch.where(desirable, settings.desirable_weight, settings.undesirable_weight))
        reported = {
            "loss": per_row,
            "accuracy": accuracy(lead),
            "log_ratio": ratios,
            "kl": torch.full_like(weights, kl),
        }
        rewards = weights * beta * ratios.detach()
        means = {  # not by rows that a mask chooses, for whose number the host would wait
            f"kto/{name}_reward": (rewards.where(chosen, 0).sum(), weights.where(chosen, 0).sum())
            for name, chosen in (("desirable", desirable), ("undesirable", ~desirable))
        }
        loss = (weights * per_row).sum()
        return LossOutput(loss, batch.mask.sum(), reported_as("kto", weights, reported), weights.sum(), means=means)

    return fn
