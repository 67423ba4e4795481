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

from tools.make_arithmetic import Problem, draw_problems, main, make_arithmetic, num_problems

Rows = list[dict[str, str]]
NUMBERS = st.integers(100, 999)


def read(folder: Path, name: str) -> Rows:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    make_arithmetic(folder, seed=3, num_train=300, num_eval=100, num_sft=2000)
    return folder


def numbers_of(question: str) -> tuple[int, int]:
    match = re.fullmatch(r"What is (\d{3}) \+ (\d{3})\?", question)
    assert match, question
    return int(match[1]), int(match[2])


def test_a_worked_answer_by_hand() -> None:
    assert Problem(482, 973).worked() == "ones 2+3+0=05\ntens 8+7+0=15\nhundreds 4+9+1=14\n#### 1455"
    assert Problem(482, 973).direct() == "#### 1455"


@given(NUMBERS, NUMBERS)
def test_every_worked_line_is_a_true_sum_and_carries_into_the_next(left: int, right: int) -> None:
    *lines, answer = Problem(left, right).worked().splitlines()
    carry, digits = 0, ""
    for line in lines:
        a, b, c, total = map(int, re.findall(r"\d+", line))
        assert (a + b + c, c) == (total, carry)
        carry, digits = divmod(total, 10)[0], str(total % 10) + digits
    assert int(f"{carry}{digits}") == left + right
    assert answer == f"#### {left + right}"


def test_answers_are_the_sums(folder: Path) -> None:
    for row in read(folder, "train") + read(folder, "eval"):
        assert int(row["answer"]) == sum(numbers_of(row["prompt"]))


def test_demonstrations_are_right_in_both_styles_and_mostly_direct(folder: Path) -> None:
    rows = read(folder, "sft")
    for row in rows:
        problem = Problem(*numbers_of(row["prompt"]))
        assert row["response"] in (problem.direct(), problem.worked())
    worked = sum("ones" in row["response"] for row in rows) / len(rows)
    assert worked == pytest.approx(0.4, abs=0.04)


def test_no_problem_appears_twice_in_either_order(folder: Path) -> None:
    rows = read(folder, "train") + read(folder, "eval") + read(folder, "sft")
    assert len({tuple(sorted(numbers_of(row["prompt"]))) for row in rows}) == len(rows) == 2400


def test_held_out_rows_do_not_change_with_the_number_of_other_rows(folder: Path, tmp_path: Path) -> None:
    make_arithmetic(tmp_path, seed=3, num_train=10, num_eval=100, num_sft=20)
    assert (tmp_path / "eval.jsonl").read_bytes() == (folder / "eval.jsonl").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    for seed in (3, 4):
        make_arithmetic(tmp_path / str(seed), seed=seed, num_train=300, num_eval=100, num_sft=2000)
    for name in ("train", "eval", "sft"):
        expected = (folder / f"{name}.jsonl").read_bytes()
        assert (tmp_path / "3" / f"{name}.jsonl").read_bytes() == expected
        assert (tmp_path / "4" / f"{name}.jsonl").read_bytes() != expected


def test_problems_run_out_with_the_last_pair() -> None:
    drawn = list(draw_problems(random.Random(0), digits=1))
    assert len(drawn) == num_problems(1) == 45


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"digits": 5}, "allowed are 1 to 4"),
        ({"digits": 0}, "allowed are 1 to 4"),
        ({"worked_share": 1.5}, "between 0 and 1"),
        ({"digits": 1, "num_train": 40, "num_eval": 5, "num_sft": 1}, "use more digits or fewer rows"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_way_out(tmp_path: Path, options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_arithmetic(tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_the_command_writes_the_files_and_exits_with_2_on_a_bad_option(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    out = str(tmp_path / "data")
    done = CliRunner().invoke(app, ["--out", out, "--train", "5", "--eval", "4", "--sft", "3"])
    assert (done.exit_code, [len(read(tmp_path / "data", name)) for name in ("train", "eval", "sft")]) == (0, [5, 4, 3])
    assert CliRunner().invoke(app, ["--out", out, "--digits", "9"]).exit_code == 2
