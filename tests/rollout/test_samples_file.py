"""The samples that people read."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
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


def test_figures_stand_beside_the_scores(tmp_path: Path) -> None:
    figured = replace(make_sample("p0"), numbers={"turns": 2.0, "reward/by/math/acc": 1.0})
    episode = replace(figured, metadata={"messages": []})
    write_samples(tmp_path / "s.jsonl", [figured, episode, make_sample("p0")])
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row.get("figures") for row in rows] == [{"math/acc": 1.0}, {"math/acc": 1.0}, None]
    assert [row.get("numbers") for row in rows] == [None, {"turns": 2.0}, None]


def test_what_an_environment_says_that_is_no_json_is_written_for_people(tmp_path: Path) -> None:
    """It ended the run: a row's date in a message, or a turn's reward as numpy has it."""
    said: dict[str, Any] = {
        "messages": [{"role": "tool", "content": {"at": date(2026, 1, 2)}}],
        "turn_rewards": [np.float32(0.5)],
    }
    write_samples(tmp_path / "s.jsonl", [replace(make_sample("p0"), metadata=said, numbers={"steps": np.int64(3)})])
    row = json.loads((tmp_path / "s.jsonl").read_text())
    assert row["messages"] == [{"role": "tool", "content": {"at": "2026-01-02"}}]
    assert (row["turn_rewards"], row["numbers"]) == ([0.5], {"steps": 3})
