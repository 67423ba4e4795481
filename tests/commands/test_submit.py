"""`megarl status`: every submitted run has its line, whole, whatever became of the others' schedulers. Options of `submit`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.end_signals import SIGNALS
from megarl.core.errors import InterruptError, MegarlError, UserError
from megarl.launch.record import Submission

LONG = "a_run_with_a_name_that_is_longer_than_what_a_narrow_terminal_has_for_it"


def test_a_scheduler_that_does_not_answer_hides_no_run_and_no_name_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "JobState=RUNNING Reason=None ExitCode=0:0"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    Submission("ray", "raysubmit_1", "http://127.0.0.1:9").write(Path("runs/a_gone"))
    Submission("slurm", "7").write(Path("runs") / LONG)
    found = CliRunner().invoke(app, ["status"])
    text = "".join(character for character in found.output if character.isalnum() or character in "_")
    assert found.exit_code == 2
    assert "RUNNING" in text and "a_gone" in text and "doesnottakejobs" in text
    columns = [[cell.strip() for cell in line.split("│")] for line in found.output.splitlines() if "│" in line]
    assert LONG in "".join(cells[1] for cells in columns)
    with pytest.raises(MegarlError, match="does not take jobs from here"):
        CliRunner().invoke(app, ["status", "runs/a_gone"], catch_exceptions=False)


def test_what_slurm_is_told_is_refused_for_ray() -> None:
    words = ["submit", "r.yaml", "--ray", "http://h:8265", "--nodes", "1", "--time", "4:00:00", "--dry-run"]
    with pytest.raises(UserError, match="--nodes, --time: read with --slurm alone"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.fixture
def heeded() -> Iterator[None]:
    """Signals are heeded, also where the tests run in the background of a shell, which has them ignore some."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", SIGNALS)
def test_who_stops_looking_at_a_job_does_not_end_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.launch.watch.show_logs", lambda *_, **__: os.kill(os.getpid(), number))
    with pytest.raises(InterruptError) as caught:
        CliRunner().invoke(app, ["logs", "-f", "runs/x"], catch_exceptions=False)
    assert caught.value.exit_code == 128 + number
    assert caught.value.told().endswith("\nThe job goes on; end it by megarl cancel runs/x")
    assert "ending everything" not in capfd.readouterr().err
