"""What is said of a run that ends early, whatever ends it: how far it was, what is left of it, and how to go on."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.core.errors import DiskFullError, DriftError, GradientError, MegarlError, RewindError, UserError
from megarl.core.exit_codes import REFUSED
from megarl.core.timing import PhaseTimer
from megarl.recipe.load import Loaded, command_of
from megarl.recipe.schema import Recipe
from megarl.training.run_checkpoints import Checkpoints

SHARED_MEMORY = Path("/dev/shm")
# Beside the recipe of a run that was submitted to SLURM, the command that did it: on a login node, `train` would run there.
SUBMITTED_BY = "submitted_by.txt"
# How the system says it, SQLite of the journal, and Ray of its object store; errors of other processes arrive as texts.
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full", "Local disk is full")
# How torch's streams say that they cannot write, whatever the reason: a full disk is one where it is full.
UNWRITTEN = "iostream error"
FULL_BYTES = 2**20  # less than this is nothing


@dataclass
class Ending:
    """How one run ends early. again: the command that makes it anew, for what cannot be gone on with.

    timer: the driver's, once there is one.
    """

    loaded: Loaded[Any]
    checkpoints: Checkpoints
    again: str = ""
    timer: PhaseTimer | None = None
    _full: list[str] = field(default_factory=list)

    def look(self, error: BaseException) -> None:
        """Look at the disks while the run's processes still hold what they have written."""
        if says_full(error) or any(UNWRITTEN in str(each) for each in _chain(error)):
            self._full = full_disks([self.loaded.recipe.run.folder, Path(tempfile.gettempdir()), SHARED_MEMORY])

    def told(self, error: Exception | KeyboardInterrupt) -> Exception | KeyboardInterrupt:
        """The error that ends the run, with what is left of it. Its processes have been ended by now."""
        abandoned = self.checkpoints.abandon()
        if isinstance(error, MegarlError) and error.exit_code == REFUSED:
            return error  # there was no run
        if self._full or says_full(error):
            where = "; ".join(self._full) or "by now there is room on it again"
            # Closing files on a full disk fails once more; what failed first says more.
            first = next((each for each in _chain(error) if isinstance(each, MegarlError)), error)
            error = DiskFullError(f"A disk is full ({where}): {first}")
        lines = [self._how_far()]
        if abandoned:
            lines.append(f"The checkpoint of step {abandoned[-1]} was not whole yet and has been removed.")
        error.add_note(" ".join([*lines, self._how_on(isinstance(error, DiskFullError)), *self._replay(error)]))
        return error

    def _replay(self, error: BaseException) -> list[str]:
        """How a step that was not to be learned from is made again, alone, to be looked at."""
        step = self.timer.last[0] if self.timer is not None and self.timer.last is not None else None
        recipe = self.loaded.recipe
        if not isinstance(error, GradientError | DriftError | RewindError) or step is None or self.again:
            return []
        if not isinstance(recipe, Recipe) or not recipe.train.journal:
            return []
        command = shlex.join(
            [*_program(), "replay", str(recipe.run.folder), "--from-step", str(step), "--to-step", str(step)]
        )
        return [f"\nThe step's samples are in the journal; this learns from them again, without servers:\n  {command}"]

    def _how_far(self) -> str:
        last = self.timer.last if self.timer is not None else None
        if last is None:
            return "The run had not begun; everything of it has been ended."
        step, phase = last
        place = (
            f"in step {step} of {self.loaded.recipe.train.steps} ({phase})" if step is not None else f"in its {phase}"
        )
        return f"The run was {place}; every process of it has been ended."

    def _how_on(self, full: bool) -> str:
        first = "Make room there first: this run's older checkpoints and its hf/ are what takes most. " if full else ""
        if self.again:
            return f"{first}It can be made anew, in another folder, with:\n  {self.again}"
        whole = self.checkpoints.committed()
        if not whole:
            return (
                f"{first}No checkpoint had been committed yet, so that it can only begin anew:\n"
                f"  {go_on_command(self.loaded, '--continue')}"
            )
        return (
            f"{first}The last good checkpoint is {whole[-1].folder}, of step {whole[-1].step}. Go on from it with:\n"
            f"  {go_on_command(self.loaded, '--resume')}"
        )


@contextmanager
def ending(loaded: Loaded[Any], checkpoints: Checkpoints, again: str = "") -> Iterator[Ending]:
    """Errors that leave this context, which is to be outside of what ends the processes, say what is left of the run."""
    each = Ending(loaded, checkpoints, again)
    try:
        yield each
    except (Exception, KeyboardInterrupt) as error:
        told = each.told(error)
        if told is error:
            raise
        raise told from error


def go_on_command(loaded: Loaded[Any], option: str) -> str:
    """What the user can paste into the same folder to go on with a run; one that was submitted is submitted again."""
    submitted = loaded.path.with_name(SUBMITTED_BY)
    if option == "--resume" and submitted.is_file():
        return f"{submitted.read_text().strip()} {option}"
    command = command_of(type(loaded.recipe))
    return shlex.join([*_program(), command, str(loaded.path), *loaded.overrides, option])


def called_with(but: Collection[str]) -> str:
    """The command that this process was called with, in the folder that it is in, without these words."""
    words = [*_program(), *(word for word in sys.argv[1:] if word not in but)]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def _program() -> list[str]:
    """How this very megarl is called."""
    called = Path(sys.argv[0])
    if called.name != "megarl":
        return [sys.executable, "-m", "megarl"]
    found = shutil.which("megarl")
    return ["megarl"] if found is not None and Path(found).resolve() == called.resolve() else [str(called)]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system refuses of a run's first files is the user's to mend. Raises UserError; of a full disk what it says."""
    try:
        yield
    except OSError as error:
        if says_full(error):
            raise
        raise UserError(
            f"The run's folder {folder} cannot be written to: {error.filename or folder}: {error.strerror or error}. Mend "
            "what is there, or choose another folder by run.name=... or run.dir=..."
        ) from error


def says_full(error: BaseException) -> bool:
    """Whether an error, or what it came from, is about a full disk or a quota."""
    return any(
        (isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(words in str(each) for words in FULL)
        for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def full_disks(folders: list[Path]) -> list[str]:
    """The disks of these folders on which nothing more can be written, for people; each once."""
    mounts = {_mount(folder.absolute()) for folder in folders}
    usages = {mount: shutil.disk_usage(mount) for mount in sorted(mounts)}
    return [
        f"{mount}: {usage.free / 1e6:.1f} of {usage.total / 1e6:,.0f} MB are free"
        for mount, usage in usages.items()
        if usage.free < FULL_BYTES
    ]


def _mount(folder: Path) -> Path:
    """Where the file system of a folder, or of what there is of its path, begins."""
    return next(path for path in (folder, *folder.parents) if path.is_mount())
