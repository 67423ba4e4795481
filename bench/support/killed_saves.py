"""A small run that does nothing but train and save, and is killed at a chosen moment of a save.

A run's own code: the engine of a rank, the recorder, the checkpoints. No servers, no samples, no other process. Python tells of
each operation on files before it is done (its audit events); by these moments are counted and named. Import it in a process that
may fork lives.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.core.pending import Finished
from megarl.core.protocols import State
from megarl.core.stop import StopRequest
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.report.console import RunConsole
from megarl.report.writers import Writers
from megarl.run.recorder import Devices, Recorder
from megarl.training.manifest import MANIFEST
from megarl.training.rank import Rank
from megarl.training.run_checkpoints import MARKER, STATE, Checkpoints
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.training.samples import examples, shards

ROLE, VOCAB, KEEP = "actor", 97, 2
CHECKPOINTS, STEPS_DONE = "checkpoints", "steps.jsonl"  # in a run's folder
# Of a save, in their order; the last is what comes between two saves.
PARTS = ("beginning", "writing", "manifest", "marker", "to the disk", "renaming", "renamed", "pruning", "training")
EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"})


@dataclass(frozen=True)
class Moment:
    """When a life is killed: at operation `number` (from 0) of its save `save` (from 1).

    exactly: just before that operation, by itself. Otherwise it says so through a pipe, and is killed some time after.
    """

    save: int
    number: int
    exactly: bool


def part_of(event: str, path: Path, writes: bool, before: str, checkpoints: Path) -> str | None:
    """The part that an operation on files belongs to; None where it is not one of a save. before: of the operation before."""
    if event in ("os.remove", "os.rmdir"):  # told by names within a folder that is being removed
        return before
    if not path.is_relative_to(checkpoints):
        return None
    inner = path.relative_to(checkpoints).parts
    temporary = bool(inner) and inner[0].startswith(".tmp-")
    found = before
    if event == "os.rename":
        found = "pruning" if not temporary else "renaming" if len(inner) == 1 else before
    elif event == "shutil.rmtree":
        found = "beginning" if temporary else "pruning"
    elif event == "open" and not temporary:
        found = "pruning" if inner else "renamed"
    elif event == "open" and writes:
        found = {STATE: "marker", MARKER: "marker", MANIFEST: "manifest"}.get(path.name, "writing")
    elif event == "open" and before == "marker":
        found = "to the disk"
    return found


@dataclass
class Watch:
    """Counts the operations of this process on files while it saves.

    told: a pipe, for a byte at the moment. seen: saves so far, operations of this one, and its part as an index, in memory
    that outlives the process. made: part and time of each operation of this save.
    """

    checkpoints: Path
    seen: Any
    moment: Moment | None
    told: int
    made: list[tuple[str, float]] = field(default_factory=list)
    _part: str = PARTS[0]
    _lock: Any = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """A save begins: what comes until the next one belongs to it, whoever does it."""
        with self._lock:
            self.made, self._part = [], PARTS[0]
            self.seen[0], self.seen[1], self.seen[2] = self.seen[0] + 1, 0, 0

    def end(self) -> None:
        """It has been committed."""
        self.seen[2] = PARTS.index("training")

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's audit hook."""
        if event not in EVENTS or not self.seen[0]:
            return
        writes = event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        with self._lock:
            part = part_of(event, Path(str(args[0])), writes, self._part, self.checkpoints)
            if part is None:
                return
            number, self._part = self.seen[1], part
            self.seen[1], self.seen[2] = number + 1, PARTS.index(part)
            self.made.append((part, time.perf_counter()))
        moment = self.moment
        # A save may have fewer operations than the one that moments were drawn from.
        if moment is not None and (self.seen[0], number) >= (moment.save, moment.number):
            self.moment = None
            if moment.exactly:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(self.told, b"x")


@dataclass(frozen=True)
class Actor:
    """The one role of the run, as a recorder takes it."""

    rank: Rank
    name: str = ROLE

    def save(self, folder: Path, wait: bool) -> None:
        """Into an empty folder."""
        self.rank.save(ROLE, folder, wait=wait)

    def finish_save(self) -> Finished[None]:
        """What is being written is whole."""
        self.rank.finish_save(ROLE)
        return Finished(None)

    def load(self, folder: Path) -> None:
        """Of a checkpoint."""
        self.rank.load(ROLE, folder)


@dataclass
class Position:
    """Stands for the data: a number that every step sets, so that a state that is not of its step is seen."""

    step: int = 0

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"position": self.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint."""
        self.step = int(state["position"])


def digest(rank: Rank) -> str:
    """Of all weights, bit by bit."""
    sums = hashlib.sha256()
    for bucket in rank.buckets(ROLE, 1 << 20):
        for name, tensor in bucket:
            sums.update(name.encode())
            sums.update(tensor.cpu().contiguous().numpy().tobytes())
    return sums.hexdigest()[:32]


def lived(folder: Path) -> list[dict[str, Any]]:
    """What the lives of a run have said: `resumed` or `step`, each with its digest, in order."""
    path = folder / STEPS_DONE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live(folder: Path, model: Path, last: int, async_save: bool, watch: Watch) -> None:
    """Go on with the run in `folder` until step `last`, saving each step, or until it is killed."""
    rank = Rank(0, 1, "cpu", seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=30)
    objective = PolicyObjective(Algorithm())
    rank.build(ROLE, RoleSpec(model, "float32", optimizer=Optimizer(lr=1e-3), total_steps=100_000, objective=objective))
    checkpoints, data = Checkpoints(folder / CHECKPOINTS, KEEP), Position()
    recorder = Recorder(
        Writers(),
        RunConsole("saves", last, Console(quiet=True)),
        checkpoints,
        [Actor(rank)],
        data,
        "model",
        lambda: Finished({}),
        Devices(1),
        async_save,
        StopRequest(),
    )
    begun = any(checkpoints.folder.glob("step_*"))
    state = recorder.restore(checkpoints.latest() if begun else None)
    assert data.step == state.weight_version == state.step, (data, state)
    with (folder / STEPS_DONE).open("a", buffering=1) as said:
        said.write(json.dumps({"resumed": state.step, "digest": digest(rank)}) + "\n")
        sys.addaudithook(watch.look)
        for step in range(state.step + 1, last + 1):
            [shard], [columns] = shards([examples([9, 17, 30], VOCAB, step)])
            rank.update(ROLE, shard, columns)
            data.step = step
            said.write(json.dumps({"step": step, "digest": digest(rank)}) + "\n")
            watch.begin()
            recorder.save(State(step, step))
            recorder.end_of(step, {})
            if not async_save:
                watch.end()
        recorder.finish()
