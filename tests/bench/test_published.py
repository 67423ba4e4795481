"""What the planner predicts of runs that others published: held-out rows by phase, and that each constant is what was fitted."""

from __future__ import annotations

import pytest

from bench.plan_published import by_phase, held_out, in_band, memory, rank_correlation, summary
from bench.support.published import DENSE, EXPERTS, PHASES, Point, Row, calibrated, points, read_rows
from megarl.placement.rates import RATES


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


def test_held_out_phases_are_predicted_and_put_in_order(rows: list[Row]) -> None:
    found = held_out(rows, RATES["H100"])
    assert found["all phases"]["values"] >= 36
    assert found["all phases"]["median_error"] < 0.15
    for phase in PHASES:
        assert found["phases"][phase]["rank_correlation"] >= 0.9, phase
        assert found["phases"][phase]["median_error"] < 0.3, phase
    # Nothing of these devices or of these models was fitted.
    for family in ("dapo-7b-h20", "dapo-14b-h20", "grpo-7b"):
        assert found[family]["update_s"]["median_error"] < 0.2, family


def test_the_tables_rates_are_those_that_the_calibration_rows_give(rows: list[Row]) -> None:
    first = [row for row in rows if row.family == "dapo-7b"]
    others = [row for row in rows if row.calibrates_experts]
    fitted = calibrated(others, calibrated(first, RATES["H100"], DENSE), EXPERTS)
    for name in (*DENSE, *EXPERTS):
        assert getattr(fitted, name) == pytest.approx(getattr(RATES["H100"], name), rel=0.3), name


def test_lengths_that_are_known_are_those_that_rows_publish(rows: list[Row]) -> None:
    tokens = {(row.family, row.values["number"]): row.tokens for row in rows}
    # Throughput by devices and seconds over 8,192 samples; the same tokens by the MFU, which is the model's operations.
    assert tokens["grpo-7b", "2"] == pytest.approx(2583.4 * 8 * 280 / 8192, rel=1e-3)
    assert tokens["dapo-14b-h20", "9"] == pytest.approx(3131 + 159, rel=0.01)
    assert tokens["dapo-7b", "7"] == tokens["dapo-7b", "18"]


def test_where_lengths_are_assumed_most_phases_are_within_the_band(rows: list[Row]) -> None:
    assert in_band(rows, RATES["H100"]) > 0.75


def test_memory_verdicts_of_the_rows_that_ran_out(rows: list[Row]) -> None:
    verdicts = memory(rows)
    assert len(verdicts) == 13
    assert sum(each["fits"] == each["published"] for each in verdicts) == 13


def test_ranks_and_errors_by_hand(rows: list[Row]) -> None:
    def point(predicted: float, measured: float) -> Point:
        return Point(rows[0], "update_s", predicted, measured, calibrates=False, counts=True)

    found = [point(1.1, 1.0), point(2.0, 2.0), point(2.4, 3.0)]
    assert rank_correlation(found) == pytest.approx(1.0)
    assert rank_correlation([point(3.0, 1.0), point(2.0, 2.0), point(1.0, 3.0)]) == pytest.approx(-1.0)
    # Ties share their ranks.
    assert rank_correlation([point(1.0, 1.0), point(1.0, 2.0), point(2.0, 3.0)]) == pytest.approx(0.866, abs=1e-3)
    line = summary(found)
    assert (line["values"], line["median_error"], line["bias"]) == (3, pytest.approx(0.1), pytest.approx(0.0))
    assert set(by_phase(found)) == {"update_s"}


def test_every_row_is_used_for_what_it_can_say(rows: list[Row]) -> None:
    found = points(rows, RATES["H100"])
    assert all(point.phase == "generation_s" for point in found if not point.row.megatron)
    assert not any(point.counts for point in found if point.row.unfused and point.phase != "generation_s")
    assert not any(point.calibrates for point in found if point.row.values["device"] == "H20")
    assert {point.use for point in found} == {"calibration", "held out", "shown"}
