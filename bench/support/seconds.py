"""The fewest seconds of a call. Imports nothing: for processes that have another library's packages as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def fastest(call: Callable[[], T], repeats: int) -> tuple[T, float]:
    """What it returns, and the fewest seconds of so many calls after one that does not count."""
    result, taken = call(), []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return result, min(taken)
