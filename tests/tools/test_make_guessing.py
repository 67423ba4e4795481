"""The guessing game's rows: legal games, hints that are true, the same bytes for the same arguments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tools.make_guessing import make_guessing


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_games_are_legal_and_hints_are_true(tmp_path: Path) -> None:
    make_guessing(tmp_path, num_sft=2000, heed=0.5)
    won = heeding = 0
    for row in rows(tmp_path / "sft.jsonl"):
        talk = [message["content"] for message in row["messages"]]  # type: ignore[attr-defined]
        guesses, hints = [int(text) for text in talk[1::2]], talk[2::2]
        assert talk[0] == "Guess 1-30" and 1 <= len(guesses) == len(hints) + 1 <= 7
        assert all(1 <= guess <= 30 for guess in guesses)
        above = [guess for guess, hint in zip(guesses, hints, strict=False) if hint == "higher"]
        below = [guess for guess, hint in zip(guesses, hints, strict=False) if hint == "lower"]
        assert max(above, default=0) < min(below, default=31), "no secret would have got these hints"
        won += len(guesses) < 7
        bounds = [(max([0, *above[:at]]), guess) for at, guess in enumerate(guesses)]
        heeding += all(low < guess or low == 0 for low, guess in bounds)
    assert 0.3 < won / 2000 < 0.7 and heeding > 0


def test_held_out_secrets_are_all_equally_often_there(tmp_path: Path) -> None:
    make_guessing(tmp_path, num_eval=90)
    secrets = Counter(int(str(row["answer"])) for row in rows(tmp_path / "eval.jsonl"))
    assert secrets == dict.fromkeys(range(1, 31), 3)
    assert {int(str(row["answer"])) for row in rows(tmp_path / "train.jsonl")} == set(range(1, 31))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_guessing(tmp_path / name, seed=seed, num_sft=50)
    for file in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        one, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert one == same and (one != other or file == "eval.jsonl")


@pytest.mark.parametrize("options", [{"low": 3, "high": 3}, {"guesses": 0}, {"heed": 1.5}])
def test_games_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"wanted are low < high|between 0 and 1"):
        make_guessing(tmp_path, **options)  # type: ignore[arg-type]
