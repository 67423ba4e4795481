"""What roles would say of a shard, and what a loss makes of it: the run's own losses, forward and backward, on small tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megarl.core.layout import Layout
from megarl.core.types import Column, FloatArray, MicroBatch, Shard
from megarl.training.batch import to_device
from megarl.training.logprob import TokenScores
from megarl.training.losses import build_loss
from megarl.training.spec import Objective

# How far a role's column is from what the rollout said, at most: log-probs in nats, scores as they are.
SPREADS = {
    "actor": 0.9,
    "reference": 0.5,
    "teacher": 0.7,
    "critic": 0.4,
    "reward_model": 1.1,
    "policy": 1.3,
    "later critic": 0.9,
}
HEADS = ("critic", "later critic", "reward_model")


def column_of(role: str, shard: Shard, scale: float = 1.0) -> Column:
    """A deterministic column: log-probs around the rollout's own, or scores."""
    return [[_values(role, micro, scale) for micro in mini.micro_batches] for mini in shard.mini_batches]


def _values(role: str, micro: MicroBatch, scale: float) -> FloatArray:
    phase, at = list(SPREADS).index(role), np.arange(micro.num_tokens) + micro.tokens % 7
    moved = scale * SPREADS[role] * np.sin(1.7 * at + 2.3 * phase + 0.4)
    return (moved if role in HEADS else micro.rollout_logprobs + moved).astype(np.float32)


def top_of(role: str, shard: Shard, k: int, scale: float = 1.0) -> Column:
    """What a role says of k labels of each token and of all others together, as `training.batch.joined_top` has it."""
    return [[_top(role, micro, k, scale) for micro in mini.micro_batches] for mini in shard.mini_batches]


def _top(role: str, micro: MicroBatch, k: int, scale: float) -> FloatArray:
    phase, at = list(SPREADS).index(role), np.arange(micro.num_tokens)[:, None] + micro.tokens[:, None] % 7
    logits = scale * SPREADS[role] * np.sin(1.7 * at + 2.3 * phase + 0.9 * np.arange(k + 1))
    ids = (micro.tokens[:, None] + np.arange(k)) % max(k, 64)
    return np.hstack([ids, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))]).astype(np.float32)


def learn(
    objective: Objective, shard: Shard, columns: Mapping[str, Column], kl: float = 0.0, *, role: str = "policy"
) -> dict[str, float | tuple[float, ...]]:
    """Loss, gradients and metrics of every micro-batch; only the columns that the loss names are read.

    role: whose column stands for what the model says: of the policy, which has moved away from the actor's own log-probs,
    or of the critic after it has learned something.
    """
    loss = build_loss(objective, lambda part: part).at(kl)
    found: dict[str, float | tuple[float, ...]] = {}
    for first, mini in enumerate(shard.mini_batches):
        for second, micro in enumerate(mini.micro_batches):
            given = {name: columns[name][first][second] for name in loss.read(first)}
            batch = to_device(micro, given, "cpu", Layout(), 0)
            says = torch.tensor(_values(role, micro, 1.0), requires_grad=True)
            entropy = torch.tensor(0.5 + 0.1 * np.arange(micro.num_tokens), dtype=torch.float32, requires_grad=True)
            k = 0 if batch.top_ids is None else batch.top_ids.shape[1]
            top = torch.tensor(_top(role, micro, k, 1.0)[:, k:], requires_grad=True) if k else None
            output = loss.fn(TokenScores(says, entropy, top), batch)
            output.loss.backward()
            means = {name: value for name, (value, _) in output.means.items()}
            named = {"loss": output.loss, **output.weighted, **output.sums, **means, **output.maxima}
            found |= {f"{first}.{second} {name}": rounded(value) for name, value in named.items()}
            leaves = {"gradient": says, "entropy's gradient": entropy, "gradient of the likeliest": top}
            for name, leaf in leaves.items():
                if leaf is not None and leaf.grad is not None:
                    found[f"{first}.{second} {name}"] = rounded(leaf.grad)
    return found


def rounded(values: Any) -> Any:
    """Numbers as plain Python, to six digits: what rounding changes is no change."""
    if isinstance(values, torch.Tensor):
        values = values.detach().numpy()
    if isinstance(values, np.ndarray) and values.ndim:
        if values.ndim == 1 and values.dtype.kind == "f":
            return tuple([float(f"{each:.6g}") for each in values.tolist()])
        return tuple(rounded(each) for each in (values.tolist() if values.ndim == 1 else values))
    if isinstance(values, Sequence) and not isinstance(values, str):
        return tuple(rounded(each) for each in values)
    return float(f"{float(values):.6g}") if isinstance(values, float | np.generic | np.ndarray) else values
