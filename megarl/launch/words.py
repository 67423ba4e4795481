"""What a node of a job says to the job's leader: lines on its standard output, which SLURM carries.

Anything else on that output is for people and goes to the job's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MARK = "megarl-node"
ALIVE_EVERY_S = 2.0

Word = Literal["started", "ready", "alive", "failed"]
WORDS: tuple[Word, ...] = ("started", "ready", "alive", "failed")


@dataclass(frozen=True)
class Message:
    """One line: `megarl-node ready node3 10.0.0.3`."""

    word: Word
    node: str
    address: str

    def line(self) -> str:
        """As it is printed."""
        return f"{MARK} {self.word} {self.node} {self.address}"


def parse_line(line: str) -> Message | None:
    """The message of a line; None where it is none."""
    fields = line.split()
    if len(fields) != 4 or fields[0] != MARK:
        return None
    word = next((each for each in WORDS if each == fields[1]), None)
    return Message(word, fields[2], fields[3]) if word else None
