"""Losses of preferences, to minimise: of pairs, by how far a chosen answer is ahead of a rejected one, and of single answers.

What leads and rewards are made of is for the caller: scores of a reward model, or beta times a policy's log-ratio to a reference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

CERTAIN = -1e-6  # log-prob, of a mean token


def bradley_terry_loss(lead: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(lead) - e log sigmoid(-lead): [P] float.

    The likelihood of preferences under Bradley and Terry's model: of a reward model (arXiv 2203.02155, equation 1), and of
    DPO (2305.18290, equation 7). label_smoothing: e, the share of pairs that are the wrong way round (cDPO); 0 is none.

    lead: [P] float, the chosen one's score less the rejected one's, less the margin. Raises ValueError where e is not in
    [0, 0.5).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5; got {label_smoothing}")
    return -(1 - label_smoothing) * logsigmoid(lead) - label_smoothing * logsigmoid(-lead)


def ipo_loss(lead: Tensor, beta: float) -> Tensor:
    """((lead - 1/2) / beta)^2 = (h - 1 / (2 beta))^2 for lead = beta h: [P] float.

    IPO (arXiv 2310.12036, equation 17), whose tau is beta and whose h is the difference of log-ratios.

    lead: [P] float, beta times that difference, less the margin. Raises ValueError where beta is not above 0.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0; got {beta}")
    return ((lead - 0.5) / beta).square()


def robust_loss(lead: Tensor, label_smoothing: float) -> Tensor:
    """(-(1 - e) log sigmoid(lead) + e log sigmoid(-lead)) / (1 - 2 e): [P] float.

    Of rDPO (arXiv 2403.00409): in the mean over labels of which a share e is the wrong way round it is the loss of right ones.

    lead: as of `bradley_terry_loss`. label_smoothing: e. Raises ValueError where it is not in [0, 0.5).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5; got {label_smoothing}")
    right, wrong = (1 - label_smoothing) * logsigmoid(lead), label_smoothing * logsigmoid(-lead)
    return (wrong - right) / (1 - 2 * label_smoothing)


def hinge_loss(lead: Tensor) -> Tensor:
    """max(0, 1 - lead): [P] float, of SLiC and RSO (arXiv 2305.10425; 2309.06657). lead: as of `bradley_terry_loss`."""
    return torch.relu(1 - lead)


def apo_zero_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 - sigmoid(chosen) + sigmoid(rejected): [P] float, of APO-zero (arXiv 2408.06266, equation 7).

    chosen, rejected: [P] float, rewards: one goes up, the other down, whatever is between them.
    """
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down_loss(chosen: Tensor, lead: Tensor) -> Tensor:
    """sigmoid(chosen) + 1 - sigmoid(lead): [P] float, of APO-down (arXiv 2408.06266, equation 8).

    chosen: [P] float, rewards. lead: as of `bradley_terry_loss`. Both answers go down, the rejected one further.
    """
    return torch.sigmoid(chosen) + torch.sigmoid(-lead)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logprobs): [P] float, of ORPO (arXiv 2403.07691, equation 4).

    logprobs: [P] float, at most 0, natural log: of an answer's mean token. Where p is nearer to 1 than CERTAIN the odds are
    those of CERTAIN, without gradient: they would be infinite at 1.
    """
    bounded = logprobs.clamp(max=CERTAIN)
    return bounded - torch.log(-torch.expm1(bounded))


def kto_loss(lead: Tensor, weight: Tensor) -> Tensor:
    """weight (1 - sigmoid(lead)): [S] float, of KTO (arXiv 2402.01306, equations 7 and 8).

    lead: [S] float, how far an answer's reward is on the right side of beta times the KL: above it where the answer is desirable,
    below it otherwise. weight: [S] float, lambda of the answer's label.
    """
    return weight * torch.sigmoid(-lead)


def accuracy(lead: Tensor) -> Tensor:
    """1 where the lead is above 0, 1/2 where it is 0, 0 otherwise: as many float, without gradient.

    lead: float, of pairs without a margin.
    """
    return (torch.sign(lead.detach()) + 1) / 2
