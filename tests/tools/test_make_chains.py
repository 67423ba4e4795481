"""The calculator's task: chains and demonstrations that the environment takes, the same bytes for the same arguments."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.environment import Done, EpisodeRow, Response, Turn
from megarl.agents.environments.calculator import Calculator
from tools.make_chains import make_chains

CHAIN = re.compile(r"[1-9]\d([-+][1-9]\d)*")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def replayed(talk: list[dict[str, str]]) -> Turn | Done:
    """What the environment says to a demonstrated episode; what it says on the way is as demonstrated."""
    answer = talk[-1]["content"].removeprefix("#### ")
    environment = Calculator(chain=True)
    await environment.start(EpisodeRow("r:1", (talk[0],), answer, {}, 1))
    for turn, (said, told) in enumerate(zip(talk[1::2], talk[2::2], strict=False)):
        assert await environment.step(Response(said["content"], (), turn)) == Turn([told])
    return await environment.step(Response(talk[-1]["content"], (), len(talk) // 2))


def test_demonstrations_are_what_the_environment_would_have_said(tmp_path: Path) -> None:
    make_chains(tmp_path, num_sft=500, ask=0.5, drill=0.2)
    done = []
    for row in rows(tmp_path / "sft.jsonl"):
        talk = row["messages"]
        assert all(CHAIN.fullmatch(message["content"]) for message in talk[::2]), "two digits, also on the way"
        assert eval(talk[0]["content"]) == int(talk[-1]["content"].removeprefix("#### "))
        done.append((len(talk), asyncio.run(replayed(talk))))
    for length, found in done:
        assert isinstance(found, Done) and found.reward == float(length == 8), "only those with all steps are worth one"
    assert all(length == 8 for length, _ in done[:100])
    assert {length for length, _ in done[100:]} == {2, 4, 6, 8}


def test_answers_are_right_and_no_problem_is_there_twice(tmp_path: Path) -> None:
    make_chains(tmp_path, num_train=300, num_eval=40, num_sft=300)
    asked = [row for name in ("train", "eval") for row in rows(tmp_path / f"{name}.jsonl")]
    assert len(asked) == 340 and all(eval(row["prompt"]) == int(row["answer"]) for row in asked)
    shown = [row["messages"][0]["content"] for row in rows(tmp_path / "sft.jsonl")]
    assert len({*shown, *(row["prompt"] for row in asked)}) == 640


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_chains(tmp_path / name, seed=seed, num_train=20, num_eval=20, num_sft=20)
    for file in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        one, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert one == same != other


@pytest.mark.parametrize("options", [{"operations": 1}, {"operations": 7}, {"ask": 1.5}, {"drill": -1}])
def test_chains_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"allowed are 2 to 6|lie between 0 and 1"):
        make_chains(tmp_path, **options)  # type: ignore[arg-type]
