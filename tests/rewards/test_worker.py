import asyncio
import functools
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from megarl.rewards.grade import MOST_SHOWN, Grade
from megarl.rewards.resolve import resolve_reward
from megarl.rewards.worker import grade

naughty = resolve_reward("grading:naughty", Path(__file__).parent)


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
    assert grade(naughty, "", response, "", {}) == Grade(*result)


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


def test_a_coroutine_that_a_decorator_hides_is_no_number() -> None:
    """Only calling it tells: a decorator may as well run the coroutine to its end."""

    async def later(**_: object) -> float:
        return 1.0

    wrapped = functools.wraps(later)(lambda **given: later(**given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it was never awaited
        failure = grade(wrapped, "", "", "", {}).failure
    assert failure == "not a number: it gave a coroutine; a reward function returns the number itself"
    assert grade(lambda **given: asyncio.run(later(**given)), "", "", "", {}) == Grade(1.0)


def test_a_long_error_is_cut() -> None:
    def verbose(**_: object) -> float:
        raise ValueError("x" * sys.getrecursionlimit() * 100)

    failure = grade(verbose, "", "", "", {}).failure
    assert failure is not None and len(failure) == MOST_SHOWN
