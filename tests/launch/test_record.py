"""What a run's folder remembers of its submission."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.launch import record
from megarl.launch.record import (
    Submission,
    find_submission,
    last_exit_code,
    last_submission,
    steps_done,
    submitted_runs,
)


def test_the_last_submission_is_found_again(tmp_path: Path) -> None:
    run = tmp_path / "a"
    assert last_submission(run) is None
    for job in ("1", "2"):
        Submission("slurm", job, log="x").write(run)
    assert find_submission(run) == Submission("slurm", "2", log="x")
    assert [path.name for path in (run / "launch").iterdir()] == ["submission.json"]


def test_a_folder_that_is_no_submitted_run_is_answered_with_those_that_are(tmp_path: Path) -> None:
    Submission("ray", "raysubmit_1", "http://h:8265").write(tmp_path / "here")
    with pytest.raises(UserError, match=r"there is not the folder.*Submitted runs in .*: .*/here\."):
        find_submission(tmp_path / "there")
    assert submitted_runs(tmp_path) == [tmp_path / "here"]


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "slurm"',
        "[]",
        '{"kind": "slurm", "job": "1", "colour": 3}',
        '{"kind": "slurm", "job": 1}',
        '{"kind": "k8s", "job": "1"}',
    ],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    Submission("slurm", "1").write(tmp_path)
    (tmp_path / "launch" / "submission.json").write_text(text)
    with pytest.raises(UserError, match=r"submission.json is no record of a submission"):
        find_submission(tmp_path)


def test_steps_done_are_the_last_in_the_metrics(tmp_path: Path) -> None:
    assert steps_done(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 12}\n')
    assert steps_done(tmp_path) == 12
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 13, "rew')
    assert steps_done(tmp_path) == 12, "a line that is not whole yet"


def test_lines_without_a_step_hide_neither_the_steps_done_nor_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 12}\n{"reward/mean": 0.5}\n{"step": null}\n')
    assert steps_done(tmp_path) == 12
    (tmp_path / "metrics.jsonl").write_text('{"reward/mean": 0.5}\n')
    assert steps_done(tmp_path) is None
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "events.jsonl").write_text('{"event": "started"}\n{"job": "7", "exit_code": 1}\n')
    assert last_exit_code(tmp_path, "7") == 1


def test_of_a_long_run_the_end_of_its_metrics_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.dumps({"step": 7, "reward/mean": 0.5}) + "\n"
    # A first line that would be read as another step if it were looked at after the end.
    (tmp_path / "metrics.jsonl").write_text(row.replace("7", "9") + row * 3)
    looked: list[int | None] = []
    whole = record.whole_lines

    def whole_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, object]]:
        looked.append(last_bytes)
        return whole(path, last_bytes)

    monkeypatch.setattr(record, "whole_lines", whole_lines)
    monkeypatch.setattr(record, "LAST_BYTES", 2 * len(row))
    assert (steps_done(tmp_path), looked) == (7, [2 * len(row)])
    monkeypatch.setattr(record, "LAST_BYTES", len(row) // 2)
    assert steps_done(tmp_path) == 7 and looked[1:] == [len(row) // 2, None], (
        "a row that is longer than what is looked at"
    )


def test_the_exit_code_of_a_job_is_that_of_its_last_driver(tmp_path: Path) -> None:
    assert last_exit_code(tmp_path, "7") is None
    (tmp_path / "launch").mkdir()
    lines = [{"job": "6", "exit_code": 3}, {"job": "7", "exit_code": 75}, {"job": "7", "event": "started"}]
    (tmp_path / "launch" / "events.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"job": "7", "ex']))
    assert last_exit_code(tmp_path, "7") == 75 and last_exit_code(tmp_path, "5") is None


def test_what_the_system_does_not_give_is_named(tmp_path: Path) -> None:
    """As the run of somebody else."""
    unreadable = Path("/proc/self/mem")  # there, and refused to root as well
    Submission("slurm", "7").write(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to(unreadable)
    (tmp_path / "launch" / "events.jsonl").symlink_to(unreadable)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        steps_done(tmp_path)
    with pytest.raises(UserError, match=r"events\.jsonl cannot be read"):
        last_exit_code(tmp_path, "7")
    (tmp_path / "launch" / "submission.json").unlink()
    (tmp_path / "launch" / "submission.json").symlink_to(unreadable)
    with pytest.raises(UserError, match=r"submission\.json cannot be read"):
        find_submission(tmp_path)


def test_an_exit_code_that_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    lines = [{"job": "7", "exit_code": 3}, {"job": "7", "exit_code": None}, {"job": "7", "exit_code": "x"}]
    (tmp_path / "launch" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_exit_code(tmp_path, "7") == 3
