"""Checkpoints of a run: committed whole or ignored; the newest committed one is what a resume starts from.

A checkpoint is a folder `step_000020` with the actor's distributed checkpoint and `state.json`. It is written under a
temporary name, synced to disk, and renamed: a folder with the final name is whole. `COMMITTED` marks that on file systems
where a rename of a folder is not atomic.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.disk import sync, sync_tree
from megarl.core.errors import UserError

MARKER = "COMMITTED"
PATTERN = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Committed:
    """One checkpoint that is whole."""

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def actor(self) -> Path:
        """The actor's distributed checkpoint."""
        return self.folder / "actor"


@dataclass(frozen=True)
class Checkpoints:
    """All checkpoints of a run, in `folder`; the newest `keep_last` are kept."""

    folder: Path
    keep_last: int

    def save(self, step: int, write_actor: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Commit one: `write_actor(folder)` writes the weights, `state` is the driver's own. Returns the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"step_{step:06d}"
        temporary = self.folder / f".tmp-{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "actor").mkdir(parents=True)
        write_actor((temporary / "actor").resolve())
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        (temporary / MARKER).touch()
        sync_tree(temporary)
        shutil.rmtree(target, ignore_errors=True)  # left by a run that was resumed from before this step
        temporary.rename(target)
        sync(self.folder)
        for old in self.committed()[: -self.keep_last]:
            shutil.rmtree(old.folder)
        return target

    def committed(self) -> list[Committed]:
        """Whole checkpoints, oldest first; what is half-written is not listed."""
        found = []
        for folder in sorted(self.folder.glob("step_*")):
            match = PATTERN.fullmatch(folder.name)
            if match and (folder / MARKER).exists():
                found.append(Committed(folder, int(match[1]), json.loads((folder / "state.json").read_text())))
        return found

    def latest(self) -> Committed:
        """The newest whole checkpoint. Raises UserError when there is none."""
        found = self.committed()
        if not found:
            raise UserError(
                f"There is nothing to resume: {self.folder} holds no committed checkpoint. Start the run without --resume, "
                "or name the run to go on with by run.name=... and run.dir=...; train.save_every decides how often one is kept."
            )
        return found[-1]
