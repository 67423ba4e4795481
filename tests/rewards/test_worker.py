import asyncio
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.rewards import worker
from megarl.rewards.grade import MOST_SHOWN, Grade, Item
from megarl.rewards.resolve import resolve_reward
from megarl.rewards.worker import Loop

LINE = re.compile(r" \([^()]+\.py, line \d+\)$")
naughty = resolve_reward("grading:naughty", Path(__file__).parent)


def grade(function: Callable[..., Any], *asked: Any) -> Grade:
    with Loop() as loop:
        return worker.grade(function, loop.run, Item(*asked))


class Odd:
    """No number, and not to be shown."""

    def __float__(self) -> float:
        raise RuntimeError("a tensor with 2 elements cannot be converted to a scalar")

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ("fine", (0.5, None)),
        ("true", (1.0, None)),
        ("raise", (0.0, "error: ValueError: boom")),
        ("exit", (0.0, "error: SystemExit: 4")),
        ("text", (0.0, "not a number: '1.0'")),
        ("nan", (0.0, "not a number: nan")),
        ("nothing", (0.0, "not a number: None")),
    ],
)
def test_a_grade_or_why_there_is_none(response: str, result: tuple[float, str | None]) -> None:
    found = grade(naughty, "", response, "", {})
    assert (found.reward, found.failure and LINE.sub("", found.failure)) == result


def test_an_error_is_told_with_the_line_of_the_users_that_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).with_name("grading.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if 'ValueError("boom")' in text)
    monkeypatch.chdir(Path(__file__).parent)
    assert grade(naughty, "", "raise", "", {}).failure == f"error: ValueError: boom (grading.py, line {line})"
    monkeypatch.chdir("/")

    def rude(response: str, **_: object) -> float:
        raise RuntimeError(response)

    failure = grade(rude, "", "x" * 10_000, "", {}).failure
    assert failure is not None and len(failure) == MOST_SHOWN and f"... ({__file__[1:]}, line " in failure


@pytest.mark.parametrize("value", [np.float32(0.25), np.array(0.25), 0.25])
def test_what_can_be_a_float_is_a_number(value: object) -> None:
    assert grade(lambda **_: value, "", "", "", {}) == Grade(0.25)


@pytest.mark.parametrize("value", [np.zeros(2), 10**400, float("inf"), {}, b"1"])
def test_what_cannot_be_a_float_is_not(value: object) -> None:
    found = grade(lambda **_: value, "", "", "", {})
    assert found.reward == 0.0
    assert found.failure is not None and found.failure.startswith("not a number: ")


@pytest.mark.parametrize("value", [2.7e43, -1e39, 1e300])
def test_what_no_float32_holds_is_no_grade(value: float) -> None:
    found = grade(lambda **_: value, "", "", "", {})
    assert found.reward == 0.0 and found.failure == f"too large: {value!r}; a reward is at most 1e+30, and float32"


def test_a_coroutine_is_waited_for_on_one_loop_and_its_errors_are_the_functions() -> None:
    """Also one that a decorator hides: only calling it tells."""
    loops = set()

    async def later(response: str, **_: object) -> float:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 1.0 / float(response)

    with Loop() as loop:
        for function in (later, functools.wraps(later)(lambda **given: later(**given))):
            assert worker.grade(function, loop.run, Item("", "2", "")) == Grade(0.5)
            failure = worker.grade(function, loop.run, Item("", "0", "")).failure
            assert failure is not None and LINE.sub("", failure) == "error: ZeroDivisionError: float division by zero"
        assert len(loops) == 1
        nested = worker.grade(lambda **given: asyncio.run(later(**given)), loop.run, Item("", "1", ""))
        assert nested == Grade(1.0)


def test_the_score_is_taken_out_of_what_a_function_says_beside_it() -> None:
    assert grade(lambda **_: {"score": 0.25, "acc": True, "pred": "4"}, "", "", "", {}) == Grade(
        0.25, None, {"acc": 1.0}
    )
    for value in ({"score": None}, {"reward": 1.0}, {"score": float("nan")}):
        found = grade(lambda value=value, **_: value, "", "", "", {})
        assert found.failure is not None and found.failure.startswith("not a number: ")


def test_figures_beside_the_score_are_numbers_by_names_that_metrics_can_have() -> None:
    def said(value: dict[Any, Any]) -> Mapping[str, float]:
        found = grade(lambda **_: {"score": 1.0, **value}, "", "", "", {})
        assert (found.reward, found.failure) == (1.0, None), "what stands beside the score takes nothing from it"
        return found.figures

    assert said({"acc": True, "len": 12, "np": np.float32(0.5), "format.strict": 0.25}) == {
        "acc": 1.0,
        "len": 12.0,
        "np": 0.5,
        "format.strict": 0.25,
    }
    odd = {"text": "4", "none": None, "nan": math.nan, "inf": math.inf, "list": [1, 2], "odd": Odd(), "deep": {"a": 1}}
    assert said(odd) == {}
    assert said({"a/b": 1, "with space": 1, "": 1, 3: 1, "x" * 65: 1, "mean": 1, "std": 1, "failures": 1}) == {}
    assert list(said({f"k{number:02}": number for number in reversed(range(20))})) == [f"k{n:02}" for n in range(16)]
    assert grade(lambda **_: 0.5, "", "", "", {}).figures == {}
    assert grade(lambda **_: {"score": "none", "acc": 1}, "", "", "", {}).figures == {}, "of what has no score"


def test_what_is_needed_later_is_imported_by_a_thread_that_stands_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice = "os.getpriority(os.PRIO_PROCESS, threading.get_native_id())"
    (tmp_path / "needed_later.py").write_text(f"import os, threading\nniceness = {nice}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=worker._import_behind, args=("needed_later",))
    thread.start()
    thread.join()
    assert sys.modules.pop("needed_later").niceness == min(19, before + worker.BEHIND)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
