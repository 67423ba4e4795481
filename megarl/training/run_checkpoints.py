"""Checkpoints of a run: committed whole or ignored; the newest whole one is what a resume starts from.

A checkpoint is a folder `step_000020` with a distributed checkpoint of each role and `state.json`. It is written under a
temporary name, synced to disk, and renamed: a folder with the final name is whole. `COMMITTED` marks that on file systems
where a rename of a folder is not atomic, and holds the checksums of all that the roles' own manifests do not speak for:
bytes that were lost or changed later are found before a run goes on from them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.core.checksums import FileSum, file_damage, sum_files
from megarl.core.disk import sync, sync_tree
from megarl.core.errors import MegarlError, UserError, naming
from megarl.core.json_file import read_object
from megarl.core.log import get_logger
from megarl.training.manifest import MANIFEST, checkpoint_damage, read_manifest

MARKER, STATE = "COMMITTED", "state.json"
DAMAGED = "The checkpoint is damaged."
WRITTEN, REMOVED = ".tmp-", ".old-"  # before the names of folders that are no checkpoints yet, or any more
PATTERN = re.compile(r"step_(\d+)")

log = get_logger(__name__)


@dataclass(frozen=True)
class Committed:
    """One checkpoint that was committed."""

    folder: Path
    step: int
    state: dict[str, Any]

    def role(self, name: str) -> Path:
        """A role's distributed checkpoint. Raises UserError where the step was saved without that role."""
        folder = self.folder / name
        if not folder.is_dir():
            raise UserError(
                f"{self.folder} was saved without a {name}, which this recipe has. Resume with the recipe that the run "
                "was started with, or start a new run."
            )
        return folder.resolve()


