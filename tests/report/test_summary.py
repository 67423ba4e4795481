"""The figures of the final table, and showing a finished run again."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megarl.report.__main__ import main
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


def test_a_finished_run_is_shown_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.report", str(tmp_path)]
    missing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "does not exist" in missing.stderr and "Traceback" not in missing.stderr
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.25, "perf/step_s": 2.0, "perf/update_s": 1.0}\n'
        '{"step": 2, "reward/mean": 0.75, "perf/step_s": 2.0, "perf/update_s": 2.0}\n'
    )
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    table = [line.split() for line in shown.stdout.splitlines()]
    assert ["reward", "0.250", "0.750"] in table and ["update", "3.0", "s", "75.0%"] in table
    assert (tmp_path / "curve.png").exists()
    assert "servers were idle" not in shown.stdout
    assert "weights" not in shown.stdout, "the run has not come to its end"
    (tmp_path / "hf").mkdir()
    (tmp_path / "curve.png").unlink()
    (tmp_path / "curve.png").mkdir()  # of somebody else's run it cannot be written either
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "Traceback" not in again.stderr
    assert again.stderr == f"megarl: {tmp_path}/curve.png cannot be written: Is a directory. The table needs no file.\n"
    assert f"weights  {tmp_path}/hf  (HF)" in again.stdout.replace("\n", "") and "0.750" in again.stdout
    assert "curve  " not in again.stdout and not (tmp_path / ".curve.png").exists()


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


def test_a_table_that_cannot_be_printed_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\u65e5\u672c"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25, "perf/step_s": 2.0}\n')
    monkeypatch.setattr(sys, "argv", ["megarl.report", str(folder)])
    monkeypatch.setattr("megarl.report.__main__.draw_curve", lambda *_: None)
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        main()
    assert r"\u65e5\u672c" in (tmp_path / "out").read_text(), "letters that the output lacks"
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w", buffering=1))  # noqa: SIM115
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "megarl: The table cannot be printed: No space left on device.\n"
