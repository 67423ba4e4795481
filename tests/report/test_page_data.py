"""What the page of a run holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.report import page_data
from megarl.report.page_data import differences, flat, lines_of, meanings, names_of, read_recipe, read_samples, spread


def write_samples(folder: Path, name: str, *rows: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_line_has_the_steps_that_have_its_metric_and_null_for_what_is_no_finite_number() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "actor/entropy": math.nan, "note": "words", "flag": True},
        {"step": 2, "actor/entropy": 2, "eval/accuracy": math.inf},
    ]
    assert lines_of(rows) == {
        "eval/accuracy": {"steps": [0, 2], "values": [0.5, None]},
        "actor/entropy": {"steps": [1, 2], "values": [None, 2]},
    }


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=1, max_size=400), st.integers(6, 60))
def test_a_thinned_line_keeps_its_ends_and_peaks(values: list[float | None], most: int) -> None:
    thinned = page_data._thinned(list(range(len(values))), values, most)
    steps = thinned["steps"]
    assert len(steps) <= most or len(values) <= most
    assert steps == sorted({*steps}) and steps[0] == 0 and steps[-1] == len(values) - 1
    assert [values[step] for step in steps] == thinned["values"]
    finite = [value for value in values if value is not None]
    if finite:
        assert {min(finite), max(finite)} <= {*thinned["values"]}


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a" / "x", tmp_path / "a" / "y"]) == ["x", "y"]
    assert names_of([tmp_path / "run"]) == ["run"]


def test_metrics_have_their_meanings_and_unknown_ones_none() -> None:
    found = meanings(["reward/mean", "of/another-version"])
    assert found.keys() == {"reward/mean"} and found["reward/mean"]["unit"] == "reward"


@pytest.mark.parametrize(("count", "most", "chosen"), [(3, 5, [2, 1, 0]), (10, 4, [9, 6, 3, 0]), (0, 4, [])])
def test_places_are_spread_from_the_last_on(count: int, most: int, chosen: list[int]) -> None:
    assert spread(count, most) == chosen


def test_samples_are_read_by_kind_and_step_and_broken_lines_passed_over(tmp_path: Path) -> None:
    write_samples(tmp_path, "step_000002.jsonl", {"reward": 1.0, "response": "x" * 30_000}, [1])
    write_samples(tmp_path, "step_000010.jsonl", {"reward": 0.0, "response": "short"})
    write_samples(tmp_path, "eval_000000.jsonl", {"reward": None})
    write_samples(tmp_path, "step_mine.jsonl", {"reward": 5.0})
    with (tmp_path / "step_000010.jsonl").open("a") as file:
        file.write('{"reward": 1')
    files, left_out = read_samples(tmp_path)
    assert [(file["kind"], file["step"]) for file in files] == [("eval", 0), ("step", 2), ("step", 10)]
    assert left_out == 0 and files[2]["rows"] == [{"reward": 0.0, "response": "short"}]
    (long,) = files[1]["rows"]
    assert "[... 10,000 characters left out ...]" in long["response"] and len(long["response"]) < 20_100
    assert read_samples(tmp_path / "none") == ([], 0)


def test_of_many_files_some_are_held_and_within_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 101):
        write_samples(tmp_path, f"step_{step:06d}.jsonl", {"response": "x" * 1000})
    monkeypatch.setattr(page_data, "MOST_FILES", 10)
    files, left_out = read_samples(tmp_path)
    assert [file["step"] for file in files] == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100] and left_out == 90
    files, left_out = read_samples(tmp_path, most_bytes=2 * 3 * 1100)
    assert [file["step"] for file in files] == [78, 89, 100] and left_out == 97  # the last of a run tell most


def test_recipes_are_compared_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: {name: one}\nactor: {optimizer: {lr: 0.1}, offload: []}\n")
    one = read_recipe(tmp_path / "recipe.yaml")
    assert one == {"run.name": "one", "actor.optimizer.lr": 0.1, "actor.offload": []}
    other = flat({"run": {"name": "two"}, "actor": {"optimizer": {"lr": 0.2}}})
    assert differences([one, other]) == [
        {"key": "actor.offload", "values": ["[]", "-"]},
        {"key": "actor.optimizer.lr", "values": ["0.1", "0.2"]},
    ]
    assert read_recipe(tmp_path / "none.yaml") == {}
    (tmp_path / "recipe.yaml").write_text("run: [")
    with pytest.raises(UserError, match=r"recipe\.yaml cannot be read .*put it back, or remove it"):
        read_recipe(tmp_path / "recipe.yaml")
