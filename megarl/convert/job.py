"""What the processes of a conversion are told, and what they answer: lines of JSON. Without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.core.layout import Layout
from megarl.models.hf_dtypes import Dtypes

Operation = Literal["hf-to-mcore", "mcore-to-hf", "reshard"]


@dataclass(frozen=True)
class Job:
    """One conversion, the same for every rank.

    source: HF folder or checkpoint. target: folder to make. hf: folder with the HF config. dtypes: of the checkpoint and of
    the HF tensors. casts: they are other than the source's, as asked for. deadline_s: longest wait for the other ranks.
    verify: read back what was written and compare it.
    """

    operation: Operation
    source: Path
    target: Path
    hf: Path
    layout: Layout
    dtypes: Dtypes
    casts: bool
    port: int
    deadline_s: float
    verify: bool

    def dump(self) -> str:
        """As one line."""
        return json.dumps(asdict(self), default=str)


def parse_job(line: str) -> Job:
    """What `dump` wrote."""
    raw = json.loads(line)
    paths = {name: Path(raw[name]) for name in ("source", "target", "hf")}
    return Job(**{**raw, **paths, "layout": Layout(**raw["layout"]), "dtypes": Dtypes(**raw["dtypes"])})


@dataclass(frozen=True)
class Message:
    """From a rank to the parent.

    kind: phase (text: reading, writing, verifying; total: bytes or 0), progress (done: bytes), error (text: a user's mistake, or
    what is expected to go wrong; code: exit code), verified (differences: rows; done: tensors compared).
    """

    kind: Literal["phase", "progress", "error", "verified"]
    text: str = ""
    done: int = 0
    total: int = 0
    code: int = 0
    differences: tuple[tuple[str, str, str, str], ...] = ()

    def dump(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


def parse_message(line: str) -> Message:
    """What `dump` wrote."""
    raw: dict[str, Any] = json.loads(line)
    return Message(**{**raw, "differences": tuple(tuple(row) for row in raw["differences"])})