@dataclass(frozen=True)
class Checkpoints:
    """All checkpoints of a run, in `folder`.

    The newest `keep_last` are kept, and of the older ones those whose step is a multiple of `keep_every`, and those of the steps
    that `best` chooses among all that there are.
    """

    folder: Path
    keep_last: int
    keep_every: int | None = None
    best: Callable[[Sequence[int]], Collection[int]] = lambda steps: ()

    def begin(self, step: int, roles: Iterable[str]) -> dict[str, Path]:
        """An empty folder for each role's files, under a name that no resume looks at; `commit` makes a checkpoint of it.

        Raises MegarlError where it cannot be made.
        """
        temporary = self._temporary(step)
        _erase(temporary)
        folders = {role: (temporary / role).resolve() for role in roles}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in folders.values():
                folder.mkdir(parents=True)
        except OSError as error:
            raise MegarlError(f"The checkpoint of step {step} cannot be written into {self.folder}: {error}") from error
        return folders

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Make what was written since `begin` the newest checkpoint; forget those that are not kept. Returns the folder.

        Raises MegarlError where the system refuses it.
        """
        try:
            return self._commit(step, state)
        except OSError as error:
            raise MegarlError(f"The checkpoint of step {step} cannot be committed in {self.folder}: {error}") from error

    def _commit(self, step: int, state: dict[str, Any]) -> Path:
        temporary, target = self._temporary(step), self._final(step)
        (temporary / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        sums = {name: asdict(each) for name, each in sum_files(temporary, _to_sum(temporary)).items()}
        (temporary / MARKER).write_text(json.dumps({"files": sums}, indent=1))
        sync_tree(temporary)
        self._remove(target)  # left by a run that was resumed from before this step
        temporary.rename(target)
        sync(self.folder)
        for later, folder in self._folders():
            if later > step:  # damaged, and passed over: it would count as one of the newest
                self._remove(folder)
        newest = self.committed()[-self.keep_last :]
        oldest = newest[0].step if len(newest) == self.keep_last else 0
        best = self.best([each.step for each in self.committed()])
        for old, folder in self._folders():  # damaged ones as well: they would stay for good
            if old < oldest and (self.keep_every is None or old % self.keep_every) and old not in best:
                self._remove(folder)
        self.sweep()
        return target

    def sweep(self) -> None:
        """Remove what was left by whoever was killed while it wrote or removed; where nobody else saves now."""
        for left in [*self.folder.glob(f"{WRITTEN}step_*"), *self.folder.glob(f"{REMOVED}step_*")]:
            _erase(left)

    def _remove(self, folder: Path) -> None:
        """At once, as others see it: what is half removed has no name of a checkpoint."""
        if folder.exists() or folder.is_symlink():  # of a link that leads nowhere the first is false
            gone = folder.with_name(f"{REMOVED}{folder.name}")
            _erase(gone)
            folder.rename(gone)
            _erase(gone)  # else by the next commit

    def committed(self) -> list[Committed]:
        """Checkpoints that were committed and can be told so, oldest first; what is half-written is not listed.

        Only names, sizes and the driver's state are looked at: `latest` reads everything.
        """
        return [
            Committed(folder, step, read_object(folder / STATE, DAMAGED))
            for step, folder in self._folders()
            if not step_damage(folder, read=False)
        ]

    def latest(self) -> Committed:
        """The newest whole checkpoint, all of its files read; damaged ones are passed over with a warning each.

        Raises UserError, about a run that is to go on, when there is none.
        """
        whole, found = self.newest_whole()
        if whole is not None:
            return whole
        anew = "Give --continue"
        if any(self.folder.glob("step_*")):
            anew = f"Remove {self.folder}, and give --continue"
        raise UserError(
            f"There is nothing to resume: {self.folder} holds no committed checkpoint.{found} "
            f"{anew} in the place of --resume, which also goes on where no checkpoint was committed, or name the run to go on "
            "with by run.name=... and run.dir=...; train.save_every decides how often one is kept."
        )

    def newest_whole(self) -> tuple[Committed | None, str]:
        """As `latest`, or None; and, as a sentence with a blank before it, what is wrong with those that were passed over."""
        damaged = []
        for step, folder in reversed(self._folders()):
            if problems := step_damage(folder, read=True):
                if not folder.exists():  # its run goes on, and has a newer one
                    return self.newest_whole()
                damaged.append(f"{folder.name}: {'; '.join(problems)}")
                log.warning("The checkpoint %s is damaged and is passed over: %s", folder, "; ".join(problems))
            else:
                return Committed(folder, step, read_object(folder / STATE, DAMAGED)), ""
        return None, f" Damaged: {'. '.join(damaged)}." if damaged else ""

    def abandon(self) -> list[int]:
        """Remove what was begun and not committed, once nobody writes it any more; its steps."""
        found = [(PATTERN.fullmatch(each.name, len(WRITTEN)), each) for each in self.folder.glob(f"{WRITTEN}step_*")]
        begun = sorted((int(match[1]), folder) for match, folder in found if match)
        for _, folder in begun:
            _erase(folder)
        return [step for step, _ in begun]

    def naming(self, step: int) -> AbstractContextManager[None]:
        """Errors within speak of the checkpoint by its final name."""
        return naming({self._temporary(step).resolve(): self._final(step)})

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{WRITTEN}step_{step:06d}"

    def _final(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _folders(self) -> list[tuple[int, Path]]:
        """Step and folder of each checkpoint under its final name and with its marker, oldest first."""
        found = [(PATTERN.fullmatch(folder.name), folder) for folder in self.folder.glob("step_*")]
        return sorted((int(match[1]), folder) for match, folder in found if match and (folder / MARKER).exists())


def _erase(path: Path) -> None:
    """As far as that can be done. Of a link the link alone: what is behind it may be another run's, or a copy to keep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def step_damage(folder: Path, *, read: bool) -> list[str]:
    """What is wrong with the folder of a step, for people; empty where nothing is. read: also compare the content."""
    try:
        raw = read_object(folder / MARKER, DAMAGED)
        sums = {name: FileSum.parse(entry) for name, entry in raw["files"].items()}
    except (ValueError, KeyError, AttributeError):  # a UserError is a ValueError
        return [f"{MARKER} is missing or broken"]
    if STATE not in sums:
        return [f"{MARKER} does not speak of {STATE}"]
    if problems := file_damage(folder, sums, read=read):
        return problems
    try:
        step = read_object(folder / STATE, DAMAGED).get("step")
    except UserError:
        return [f"{STATE} is missing or broken"]
    if (match := PATTERN.fullmatch(folder.name)) and int(match[1]) != step:
        return [f"it is of step {step}, as its {STATE} says: the folder needs that step's name"]
    roles = [name.removesuffix(f"/{MANIFEST}") for name in sums if name.endswith(f"/{MANIFEST}")]
    return [f"{role}: {problem}" for role in roles for problem in checkpoint_damage(folder / role, read=read)]


def _to_sum(folder: Path) -> list[str]:
    """Files of a step's folder that no role's manifest speaks for."""
    roles = [manifest.parent for manifest in folder.glob(f"*/{MANIFEST}")]
    known = {f"{role.name}/{name}" for role in roles for name in read_manifest(role).files}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name not in known]
