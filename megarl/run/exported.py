"""Of which step a run's HF folder is: a run that was lengthened, and died before its end, has one of an earlier."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from megarl.core.disk import replace_text
from megarl.core.json_file import read_object

EXPORT = "hf"
NOTE = "exported.json"


def note_export(folder: Path, step: int) -> None:
    """Write down that the HF folder in this run's folder is of this step."""
    replace_text(folder / NOTE, json.dumps({"step": step}))


def check_note(folder: Path) -> None:
    """Whether `note_export` will be able to, in the end. Raises OSError."""
    if (folder / NOTE).is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / NOTE))


def note_older_export(folder: Path, step: int) -> None:
    """The same, where there is an HF folder and nothing says of which step it is: as runs of earlier versions have left it."""
    if (folder / EXPORT / "config.json").exists() and not (folder / NOTE).exists():
        note_export(folder, step)


def exported_step(folder: Path, newest: int) -> int | None:
    """The step of the HF folder in this run's folder; None where there is none. newest: of its checkpoints. Raises UserError."""
    if not (folder / EXPORT / "config.json").exists():
        return None
    if not (folder / NOTE).exists():
        return newest
    step = read_object(folder / NOTE, f"Remove it, and {folder / EXPORT}: `--resume` writes both.").get("step")
    return step if isinstance(step, int) else -1  # of none, so that the folder is written anew
