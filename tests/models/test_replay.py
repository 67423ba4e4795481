"""A router that replays a choice computes scores for it and nothing else; recomputed layers get theirs back in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.core.types import UNKNOWN_EXPERT
from megarl.models.replay import Replays, RoutingReplay

pytestmark = pytest.mark.usefixtures("on_device")


def given() -> torch.Tensor:
    return torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])


def top(scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = scores.topk(topk, dim=1)
    return values, indices


def ask(replay: RoutingReplay) -> list[list[int]]:
    found: list[list[int]] = replay.get_replay_topk(given(), 2, default_compute_topk=top)[1].tolist()
    return found


def test_without_a_choice_the_router_chooses() -> None:
    values, indices = RoutingReplay(recomputed=False).get_replay_topk(given(), 2, default_compute_topk=top)
    assert indices.tolist() == [[2, 1], [0, 1]]
    torch.testing.assert_close(values, torch.tensor([[0.7, 0.2], [0.5, 0.3]]))


def test_a_choice_takes_its_scores_with_gradients() -> None:
    replay = RoutingReplay(recomputed=False)
    replay.set(torch.tensor([[0, 1], [2, 1]]))
    scores = given().requires_grad_()
    values, indices = replay.get_replay_topk(scores, 2, default_compute_topk=top)
    assert indices.tolist() == [[0, 1], [2, 1]]
    torch.testing.assert_close(values.detach(), torch.tensor([[0.1, 0.2], [0.2, 0.3]]))
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 1, 0], [0, 1, 1]]


def test_recomputed_layers_get_the_choices_of_their_own_forward_pass() -> None:
    replay = RoutingReplay(recomputed=True)
    choices = [torch.tensor([[first, 2], [2, first]]) for first in (0, 1)]
    for choice in choices:
        replay.set(choice)
        with torch.no_grad():
            assert ask(replay) == choice.tolist()
    # The backward passes, in the order of the forward ones.
    assert [ask(replay), ask(replay)] == [choice.tolist() for choice in choices]
    replay.forget()
    assert ask(replay) == [[2, 1], [0, 1]]


def test_a_recomputed_layer_without_a_choice_is_not_given_that_of_a_later_forward_pass() -> None:
    replay, choice = RoutingReplay(recomputed=True), torch.tensor([[1, 2], [2, 1]])
    for each in (None, choice):
        replay.set(each)
        with torch.no_grad():
            ask(replay)
    assert [ask(replay), ask(replay)] == [[[2, 1], [0, 1]], choice.tolist()]


class Fake(torch.nn.Module):
    """What Replays looks for in a chunk: layers with numbers, some of which have a router."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        layers = []
        for number in (3, 4):
            layer: Any = torch.nn.Module()
            layer.layer_number = number
            layer.mlp = torch.nn.Module()
            if number == 4:
                layer.mlp.router = torch.nn.Module()
            layers.append(layer)
        self.decoder.layers = torch.nn.ModuleList(layers)


def test_each_layer_gets_its_own_choice_and_the_unknown_the_routers() -> None:
    chunk = Fake()
    replays = Replays([chunk], recomputed=0)
    router: Any = chunk.decoder.layers[1].mlp.router  # type: ignore[union-attr, index]
    routing = torch.tensor(
        [[[UNKNOWN_EXPERT, UNKNOWN_EXPERT]] * 4, [[9, 9], [9, 9], [9, 9], [2, 0]]], dtype=torch.int16
    )
    with replays.pass_over():
        replays.set(chunk, routing)
        assert ask(router.router_replay) == [[2, 1], [2, 0]]
    assert ask(router.router_replay) == [[2, 1], [0, 1]]
