"""Every layout gives what one rank gives: log-probs, losses, gradients, weights. One run of all cases, then one test each.

`python -m bench.parallel_invariance` measures these and more, and writes them into docs/.
"""

from __future__ import annotations

import math

import pytest
import torch

from megarl.core.layout import Layout
from tests.support.forked_ranks import Ranks
from tests.training.invariance import BOUND, Case, Difference, furthest, measure, relative
from tests.training.invariance_cases import (
    ALL_CASES,
    BALANCED,
    CASES,
    CONTROLS,
    EVERYDAY,
    REFERENCES,
    TOGETHER,
    together_name,
)

Measured = tuple[list[Difference], str]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Measured:
    """All cases, and what the ranks said if they did not get through."""
    return measure(tmp_path_factory.mktemp("invariance"), ranks)


def of(measured: Measured, kind: str, name: str) -> list[Difference]:
    """What was measured of a case, or its failure."""
    differences, errors = measured
    found = [item for item in differences if (item.kind, item.case) == (kind, name)]
    assert found, f"the ranks ended before, or in, {name}:\n{errors}"
    return found


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFERENCES], ids=str)
def test_a_layout_is_one_rank(measured: Measured, case: Case) -> None:
    found = of(measured, "alone", str(case))
    assert [item.micro_batches for item in found] == list(EVERYDAY.micro_batches(case))
    assert all(None not in (item.logprobs, item.losses, item.grad_norms, item.gradients) for item in found)
    assert all((item.weights is not None) == EVERYDAY.learns(case) for item in found)
    assert [item for item in found if item.largest > BOUND] == []


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("cases", TOGETHER, ids=together_name)
def test_roles_of_several_layouts_in_one_process_do_not_touch_each_other(
    measured: Measured, cases: tuple[Case, ...]
) -> None:
    found = of(measured, "together", together_name(cases))
    assert [item.model for item in found] == [case.model for case in cases]
    assert [item for item in found if item.largest > BOUND] == []


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("case", BALANCED, ids=str)
def test_the_loss_that_balances_experts_does_not_depend_on_the_layout(measured: Measured, case: Case) -> None:
    [item] = of(measured, "balance", str(case))
    assert item.largest <= BOUND, item


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("mistake", [control.mistake for control in CONTROLS])
def test_a_mistake_is_seen(measured: Measured, mistake: str) -> None:
    for item in of(measured, "control", mistake):
        for value in (item.gradients, item.weights):
            assert value is not None and value > 2 * BOUND, item


def layouts_of(cases: list[Case], *models: str) -> set[Layout]:
    return {case.layout for case in cases if case.model in models}


@pytest.mark.parametrize(("model", "axes"), [("dense", "tp pp cp vpp dp"), ("moe", "tp pp cp ep etp dp edp")])
def test_every_axis_is_measured_and_twenty_layouts_of_each_model_by_the_benchmark(model: str, axes: str) -> None:
    everyday = layouts_of(CASES, model)
    assert {layout.world_size for layout in everyday} == {1, 2, 4}
    for axis in axes.split():
        assert any(getattr(layout, axis) > 1 for layout in everyday), axis
    assert len(layouts_of(ALL_CASES, model)) >= 20


def test_sixteen_layouts_are_measured_in_every_run_of_the_tests() -> None:
    assert len(layouts_of(CASES, "dense", "moe")) >= 16


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({str(case) for case in ALL_CASES}) == len(ALL_CASES)


def test_a_difference_is_relative_to_the_largest_element() -> None:
    assert relative([1.0, -4.0], [1.5, -4.0]) == 0.125
    assert relative(2.0, 2.0) == 0 and relative([], []) == 0 and relative([0.0], [0.0]) == 0
    assert relative([1e-9], [0.0]) == math.inf and relative([math.nan], [1.0]) == math.inf


def test_the_furthest_tensor_is_named() -> None:
    expected = {"a": torch.tensor([1.0, 10.0]), "b": torch.tensor([1.0])}
    assert furthest({"a": torch.tensor([2.0, 10.0]), "b": torch.tensor([1.5])}, expected) == (0.5, "b")
    with pytest.raises(AssertionError, match="b"):
        furthest({"a": expected["a"]}, expected)
