"""Policy losses, per token: what is minimised so that better samples become likelier. Weighting is not done here.

All are linear in the advantages as long as these keep their sign, so that an off-policy correction may multiply them.
Loads without torch: what a recipe reads follows from these functions' parameters, and it is read in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.limits import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(NamedTuple):
    """Per-token values, each [T].

    loss: differentiable. clipped: bool, where a bound on the ratio decided the loss: no gradient flows there, but for
    CISPO's. ratio: detached.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with ratio = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347, equation 7), with a clip range of two sides (DAPO, arXiv 2503.14476, section 3.1).
    With dual_clip = c, the loss of a negative advantage is at most -c A, however large the ratio (arXiv 1912.09729).
    The log ratio is clamped to +-20, so that a token which became extremely likely or unlikely stays finite.

    logprobs: [T] float, natural log, of the policy under training. old_logprobs: [T], of the policy that the ratio is
    taken against. advantages: [T]. Only logprobs receives a gradient. Raises ValueError where dual_clip is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds the ratio from above, so it must be above 1; got {dual_clip}")
    ratio = _ratio(logprobs, old_logprobs)
    advantages = advantages.detach()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, clipped = plain.maximum(bounded), bounded > plain
    if dual_clip is not None:
        # A positive advantage has a loss below 0, and its bound would be too: only the negative ones are bounded.
        most = (-dual_clip * advantages).where(advantages < 0, float("inf"))
        clipped = clipped | (loss > most)
        loss = loss.minimum(most)
    return PolicyLoss(loss=loss, clipped=clipped, ratio=ratio.detach())


def gspo_loss(
    logprobs: Tensor, advantages: Tensor, sequence_log_ratio: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of logprobs - old_logprobs over the sequence).

    GSPO (arXiv 2507.18071), in the paper's token form: the value of s is the sequence's, and its
    gradient reaches each token as s times that of the token's own log-prob. Weighted as sequence-mean, the gradient is that
    of the sequence form. A sequence may be cut over ranks: its mean comes in from outside, see
    megarl.algorithms.sequences.

    logprobs: [T] float, natural log, of the policy under training. advantages: [T]. sequence_log_ratio: [T], each token's
    own sequence's mean; no gradient; clamped to +-20. Only logprobs receives a gradient.
    """
    bounded_mean = sequence_log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded_mean.exp() * (logprobs - logprobs.detach()).exp()
    advantages = advantages.detach()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(loss=plain.maximum(bounded), clipped=bounded > plain, ratio=ratio.detach())


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_mean: Callable[[Tensor], Tensor],
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-s A, s = exp(mean of l over the sequence), l = min(logprobs - old_logprobs, clip_high), or max(.., -clip_low) where A < 0.

    GMPO (arXiv 2507.20673): the geometric mean of the tokens' ratios. As in PPO, only what would be gained beyond a bound is cut;
    bounds are of the log ratio. The value of s is the sequence's, and its gradient reaches each token that is inside of its bound
    as s times that of the token's own log-prob. Weighted as sequence-mean, the gradient is that of the sequence form.

    Arguments as for clipped_policy_loss. sequence_mean: gives each token the mean over its sequence of what it is given, [T];
    over whole sequences, see megarl.algorithms.sequences. No gradient goes through it.
    """
    advantages = advantages.detach()
    log_ratio = (logprobs - old_logprobs).detach()
    finite = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded = finite.clamp(max=clip_high).where(advantages >= 0, finite.clamp(min=-clip_low))
    clipped = bounded != log_ratio
    own = (logprobs - logprobs.detach()).where(~clipped, 0).exp()
    ratio = sequence_mean(bounded).detach().exp() * own
    return PolicyLoss(loss=-ratio * advantages, clipped=clipped, ratio=ratio.detach())


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) A logprobs, without a gradient through the ratio: no token is dropped.

    CISPO (MiniMax-M1, arXiv 2506.13585); the paper leaves out the lower bound: clip_low = 1.

    Arguments as for clipped_policy_loss. `clipped` says where the weight was bounded; the gradient flows all the same.
    """
    ratio = _ratio(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(loss=-weight * advantages.detach() * logprobs, clipped=weight != ratio, ratio=ratio)


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A logprobs: the policy gradient as it stands, without a ratio.

    REINFORCE (Williams, 1992); GPG's loss too (arXiv 2504.02546), which is told apart by its
    advantages. True to the samples for the first mini-batch of a step; later ones were sampled by an older policy.

    Arguments as for clipped_policy_loss; old_logprobs are for the ratio alone, which is reported and not used.
    """
    ratio = _ratio(logprobs.detach(), old_logprobs)
    return PolicyLoss(loss=-advantages.detach() * logprobs, clipped=_nowhere(ratio), ratio=ratio)


