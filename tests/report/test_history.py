"""metrics.jsonl: read whole lines, name broken ones, trim after a resume."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.report.history import best_steps, read_history, series, trim_history

ROWS = '{"step": 0, "eval/accuracy": 0.25}\n{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(ROWS)
    return path


def test_reads_rows_and_series(file: Path) -> None:
    rows = read_history(file)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert series(rows, "reward/mean") == ([1], [0.5])
    assert series(rows, "eval/accuracy") == ([0], [0.25])


def test_what_is_no_finite_number_is_in_no_series(file: Path) -> None:
    """Another program has written the row: megarl writes null for such a value."""
    file.write_text(ROWS + '{"step": 3, "reward/mean": Infinity}\n{"step": 4, "reward/mean": "0.5"}\n')
    assert series(read_history(file), "reward/mean") == ([1], [0.5])


def test_a_half_written_last_line_is_not_a_row(file: Path) -> None:
    file.write_text(ROWS + '{"step": 3, "rew')
    assert [row["step"] for row in read_history(file)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{nonsense\n", "line 4 is not JSON"),
        ("[1]\n", "line 4 is not a row"),
        ('{"reward/mean": 1}\n', "line 4 is not a row"),
        ('{"step": 3, "reward/mean": ' + "9" * 5000 + "}\n", "line 4 is not JSON"),
        ("[" * 100_000 + "\n", "line 4 is not JSON"),
    ],
)
def test_broken_lines_are_named(file: Path, line: str, says: str) -> None:
    file.write_text(ROWS + line + ROWS)
    with pytest.raises(UserError, match=says):
        read_history(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist") as refused:
        read_history(tmp_path / "metrics.jsonl")
    assert "Runs in" not in str(refused.value)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=f"Runs in {tmp_path}: {tmp_path}/a, {tmp_path}/b"):
        read_history(tmp_path / "metrics.jsonl")


def test_bytes_that_are_no_text_are_named(file: Path) -> None:
    file.write_bytes(ROWS.encode() + b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 4 is not JSON"):
        read_history(file)


def test_a_folder_is_not_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        read_history(tmp_path)


def test_a_file_that_cannot_be_read_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: Permission denied\.$"):
        read_history(file)


def test_lines_that_are_missing_are_told_and_of_two_the_later_is_kept(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(ROWS + '{"step": 1, "reward/mean": 0.75}\n{"step": 5}\n{"step": 12}\n')
    trim_history(file, 11)
    assert [(row["step"], row.get("reward/mean")) for row in read_history(file)] == [
        (0, None),
        (1, 0.75),
        (2, None),
        (5, None),
    ]
    assert f"{file} has no line of step 3, 4, 6, 7, 8 and 3 more" in caplog.text
    caplog.clear()
    trim_history(file, 2)
    assert not caplog.text


def test_trim_drops_what_came_after(file: Path) -> None:
    file.write_text(ROWS + '{"step": 3, "rew')
    trim_history(file, 1)
    assert file.read_text().splitlines() == ROWS.splitlines()[:2]
    assert list(file.parent.iterdir()) == [file]


def test_the_best_steps_are_those_with_the_highest_or_lowest_value_and_of_equal_ones_the_later(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {0: 0.9, 1: 0.5, 2: None, 3: 0.7, 4: 0.5, 6: 0.7}
    rows = [{"step": step} | ({} if each is None else {"eval/reward": each}) for step, each in values.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [1, 2, 3, 4, 5, 6]
    for lowest, count, best in (
        (False, 1, {6}),
        (False, 2, {3, 6}),
        (False, 3, {3, 4, 6}),
        (True, 1, {4}),
        (True, 2, {1, 4}),
        (True, 9, {1, 3, 4, 6}),
    ):
        assert best_steps(file, "eval/reward", lowest=lowest, count=count, steps=steps) == best
    assert best_steps(file, "eval/accuracy", lowest=False, count=2, steps=steps) == set()
    file.write_text("no row\n")
    assert best_steps(file, "eval/reward", lowest=False, count=1, steps=steps) == set(steps)
    assert "and all are kept" in caplog.text
