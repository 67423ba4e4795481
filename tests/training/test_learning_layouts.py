"""A tower that learns at several layouts: weights, norms and checkpoints are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.core.ports import free_port
from tests.support.forked_ranks import Ranks
from tests.support.tolerances import Tolerance
from tests.support.vision import write_tiny_vision_model
from tests.training.harness import assert_same
from tests.training.learning_ranks import CASES, SINGLE

pytestmark = pytest.mark.slow
EVERY = [(name, case) for name, cases in CASES.items() for case in cases]
OVER_RANKS = [(name, case) for name, case in EVERY if case != SINGLE]


@pytest.fixture(scope="module")
def measured(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks have left what they have learned."""
    root = tmp_path_factory.mktemp("layouts")
    folders = [write_tiny_vision_model(root / name, name, text={"num_hidden_layers": 4}) for name in CASES]
    (target := root / "measured").mkdir()
    for size in (1, 2):
        words = (size, free_port("127.0.0.1"), target, *folders)
        assert ranks.run("tests.training.learning_ranks", size, *words, log=target / f"{size}.log") == ""
    return target


def of(measured: Path, name: str, case: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(measured / f"{name} {case} {rank}.pt", weights_only=False)
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and any(name.startswith("visual.") for name in found)
    return float(max((found[name] - each).abs().max() for name, each in expected.items()))


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_a_resumed_run_takes_the_very_same_step(measured: Path, name: str, case: str) -> None:
    found = of(measured, name, case)
    assert_same(found["own loaded"], found["saved"])
    assert_same(found["own trained"], found["trained"])
    assert all(not torch.equal(found["saved"][key], each) for key, each in found["trained"].items() if "visual." in key)


@pytest.mark.parametrize(("name", "case"), OVER_RANKS)
def test_weights_and_norms_are_those_of_one_rank(measured: Path, name: str, case: str, bounds: Tolerance) -> None:
    """The tower counts once in a norm, whoever holds it; and no rank goes on with what it saw before a step of the others."""
    found, alone = of(measured, name, case), of(measured, name, SINGLE)
    for step, expected in zip(found["metrics"], alone["metrics"], strict=True):
        for key in ("actor/grad_norm", "actor/grad_share_max"):
            assert step[key] == pytest.approx(expected[key], rel=bounds.loss)
    assert apart(found["saved"], alone["saved"]) < bounds.weight
    assert apart(found["trained"], alone["trained"]) < bounds.weight


@pytest.mark.parametrize(("name", "case"), OVER_RANKS)
def test_a_checkpoint_is_read_at_another_layout(measured: Path, name: str, case: str, bounds: Tolerance) -> None:
    cases = [*CASES[name]]
    found, before = of(measured, name, case), of(measured, name, cases[cases.index(case) - 1])
    assert_same(found["other loaded"], before["saved"])
    assert apart(found["other trained"], before["trained"]) < bounds.weight


@pytest.mark.parametrize(("name", "case"), OVER_RANKS)
def test_ranks_have_the_same_tower(measured: Path, name: str, case: str) -> None:
    first, second = (of(measured, name, case, rank)["tower"] for rank in range(2))
    assert first
    if CASES[name][case][0].pp == 1:
        assert_same(second, first)
    else:
        assert second == {}