def distill_loss(logprobs: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor) -> PolicyLoss:
    """-ratio (teacher_logprobs - logprobs), without a gradient through the difference: the reverse KL to a teacher.

    Its expected gradient, over tokens sampled from the old policy, is that of KL(policy || teacher) at each position
    (on-policy distillation, arXiv 2306.08543, 2306.13649). The difference is clamped to +-20.

    logprobs, old_logprobs: as for clipped_policy_loss. teacher_logprobs: [T], of the same tokens; no gradient.
    """
    ratio = _ratio(logprobs, old_logprobs)
    gain = (teacher_logprobs - logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return PolicyLoss(loss=-ratio * gain, clipped=_nowhere(ratio), ratio=ratio.detach())


def distill_top_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    top_logprobs: Tensor,
    teacher_top_logprobs: Tensor,
    distill_beta: float,
    distill_forward_weight: float | None = None,
) -> PolicyLoss:
    """How far policy and teacher are apart, over the teacher's k likeliest tokens and, as one more class, all others.

    P is the teacher's, Q the policy's, M = beta P + (1 - beta) Q: beta KL(P || M) + (1 - beta) KL(Q || M), the generalized
    Jensen-Shannon divergence (arXiv 2306.13649, equation 1). At the ends, where that is 0, stand the limits of its quotients by
    beta and by 1 - beta: at 0 the forward KL(P || Q), at 1 the reverse KL(Q || P). It is at most that over the whole
    vocabulary. Its gradient needs no samples, and none goes through which positions the policy comes to.
    With distill_forward_weight = w it is w KL(P || Q) + (1 - w) KL(Q || P) in the place of all that.

    logprobs, old_logprobs: [T], for the ratio alone, which is reported and not used. top_logprobs, teacher_top_logprobs:
    [T, k + 1], natural log, the last that of all other tokens; only top_logprobs receives a gradient.
    """
    policy, teacher = top_logprobs, teacher_top_logprobs.detach()
    if distill_forward_weight is not None:
        loss = distill_forward_weight * _kl(teacher, policy) + (1 - distill_forward_weight) * _kl(policy, teacher)
    elif distill_beta == 0:
        loss = _kl(teacher, policy)
    elif distill_beta == 1:
        loss = _kl(policy, teacher)
    else:
        middle = (teacher + math.log(distill_beta)).logaddexp(policy + math.log1p(-distill_beta))
        loss = distill_beta * _kl(teacher, middle) + (1 - distill_beta) * _kl(policy, middle)
    ratio = _ratio(logprobs.detach(), old_logprobs)
    return PolicyLoss(loss=loss, clipped=_nowhere(ratio), ratio=ratio)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one || other) of log-probs [T, n]: [T]."""
    return (one.exp() * (one - other)).sum(dim=-1)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _nowhere(like: Tensor) -> Tensor:
    return like.new_zeros(like.shape).bool()


# By the name that a recipe gives; a loss of somebody's own comes by import path instead.
POLICY_LOSSES: Mapping[str, Callable[..., PolicyLoss]] = MappingProxyType(
    {
        "ppo": clipped_policy_loss,
        "gspo": gspo_loss,
        "gmpo": gmpo_loss,
        "cispo": cispo_loss,
        "gpg": reinforce_loss,
        "reinforce": reinforce_loss,
        "distill": distill_loss,
        "distill_top": distill_top_loss,
    }
)
