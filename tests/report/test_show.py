"""Runs that are shown again, from their folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.commands.report import report
from megarl.core.errors import MegarlError, UserError
from megarl.report.show import show_runs

ROWS = (
    '{"step": 1, "reward/mean": 0.25, "perf/step_s": 2.0, "perf/update_s": 1.0}\n'
    '{"step": 2, "reward/mean": 0.75, "perf/step_s": 2.0, "perf/update_s": 2.0}\n'
)


def test_a_finished_run_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        show_runs([tmp_path], tmp_path / "page.html")
    (tmp_path / "metrics.jsonl").write_text(ROWS)
    show_runs([tmp_path], tmp_path / "page.html")
    shown = capsys.readouterr().out
    table = [line.split() for line in shown.splitlines()]
    assert ["reward", "0.250", "0.750"] in table and ["update", "3.0", "s", "75.0%"] in table
    assert ["curve", str(tmp_path / "curve.png")] in table and ["page", str(tmp_path / "page.html")] in table
    assert (tmp_path / "curve.png").exists() and (tmp_path / "page.html").exists()
    assert "servers were idle" not in shown
    assert "weights" not in shown, "the run has not come to its end"
    (tmp_path / "hf").mkdir()
    show_runs([tmp_path], tmp_path / "page.html")
    assert f"weights  {tmp_path}/hf  (HF)" in capsys.readouterr().out


@pytest.mark.parametrize(("file", "advice"), [("curve.png", "need no such file"), ("page.html", "with --out")])
def test_what_cannot_be_written_is_said_after_all_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, advice: str
) -> None:
    """As of somebody else's run."""
    (tmp_path / "metrics.jsonl").write_text(ROWS)
    (tmp_path / file).mkdir()
    with pytest.raises(MegarlError, match=rf"{file} cannot be written: Is a directory\. .*{advice}\."):
        show_runs([tmp_path], tmp_path / "page.html")
    shown = capsys.readouterr().out
    assert "0.750" in shown and file not in shown
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curve.png", "page.html"}


def test_a_table_that_cannot_be_printed_ends_with_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "\u65e5\u672c"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(ROWS)
    command = [sys.executable, "-m", "megarl", "report", str(folder)]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONIOENCODING": "ascii", "HOME": str(tmp_path)}
    )
    assert r"\u65e5\u672c" in shown.stdout, "letters that the output lacks"
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert failed.returncode == 1 and failed.stderr.endswith(
        "megarl: The table cannot be printed: No space left on device.\n"
    )


def test_a_folder_in_the_place_of_a_page_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, Path(".")):
        with pytest.raises(UserError, match=r"--out .* is a folder: name a file, such as .*page\.html"):
            report([tmp_path], out=folder)
