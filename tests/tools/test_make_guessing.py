"""The guessing game's rows: legal games, hints that are true, the same bytes for the same arguments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tools.make_guessing import make_guessing


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_games_are_legal_and_what_is_told_is_true(tmp_path: Path) -> None:
    make_guessing(tmp_path, num_sft=2000, halve=0.15, drill=0.0)
    guesses = Counter[str]()
    won = 0
    for number, row in enumerate(rows(tmp_path / "sft.jsonl")):
        talk = [message["content"] for message in row["messages"]]  # type: ignore[attr-defined]
        low, high = (10, 45) if number % 2 == 0 else map(int, talk[0].split()[-1].split("-"))
        assert talk[0] == f"Guess {low}-{high}" and 2 <= len(talk) <= 12 and len(talk) % 2 == 0
        for guess, told in zip(map(int, talk[1::2]), [*talk[2::2], None], strict=True):
            guesses["low" if guess == low else "middle"] += low != high
            assert guess in (low, (low + high) // 2)
            if told is None:
                won += number % 2 == 0 and len(talk) < 12
                continue
            if told.startswith("higher"):
                low = guess + 1
            else:
                high = guess - 1
            assert told.partition(": ")[2] == f"{low}-{high}" and low <= high
    # Of two numbers the lower one is the middle.
    assert 0.11 < guesses["middle"] / guesses.total() < 0.17 and won < 0.3 * 1000


def test_first_come_games_from_any_numbers_in_which_all_guesses_halve(tmp_path: Path) -> None:
    make_guessing(tmp_path, num_sft=600, drill=0.5)
    begun = set()
    for row in rows(tmp_path / "sft.jsonl")[:300]:
        talk = [message["content"] for message in row["messages"]]  # type: ignore[attr-defined]
        begun.add(talk[0])
        for told, guess in zip(talk[::2], talk[1::2], strict=True):
            low, high = map(int, told.split()[-1].split("-"))
            assert 10 <= low <= high <= 45 and int(guess) == (low + high) // 2
        low, high = map(int, talk[0].split()[-1].split("-"))
        assert len(talk) // 2 <= (high - low + 1).bit_length(), "who halves has so many numbers in so many guesses"
    assert len(begun) > 200


def test_held_out_secrets_are_all_equally_often_there(tmp_path: Path) -> None:
    make_guessing(tmp_path, num_eval=72)
    secrets = Counter(int(str(row["answer"])) for row in rows(tmp_path / "eval.jsonl"))
    assert secrets == dict.fromkeys(range(10, 46), 2)
    assert {int(str(row["answer"])) for row in rows(tmp_path / "train.jsonl")} == set(range(10, 46))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_guessing(tmp_path / name, seed=seed, num_sft=50)
    for file in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        one, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert one == same and (one != other or file == "eval.jsonl")


@pytest.mark.parametrize("options", [{"low": 3, "high": 3}, {"guesses": 0}, {"halve": 1.5}, {"drill": -1}])
def test_games_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"wanted are low < high|lie between 0 and 1"):
        make_guessing(tmp_path, **options)  # type: ignore[arg-type]
