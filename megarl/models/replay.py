"""Replays the routing that the rollout used in the experts of a Megatron model (R3, arXiv 2510.11370).

A mixture of experts may choose other experts in training than in generation, for the same weights, because the two
engines round differently; log-probs then jump. With the choice given, only the scores are computed again, and learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megarl.core.types import UNKNOWN_EXPERT


class RoutingReplay:
    """What a router is given in the place of Megatron's RouterReplay: its choice for the micro-batch at hand.

    A layer whose activations are computed again chooses twice: once without gradients, and once more in the backward
    pass, when other micro-batches have gone forward. Backward passes come in the order of the forward ones.
    """

    def __init__(self, *, recomputed: bool) -> None:
        self._recomputed = recomputed
        self._target: Tensor | None = None
        self._waiting: list[Tensor | None] = []

    def set(self, target: Tensor | None) -> None:
        """target: [T, k] int64, the experts of each token of the next forward pass; None lets the router choose.

        So does UNKNOWN_EXPERT, of a token.
        """
        self._target = target

    def forget(self) -> None:
        """No forward pass is under way."""
        self._target = None
        self._waiting.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts, [T, k] each. scores: [T, experts]."""
        assert default_compute_topk is not None
        chosen = self._chosen()
        if chosen is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert chosen.shape == (scores.shape[0], topk), (chosen.shape, scores.shape, topk)
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        # Unknown are those of padding, of last tokens, and of samples that came without: their neighbours keep theirs.
        chosen = torch.where(chosen == UNKNOWN_EXPERT, own, chosen)
        return scores.gather(1, chosen), chosen

    def _chosen(self) -> Tensor | None:
        if self._recomputed and torch.is_grad_enabled() and self._waiting:
            return self._waiting.pop(0)
        if self._recomputed:
            # A micro-batch without a choice waits too: it would be given that of the next.
            self._waiting.append(self._target)
        return self._target


class Replays:
    """The routers of a rank's chunks, by global layer."""

    def __init__(self, chunks: Sequence[Module], *, recomputed: int) -> None:
        """recomputed: how many of a chunk's first layers."""
        self._of: dict[int, dict[int, RoutingReplay]] = {}
        for chunk in chunks:
            self._of[id(chunk)] = {
                layer.layer_number - 1: _give(layer.mlp.router, RoutingReplay(recomputed=index < recomputed))
                for index, layer in enumerate(_layers(chunk))
                if hasattr(layer.mlp, "router")
            }

    def set(self, chunk: Module, routing: Tensor | None) -> None:
        """Give a chunk's routers their choices for its next forward pass. routing: [T, layers, k] integers, or None."""
        for layer, replay in self._of[id(chunk)].items():
            replay.set(None if routing is None else routing[:, layer].long())

    @contextmanager
    def pass_over(self) -> Iterator[None]:
        """Around one schedule: nothing is left behind for the next."""
        try:
            yield
        finally:
            for replays in self._of.values():
                for replay in replays.values():
                    replay.forget()


def _layers(chunk: Any) -> Sequence[Any]:
    layers: Sequence[Any] = chunk.decoder.layers
    return layers


def _give(router: Any, replay: RoutingReplay) -> RoutingReplay:
    router.router_replay = replay
    return replay
