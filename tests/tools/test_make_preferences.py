from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tools.make_arithmetic import Problem
from tools.make_preferences import draw_other, main, make_preferences

Rows = list[dict[str, str]]
NUMBERS = st.integers(100, 999)


def read(folder: Path, name: str) -> Rows:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    make_preferences(folder, seed=3, num_train=2000, num_eval=200)
    return folder


def problem_of(row: dict[str, str]) -> Problem:
    match = re.fullmatch(r"What is (\d{3}) \+ (\d{3})\?", row["prompt"])
    assert match
    return Problem(int(match[1]), int(match[2]))


def is_worked(answer: str) -> bool:
    return answer.startswith("ones")


def test_a_wrong_answer_by_hand() -> None:
    # Under the digits of 174 + 189, the sums of 523 + 119: 3 + 9 = 12, 2 + 1 + 1 = 4, 5 + 1 = 6.
    wrong = Problem(174, 189).worked(sums_of=Problem(523, 119))
    assert wrong == "ones 4+9+0=12\ntens 7+8+1=04\nhundreds 1+1+0=06\n#### 642"


@given(NUMBERS, NUMBERS, st.integers(0, 1000))
def test_a_wrong_answer_follows_from_its_sums_and_not_from_its_digits(left: int, right: int, seed: int) -> None:
    problem = Problem(left, right)
    *lines, answer = problem.worked(sums_of=draw_other(problem, random.Random(seed))).splitlines()
    wrong, carry, digits = 0, 0, ""
    for line in lines:
        a, b, c, total = map(int, re.findall(r"\d+", line))
        assert c == carry
        wrong += a + b + c != total
        carry, digits = total // 10, str(total % 10) + digits
    assert wrong >= 1
    assert answer == f"#### {carry or ''}{digits}" and answer != problem.direct()
    assert [line.partition("=")[0].split("+")[:2] for line in lines] == [
        line.partition("=")[0].split("+")[:2] for line in problem.worked().splitlines()[:-1]
    ]


def test_the_chosen_answer_is_right_and_the_rejected_one_is_not(folder: Path) -> None:
    for row in read(folder, "train"):
        problem = problem_of(row)
        assert row["chosen"] in (problem.worked(), problem.direct())
        assert row["rejected"].splitlines()[-1] != problem.direct()


def test_styles_say_nothing_about_which_is_right(folder: Path) -> None:
    rows = read(folder, "train")
    chosen, rejected = ([is_worked(row[side]) for row in rows] for side in ("chosen", "rejected"))
    assert sum(chosen) / len(rows) == pytest.approx(0.8, abs=0.03)
    assert sum(rejected) / len(rows) == pytest.approx(0.8, abs=0.03)
    # Half of the pairs draw styles apart: 2 x 0.8 x 0.2 of these differ.
    differ = sum(one != other for one, other in zip(chosen, rejected, strict=True)) / len(rows)
    assert differ == pytest.approx(0.5 * 2 * 0.8 * 0.2, abs=0.03)


def test_no_problem_appears_twice_and_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    rows = read(folder, "train") + read(folder, "eval")
    assert len({tuple(sorted(problem_of(row))) for row in rows}) == len(rows) == 2200
    make_preferences(tmp_path, seed=3, num_train=10, num_eval=200)
    assert (tmp_path / "eval.jsonl").read_bytes() == (folder / "eval.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"worked_share": 1.5}, "worked_share=1.5"),
        ({"mixed_share": -1.0}, "mixed_share"),
        ({"digits": 1}, "ask for fewer"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_preferences(tmp_path / "data", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()


def test_the_command_writes_the_files_and_exits_with_2_on_a_bad_option(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    out = str(tmp_path / "data")
    assert CliRunner().invoke(app, ["--out", out, "--train", "5", "--eval", "4"]).exit_code == 0
    assert [len(read(tmp_path / "data", name)) for name in ("train", "eval")] == [5, 4]
    assert CliRunner().invoke(app, ["--out", out, "--mixed-share", "2"]).exit_code == 2


def test_labelled_answers_are_those_of_the_pairs_in_turn(folder: Path) -> None:
    for name in ("train", "eval"):
        pairs, labelled = read(folder, name), read(folder, f"labelled_{name}")
        assert [row["prompt"] for row in labelled] == [pair["prompt"] for pair in pairs]
        assert [row["label"] for row in labelled[:3]] == [True, False, True]
        assert all(row["completion"] == pair["chosen"] for row, pair in zip(labelled[::2], pairs[::2], strict=True))
        assert all(row["completion"] == pair["rejected"] for row, pair in zip(labelled[1::2], pairs[1::2], strict=True))
