"""Which experts a token goes to, where Megarl's models want more than Megatron's router: biases of float32, and other choices."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.models.config import Moe


class Replay(Protocol):
    """What Megatron asks for the choice in its own place (`replay`)."""

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any) -> Any:
        """Scores and indices of the chosen experts, [T, k] each. scores: [T, experts]; choose: the router's own way."""


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's, whose bias for the choice of experts stays float32 whatever the model is cast to.

    In a float32 model its products are torch's: Megatron takes Transformer Engine's wherever that is, which are TF32's.
    """

    expert_bias: Tensor | None

    def gating(self, input: Tensor) -> Tensor:
        """[..., hidden] to logits, [..., experts]."""
        if input.dtype == torch.float32:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        logits: Tensor = super().gating(input)
        return logits

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


class ChoosingRouter(Router):
    """A router with a choice of its own, at the place where Megatron lets a choice be replayed: an own replay is given it."""

    _replay: Replay | None

    @property
    def router_replay(self) -> Any:
        """What Megatron asks for the choice."""
        return self

    @router_replay.setter
    def router_replay(self, replay: Replay | None) -> None:
        self._replay = replay

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, _: Any) -> Any:
        """As `Replay` has it."""
        if self._replay is None:
            return self.choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self._replay.get_replay_topk(scores, topk, num_groups, group_topk, self.choose)

    @abstractmethod
    def choose(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts, [T, k] each. scores: [T, experts]."""


class BiasedRouter(ChoosingRouter):
    """Chooses by softmax and a bias (ERNIE 4.5), where Megatron knows a bias beside sigmoid alone.

    Megatron gives logits, and takes the softmax of those that are chosen: the scores divided by their sum.
    """

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        del self.expert_bias  # None
        self.register_buffer("expert_bias", torch.zeros(1, self.num_experts, device=self.weight.device))

    def choose(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `ChoosingRouter` has it; scores are logits."""
        assert self.expert_bias is not None
        with torch.no_grad():
            chosen = (scores.float().softmax(-1) + self.expert_bias).topk(topk, dim=-1).indices
        return scores.gather(1, chosen), chosen


class BestOfGroupRouter(ChoosingRouter):
    """Chooses among the groups whose best experts are the best (DeepSeek-V2, arXiv 2405.04434); Megatron counts several."""

    def choose(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `ChoosingRouter` has it."""
        assert num_groups is not None and group_topk is not None
        with torch.no_grad():
            in_groups = scores.unflatten(1, (num_groups, -1))
            groups = in_groups.amax(-1).topk(group_topk, dim=-1).indices
            passed_over = torch.ones_like(in_groups[..., 0], dtype=torch.bool).scatter(1, groups, value=False)
            chosen = in_groups.masked_fill(passed_over[..., None], -1.0).flatten(1).topk(topk, dim=-1).indices
        return scores.gather(1, chosen), chosen


def router_of(moe: Moe) -> type[Router]:
    """The router that these experts want, where norms stand not before it as well (`normed_experts`)."""
    if moe.score_bias and moe.score == "softmax":
        return BiasedRouter
    return BestOfGroupRouter if moe.best_of_group and moe.num_groups else Router
