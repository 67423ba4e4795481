"""Policy losses, per token: what is minimised so that better samples become likelier. Weighting is not done here."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# exp(20) = 4.9e8: far outside any clip range, far inside float32, also when multiplied by an advantage and summed.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """Per-token values, each [T].

    loss: differentiable. clipped: bool, where the clip decided the loss, so that no gradient flows. ratio: detached.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with ratio = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347, equation 7), with a clip range of two sides (DAPO, arXiv 2503.14476, section 3.1).
    The log ratio is clamped to +-20, so that a token which became extremely likely or unlikely stays finite.

    logprobs: [T] float, natural log, of the policy under training. old_logprobs: [T], of the policy that the ratio is
    taken against. advantages: [T]. Only logprobs receives a gradient.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = advantages.detach()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(loss=plain.maximum(bounded), clipped=bounded > plain, ratio=ratio.detach())
