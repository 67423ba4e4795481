"""What decides in the benchmark of asynchronous runs, with numbers by hand; its model, which never ends a response."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.asynchronous import (
    COLOCATED,
    QUICK,
    SPLIT,
    compare,
    digest,
    make_data,
    make_model,
    reached,
    same_work,
    within,
)

SIZE = QUICK["split"]
ABORT, OVER = "split, staleness 1, abort", "colocated, oversample 1.25"


def turn(rate: float, *, tokens: int = 100, steps: int = 3, idle: float = 0.05) -> dict[str, Any]:
    return {"tokens_per_s": rate, "tokens": tokens, "steps": steps, "servers_idle": idle}


def test_a_row_is_digested_from_its_steps() -> None:
    def step(number: int, step_s: float, idle: float, length: float) -> dict[str, Any]:
        learning = {"perf/update_s": 2.0, "perf/ranks_idle": 1 - 3.0 / step_s}
        return {
            "step": number,
            "perf/step_s": step_s,
            "perf/servers_idle": idle,
            "rollout/response_len_mean": length,
            "rollout/staleness_mean": number / 2,
            **learning,
        }

    found = digest(
        [step(1, 10.0, 0.9, 10.0), step(2, 4.0, 0.1, 20.0), step(3, 6.0, 0.3, 30.0), step(4, 5.0, 0.9, 40.0)], SIZE
    )
    assert found["tokens"] == 100 * SIZE.prompts * SIZE.samples
    assert found["tokens_per_s"] == pytest.approx(100 * SIZE.prompts * SIZE.samples / 25.0)
    # The second and the third: (0.1 x 4 + 0.3 x 6) / 10; the ranks work for 3 of 4 and 3 of 6 seconds.
    assert found["servers_idle"] == pytest.approx(0.22)
    assert found["ranks_idle"] == pytest.approx(0.4)
    assert found["phases"]["update"] == 2.0 and found["staleness_mean"] == 1.25


def test_ratios_are_of_the_same_turn_and_kind() -> None:
    turns = {
        SPLIT: [turn(10.0), turn(20.0)],
        ABORT: [turn(15.0), turn(40.0)],
        COLOCATED: [turn(5.0)],
        OVER: [turn(6.0)],
    }
    assert compare(turns) == {SPLIT: [1.0, 1.0], ABORT: [1.5, 2.0], COLOCATED: [1.0], OVER: [1.2]}


@pytest.mark.parametrize(
    ("split", "late", "same"),
    [
        (turn(1.0), turn(1.0, tokens=50), True),
        (turn(1.0), turn(1.0, tokens=40), False),
        (turn(1.0, tokens=99), turn(1.0, tokens=50), False),
        (turn(1.0, steps=2), turn(1.0, tokens=50), False),
    ],
)
def test_all_rows_have_to_do_the_same_work(split: dict[str, Any], late: dict[str, Any], same: bool) -> None:
    other = {COLOCATED: [turn(1.0, tokens=50)], OVER: [late]}
    assert same_work({SPLIT: [turn(1.0)], ABORT: [split], **other}) is same


@pytest.mark.parametrize(
    ("rate", "idle", "good"), [(1.6, 0.05, [True, True]), (1.4, 0.05, [False, True]), (1.6, 0.2, [True, False])]
)
def test_targets(rate: float, idle: float, good: list[bool]) -> None:
    turns = {SPLIT: [turn(1.0)], ABORT: [turn(rate, idle=idle)]}
    assert [*reached(turns, compare(turns)).values()] == good


def test_learning_less_than_the_worst_synchronous_seed_is_not_within() -> None:
    synchronous = {1: 0.9, 2: 0.8}
    assert within({"synchronous": synchronous, "staleness 2": {1: 0.7, 2: 0.9}})
    assert not within({"synchronous": synchronous, "staleness 2": {1: 0.7, 2: 0.8}})


def test_the_model_never_ends_a_response_and_the_rows_bound_it(tmp_path: Path) -> None:
    size = replace(SIZE, steps=50)
    make_model(tmp_path / "model", size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    probs = model(torch.arange(60)[None]).logits.softmax(-1)
    assert probs[..., tokenizer.eos_token_id].max() < 1e-12
    assert probs.max() < 0.1, "any other token may come"
    rows = [json.loads(line) for line in make_data(tmp_path, size).read_text().splitlines()]
    lengths = sorted(row["max_response_tokens"] for row in rows)
    assert lengths[0] >= 1 and lengths[-1] <= size.longest
    assert lengths[200] == pytest.approx(size.median, rel=0.15)
    assert lengths[336] == pytest.approx(size.median * 2.718, rel=0.2), "84% are below a deviation above the median"
