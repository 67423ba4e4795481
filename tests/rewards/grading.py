"""Reward functions that behave badly on request; the grader processes of the tests import this module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

Metadata = dict[str, Any]


def share(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """How much of the answer's length the response has."""
    return len(response) / len(answer)


class Odd:
    """Neither a number nor to be shown; with an error that a tensor of several numbers has."""

    def __float__(self) -> float:
        raise RuntimeError("a tensor with 2 elements cannot be converted to a scalar")

    def __repr__(self) -> str:
        raise RuntimeError("no")


def odd(prompt: str, response: str, answer: str, metadata: Metadata) -> Any:
    """Gives or raises what cannot be shown."""
    if response == "raise":
        raise OddError
    return Odd() if response == "number" else 0.5


class OddError(Exception):
    """An error without words."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def naughty(prompt: str, response: str, answer: str, metadata: Metadata) -> Any:
    """Does what the response says; anything else earns 0.5."""
    match response:
        case "hang":
            time.sleep(3600)
        case "raise":
            raise ValueError("boom")
        case "exit":
            sys.exit(4)
        case "die":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "print":
            print("x" * 100_000)
            sys.stdout.flush()
        case "read":
            input()
        case "text":
            return "1.0"
        case "nan":
            return float("nan")
        case "nothing":
            return None
        case "true":
            return True
    return 0.5


def killed_once(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """Is killed the first time that it is asked; the file of that name tells. Then it earns 0.5."""
    if not Path(response).exists():
        Path(response).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


def pid(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """The process that grades."""
    return float(os.getpid())


def spawn_and_hang(prompt: str, response: str, answer: str, metadata: Metadata) -> NoReturn:
    """Starts a child that outlives a hang, and writes both pids to the file that the metadata names."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(metadata["file"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(3600)
    raise AssertionError("an hour has passed")


def echo(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """Whether everything came through."""
    return float((prompt, response, answer, metadata) == ("p\0é", "r\n" * 100_000, "", {"a": [1, {"b": None}]}))


def torch_is_loaded(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """Whether the process has imported torch."""
    return float("torch" in sys.modules)


def wrong(prompt: str, response: str) -> float:
    """Has the wrong parameters."""
    return 0.0


def each(prompt: str, response: str, answer: str, metadata: Metadata) -> Iterator[float]:
    """A generator."""
    yield 0.0


async def each_later(prompt: str, response: str, answer: str, metadata: Metadata) -> AsyncIterator[float]:
    """A generator that is waited for."""
    yield 0.0


async def later(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    """Is waited for."""
    return float(response == answer)


def whole(prompt: str, response: str, answer: str, metadata: Metadata, truncated: bool) -> float:
    """Whether the response has an end."""
    return float(not truncated)


def rest(response: str, **others: Any) -> float:
    """Hands everything on to a function of the parameters that every reward function has."""
    return share(response=response, **others)


class Keyword:
    """A callable object."""

    def __call__(self, *, answer: str, response: str, prompt: str, metadata: Metadata, bonus: float = 0.0) -> float:
        return 1.0 + bonus


keyword = Keyword()
constant = 3
