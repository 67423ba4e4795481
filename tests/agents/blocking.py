"""Environments whose code blocks or breaks, for worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from megarl.agents.environment import Done, EpisodeRow, Response, Turn


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyError("words")


class Blocking:
    """Two turns; `start` and `step` block until as many as `together` are in them at once, of all processes.

    Each leaves a file with the pid of its process in `folder`. wrong: what the second turn does; to linger takes so long.
    """

    def __init__(self, folder: str, together: int = 1, wrong: str = "", linger_s: float = 1.5) -> None:
        self._folder, self._together, self._wrong, self._linger_s = Path(folder), together, wrong, linger_s

    async def start(self, row: EpisodeRow) -> list[dict[str, Any]]:
        self._thread = threading.get_ident()
        (self._folder / f"start-{id(self)}-{os.getpid()}").touch()
        end = time.monotonic() + 60
        while len([*self._folder.glob("start-*")]) < self._together:
            assert time.monotonic() < end, "nobody else came"
            time.sleep(0.01)
        return list(row.messages)

    async def step(self, response: Response) -> Any:
        assert threading.get_ident() == self._thread
        if response.turn == 0:
            return Turn([{"role": "user", "content": "on"}], 0.5)
        if self._wrong == "raise":
            raise KeyError("no such door")
        if self._wrong == "raise without words":
            raise Speechless
        if self._wrong == "exit":
            raise SystemExit(3)
        if self._wrong in ("die", "fork and die") and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            if self._wrong == "fork and die" and os.fork() == 0:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._wrong in ("hang", "linger"):
            time.sleep(60 if self._wrong == "hang" else self._linger_s)
        if self._wrong == "unpicklable":
            return lambda: None
        return Done(1.0, {"pid": float(os.getpid())})

    async def close(self) -> None:
        (self._folder / f"close-{id(self)}-{os.getpid()}").touch()


class Timed(Blocking):
    """Ends its steps in time by itself."""

    timed = True
