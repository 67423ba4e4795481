"""The picture: a PNG with the panels that the run has figures for."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from megarl.core.errors import UserError
from megarl.core.metrics import METRICS, OUTSIDE, PHASES
from megarl.report import curve
from megarl.report.curve import PANELS, draw_curve
from megarl.report.history import Row


def draw(tmp_path: Path, rows: list[Row]) -> tuple[int, int]:
    """Draws rows; height and width of the picture in pixels."""
    file, target = tmp_path / "metrics.jsonl", tmp_path / "run" / "curve.png"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(file, target)
    pixels = image.imread(target)
    assert pixels.std() > 0.01, "the picture is not blank"
    return pixels.shape[0], pixels.shape[1]


def full_row(step: int) -> Row:
    values = {name: 0.5 + 0.01 * step for name in METRICS if name != "sft/loss"}
    return {"step": step, **values}


def test_every_line_is_a_known_metric() -> None:
    assert {line.name for panel in PANELS for line in panel.lines} <= set(METRICS)


def test_more_panels_make_a_higher_picture(tmp_path: Path) -> None:
    few, _ = draw(tmp_path, [{"step": step, "sft/loss": 2.0 / step, "perf/step_s": 1.0} for step in (1, 2, 3)])
    many, _ = draw(tmp_path, [full_row(step) for step in range(1, 6)])
    assert many > 1.5 * few


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "eval/accuracy": 0.3}],
        [{"step": 1, "reward/mean": None, "actor/grad_norm": None, "perf/step_s": 0.0}],
        [
            {"step": 1, "rollout/logprob_diff_max": 0.0, "reward/mean": -2.0},
            {"step": 2, "rollout/logprob_diff_max": 1e-7},
        ],
        [{"step": step, "perf/step_s": 1.0, "perf/update_s": 2.0} for step in range(1, 300)],
    ],
)
def test_short_odd_and_long_runs_are_drawn(tmp_path: Path, rows: list[Row]) -> None:
    file, target = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(file, target)
    assert target.stat().st_size > 1000


@pytest.mark.parametrize("steps", [3, 1000])
def test_each_phase_has_a_colour_of_its_own_and_a_long_run_is_not_drawn_step_by_step(steps: int) -> None:
    phases = sorted(PHASES.keys() - OUTSIDE)
    rows: list[Row] = [
        {"step": step, "perf/step_s": 20.0, **{f"perf/{phase}_s": 1.0 for phase in phases}} for step in range(steps)
    ]
    axes = Figure().add_axes((0, 0, 1, 1))
    curve._draw_phases(axes, rows)
    legend = axes.get_legend()
    assert legend is not None
    colors = {handle.get_facecolor() for handle in legend.get_patches()}
    assert len(colors) == len(phases) + 1, "and one for what no phase covers"
    assert len(axes.patches) + len(axes.collections) <= 100


def test_a_long_name_ends_within_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("megarl.report.curve._save", lambda drawings, title, target: titles.append(title))
    for name in ("a" * 80, "a" * 81):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.3}\n')
        draw_curve(folder / "metrics.jsonl", tmp_path / "curve.png")
    assert titles == ["a" * 80 + ", 0 steps", "a" * 79 + "\N{HORIZONTAL ELLIPSIS}, 0 steps"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")


def test_a_home_that_cannot_be_written_to_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib would say so at length, and miss a folder of its own when Python ends."""
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    draw(tmp_path, [{"step": 0, "eval/accuracy": 0.3}])
    assert os.environ["MPLCONFIGDIR"] == str(Path(tempfile.gettempdir()) / "matplotlib")
    monkeypatch.delenv("MPLCONFIGDIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    draw(tmp_path, [{"step": 0, "eval/accuracy": 0.3}])
    assert "MPLCONFIGDIR" not in os.environ
