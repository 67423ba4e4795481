"""The figures of the final table, and showing a finished run again."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megarl.report.history import Row
from megarl.report.summary import duration, mean_rate, summary_table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1:00"),
        (60, "1:00"),
        (185.4, "3:05"),
        (7384, "2:03:04"),
        (3599.6, "1:00:00"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_mean_rate_is_all_tokens_over_all_seconds() -> None:
    rows: list[Row] = [
        {"step": 0},
        {"step": 1, "perf/train_tokens_per_s": 100.0, "perf/update_s": 2.0},
        {"step": 2, "perf/train_tokens_per_s": None, "perf/update_s": 5.0},
        {"step": 3, "perf/train_tokens_per_s": 40.0, "perf/update_s": 10.0},
    ]
    assert mean_rate(rows, "perf/train_tokens_per_s", "perf/update_s") == pytest.approx(600 / 12)
    assert mean_rate(rows[:1], "perf/train_tokens_per_s", "perf/update_s") is None


def test_a_run_that_diverged_does_not_end_with_its_last_good_value() -> None:
    rows: list[Row] = [
        {"step": 1, "sft/loss": 2.0},
        {"step": 2, "sft/loss": 1.5},
        {"step": 3, "sft/loss": None},
        {"step": 4},
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(rows, {}, 1.0, None, None))
    assert ["loss", "2.0000", "-"] in [line.split() for line in out.getvalue().splitlines()]


def test_the_end_says_which_side_was_the_bottleneck(tmp_path: Path) -> None:
    step = {"perf/step_s": 10.0, "perf/rollout_s": 6.0, "perf/servers_idle": 0.4}
    rows: list[Row] = [{"step": number, **step} for number in (1, 2, 3)]
    out = Console(width=300, record=True, file=io.StringIO())
    out.print(summary_table(rows, {"rollout": 18.0}, 30.0, tmp_path, tmp_path))
    assert "ranks waited for samples 60% of the time, servers were idle 40%" in out.export_text()


def test_the_rate_of_generation_is_over_the_seconds_of_generation(tmp_path: Path) -> None:
    # Generated ahead: the driver waits for the first step alone.
    rate, waited, generated = "perf/rollout_tokens_per_s", "perf/rollout_s", "perf/generation_s"
    rows: list[Row] = [
        {"step": 1, rate: 100.0, waited: 10.0, generated: 10.0},
        {"step": 2, rate: 700.0, waited: 0.01, generated: 10.0},
        {"step": 3, rate: 700.0, waited: 0.0, generated: 10.0},
    ]
    out = Console(width=300, record=True, file=io.StringIO())
    out.print(summary_table(rows, {"rollout": 10.01}, 30.0, tmp_path, tmp_path))
    assert ["generation,", "tokens/s", "500"] in [line.split() for line in out.export_text().splitlines()]


def test_a_folder_is_shown_by_its_whole_name(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]" / "[" / "c]"
    out = Console(width=300, record=True, file=io.StringIO())
    out.print(summary_table([], {}, 1.0, folder / "hf", folder / "curve.png"))
    text = out.export_text()
    assert f"weights  {folder}/hf  (HF)" in text and f"curve    {folder}/curve.png" in text
