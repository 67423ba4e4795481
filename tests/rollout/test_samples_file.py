"""The samples that people read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.rollout.samples_file import write_samples
from tests.rollout.samples import make_sample


def test_a_sample_is_one_line_whichever_way_lines_are_taken(tmp_path: Path) -> None:
    said = ["one\u2028line", "another\x85é\u2029", "\u4e00\n\x0c\x1e"]
    file = tmp_path / "samples" / "step_000001.jsonl"
    write_samples(file, [replace(make_sample("p0"), response_text=text) for text in said])
    text = file.read_text(encoding="utf-8")
    assert [json.loads(line)["response"] for line in text.splitlines()] == said
    assert "é" in text and "\u4e00" in text, "it is for people"


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").touch()
    write_samples(tmp_path / "samples" / "step_000001.jsonl", [make_sample("p0")])
    assert "samples/step_000001.jsonl, for reading, could not be written: File exists" in caplog.text
