"""Environments some of whose methods are tools; what a test wants of them goes in as settings."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

from megarl.agents.environment import Done, EpisodeRow, Message, Response, ToolResult, Turn


class Counter:
    """Counts up to a target; a turn without a call ends the episode, and is worth a tenth of the count.

    until: what hangs does so until there is a file of this name.
    """

    def __init__(self, target: int = 100, until: str = "") -> None:
        self.target, self.total, self.closed = target, 0, 0
        self.until = Path(until)

    async def start(self, row: EpisodeRow) -> list[Message]:
        self.thread = threading.get_ident()
        return list(row.messages)

    def add(self, by: int) -> ToolResult | Done:
        """Add a number to the count.

        Zero is none.
        """
        if by == 0:
            raise ValueError("zero adds nothing")
        before = self.total
        time.sleep(0.02)  # another call of the same turn has to wait: else it would see the old count
        self.total = before + by
        if self.total >= self.target:
            return Done(1.0, {"reached": 1.0})
        return ToolResult({"total": self.total}, -0.25, {"total": self.total})

    async def look(self) -> dict[str, int]:
        """The count."""
        return {"total": self.total}

    def gives(self, what: Literal["turn", "nan", "metric", "hang", "exit", "die", "thread", "half"]) -> Any:
        """What no tool may give, or not always."""
        while what == "hang" and not self.until.exists():
            time.sleep(0.01)
        if what == "exit":
            raise SystemExit(3)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "turn": Turn([{"role": "user", "content": "on"}]),
            "nan": ToolResult("five", float("nan")),
            "metric": Done(1.0, {"so many": 1.0}),
            "thread": threading.get_ident() == self.thread,
            "half": ToolResult({"name": "\ud800"}),
        }.get(what)

    def reward(self) -> float:
        return self.total / 10

    async def close(self) -> None:
        self.closed += 1

    @property
    def count(self) -> int:
        """No method."""
        return self.total

    @staticmethod
    def best() -> int:
        """Of no object."""
        return 7

    def unhinted(self, by):  # type: ignore[no-untyped-def]
        return by


class Ended(Counter):
    """Says so by a coroutine, with numbers."""

    async def reward(self) -> Done:  # type: ignore[override]
        return Done(self.total / 4, {"total": 50.0})


class Answering(Counter):
    """Answers a turn without a call, and is done with the second."""

    async def step(self, response: Response) -> Turn | Done:
        self.total += 10
        return Turn([{"role": "user", "content": "on"}], 0.5) if response.turn < 3 else Done(self.total)


class Mistaken(Counter):
    """Does not know what it was worth."""

    def reward(self) -> Any:
        return "much"


class Silent:
    """Neither answers a turn without a call nor says what an end was worth."""

    async def start(self, row: EpisodeRow) -> list[Message]:
        return list(row.messages)

    def look(self) -> str:
        """Nothing."""
        return ""

    async def close(self) -> None:
        return None
