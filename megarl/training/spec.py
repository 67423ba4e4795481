"""What a rank is told to build. Without torch: the driver writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.core.layout import Layout
from megarl.models.hf_dtypes import ModelDtype, StoredDtype
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.section import Part, Recompute
from megarl.recipe.supervised import Dpo, Kto

# Share of a squared gradient norm above which one parameter is told of.
NEARLY_ALL = 0.99


@dataclass(frozen=True)
class PolicyObjective:
    """The algorithm's policy loss, with its KL and entropy.

    old_given: whether old_logprobs are a column of every mini-batch; off, in an update's first the loss takes its own.
    """

    algorithm: Algorithm
    old_given: bool = True


@dataclass(frozen=True)
class ValueObjective:
    """A critic's regression on returns. clip: how far a value may move from the one before the update."""

    clip: float | None = None


@dataclass(frozen=True)
class SftObjective:
    """Cross entropy of demonstrations. dft: that of each token times its probability."""

    dft: bool = False


@dataclass(frozen=True)
class RewardObjective:
    """A reward model's likelihood of preferences (Bradley-Terry). center_coef: weight of keeping scores around 0."""

    center_coef: float = 0.0


@dataclass(frozen=True)
class DpoObjective:
    """A policy's likelihood of preferences, by its log-ratio to a reference."""

    settings: Dpo


@dataclass(frozen=True)
class KtoObjective:
    """A policy's utility of labelled answers, by its log-ratio to a reference."""

    settings: Kto


Objective = PolicyObjective | ValueObjective | SftObjective | RewardObjective | DpoObjective | KtoObjective


@dataclass(frozen=True)
class RoleSpec:
    """What a rank needs to build a role.

    layout: how the pool's ranks share the model; None where there is one rank. optimizer: None is a frozen role.
    total_steps: optimizer steps of the whole run, for the learning-rate schedule. objective: what `update` learns by.
    recompute: activations that the backward pass computes again. recompute_num_layers: with full, of how many layers of each
    pipeline stage; None is all. aux_loss_coef: weight of the experts' load balance.
    routing_replay: experts are those that the rollout chose. lora: train adapters alone.
    base_of: no model of its own, but that of another role without its adapters; everything else then goes unread.
    offload: parts that leave the device while nothing needs them. load_weights: off where `load` brings them, and the
    folder need only have the config.
    head: score makes a critic or a reward model; a head that the folder does not have begins at zero.
    has_tower: a vision tower is a part of the model, as of one whose tower learns: a frozen role then takes its weights over
    with the others.
    stored: HF tensors that have to be written in another dtype (models/hf_dtypes.py). Such a model is converted, and does
    not run: its parameters differ in dtype.
    """

    folder: Path
    dtype: ModelDtype
    temperature: float = 1.0
    optimizer: Optimizer | None = None
    total_steps: int = 1
    objective: Objective | None = None
    layout: Layout = field(default_factory=Layout)
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    aux_loss_coef: float = 0.0
    routing_replay: bool = False
    lora: Lora | None = None
    base_of: str | None = None
    offload: tuple[Part, ...] = ()
    load_weights: bool = True
    head: Literal["vocabulary", "score"] = "vocabulary"
    stored: Mapping[str, StoredDtype] = field(default_factory=dict)
    has_tower: bool = False

    @property
    def holds_tower(self) -> bool:
        """Whether a vision tower is a part of the model: one that learns, or takes over the weights of one that does."""
        return self.has_tower or (self.optimizer is not None and not self.optimizer.freeze_vision_tower)
