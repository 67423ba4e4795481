"""Tools to be called in tests."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Any, Literal

from pydantic import Field


def multiply(left: int, right: Annotated[int, Field(description="the other number")] = 2) -> int:
    """The product of two numbers."""
    return left * right


async def look_up(word: str, language: Literal["en", "de"] = "en") -> dict[str, str]:
    """What a word means."""
    await asyncio.sleep(0.05)
    return {word: language}


def count(words: list[str], weights: dict[str, float] | None = None) -> Any:
    return [len(words), weights]


def fails(why: str) -> str:
    raise KeyError(why)


def exits(code: int) -> None:
    sys.exit(code)


def hangs(seconds: float) -> None:
    time.sleep(seconds)


def gives(what: Literal["bytes", "cycle", "half", "interrupt"]) -> Any:
    """What is no text, and none can be made of."""
    if what == "interrupt":
        raise KeyboardInterrupt
    endless: list[Any] = []
    endless.append(endless)
    return {"bytes": b"\xff5", "cycle": endless, "half": {"name": "\ud800"}}[what]


def unhinted(left: int, right) -> int:  # type: ignore[no-untyped-def]
    return left


def variadic(*numbers: int) -> int:
    return sum(numbers)


def misspelt(left: Intt) -> int:  # type: ignore[name-defined]  # noqa: F821
    return 1


def odd(left: object()) -> int:  # type: ignore[valid-type]
    return 1


class Thing:
    pass


def unknown(thing: Thing) -> int:
    return 1
