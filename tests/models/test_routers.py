"""Choices of experts that Megatron's router does not know, by hand; and that a replay is heard before them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.types import UNKNOWN_EXPERT
from megarl.models.config import Moe
from megarl.models.replay import RoutingReplay
from megarl.models.routers import BestOfGroupRouter, BiasedRouter, ChoosingRouter, Router, router_of

LOGITS = torch.tensor([[4.0, 1.0, 2.0, -3.0], [0.0, 1.0, 2.0, 3.0]])
BIAS = torch.tensor([[0.0, 5.0, 0.0, 7.0]])
# By the sum of their two best the groups would be the second and the third.
SCORES = torch.tensor([[0.30, 0.00, 0.20, 0.19, 0.16, 0.15, 0.00, 0.00]])


def biased(replay: RoutingReplay | None = None) -> Any:
    router: Any = SimpleNamespace(expert_bias=BIAS, _replay=replay)
    router.choose = lambda *given, **options: BiasedRouter.choose(router, *given, **options)
    return router


def test_a_bias_beside_a_softmax_chooses_and_does_not_weigh() -> None:
    scores, experts = ChoosingRouter.get_replay_topk(biased(), LOGITS, 2, None, None, None)
    assert experts.tolist() == [[3, 1], [3, 1]]
    assert scores.tolist() == [[-3.0, 1.0], [3.0, 1.0]]
    plain = SimpleNamespace(expert_bias=torch.zeros(1, 4))
    assert BiasedRouter.choose(plain, LOGITS, 2)[1].tolist() == [[0, 2], [3, 2]]  # type: ignore[arg-type]


def test_the_choice_has_gradients_of_what_is_chosen_alone() -> None:
    logits = LOGITS.clone().requires_grad_()
    BiasedRouter.choose(biased(), logits, 2)[0].sum().backward()
    assert logits.grad is not None and logits.grad.tolist() == [[0, 1, 0, 1]] * 2


def test_a_replay_is_heard_and_what_it_leaves_open_is_chosen_here() -> None:
    replay = RoutingReplay(recomputed=False)
    replay.set(torch.tensor([[0, 2], [UNKNOWN_EXPERT, UNKNOWN_EXPERT]]))
    scores, experts = ChoosingRouter.get_replay_topk(biased(replay), LOGITS, 2, None, None, None)
    assert experts.tolist() == [[0, 2], [3, 1]]
    assert scores.tolist() == [[4.0, 2.0], [3.0, 1.0]]


def test_a_group_counts_its_best_expert() -> None:
    scores, experts = BestOfGroupRouter.choose(None, SCORES, 3, num_groups=4, group_topk=2)  # type: ignore[arg-type]
    assert experts.tolist() == [[0, 2, 3]]
    assert scores.tolist() == SCORES[:, [0, 2, 3]].tolist()


@pytest.mark.parametrize(
    ("moe", "kind"),
    [
        (Moe(8, 2, 16), Router),
        (Moe(8, 2, 16, score="sigmoid", score_bias=True, num_groups=4, top_groups=1), Router),
        (Moe(8, 2, 16, score_bias=True), BiasedRouter),
        (Moe(8, 2, 16, normalize=False, num_groups=4, top_groups=2, best_of_group=True), BestOfGroupRouter),
        (Moe(8, 2, 16, normalize=False, best_of_group=True), Router),
    ],
)
def test_experts_have_the_router_that_they_want(moe: Moe, kind: type[Router]) -> None:
    assert router_of(moe) is kind
