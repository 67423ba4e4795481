"""The newest weight version on a node, whole and plain: what a store's differences are put together to. Without torch.

Every version is a folder of its own, made under another name and renamed once all of its tensors have met their checksums. What
did not change is linked to the version before, if it is still the file that met its checksums. A server that still reads an
older one keeps it as long as it has it open, for no file is written twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.core.disk import FULL
from megarl.core.errors import DeadlineError, DiskFullError, MegarlError, TornError, UserError
from megarl.core.process_state import stopped
from megarl.sync.delta import Bytes, DamagedDeltaError, decode
from megarl.sync.orphans import owner, remove_orphans
from megarl.sync.store import (
    MANIFEST,
    OTHER,
    Manifest,
    Store,
    StoredFile,
    StoredTensor,
    check,
    crc32,
    side_by_side,
    version_folder,
)
from megarl.sync.tensor_files import Mark, TensorFile, mark, write_file

SINCE = "since.json"
MARKS = "marks.json"
MET = "met.json"  # the version whose files met their checksums where they were written, and their marks
HIDDEN = "."  # before the name of what is being made
POLL_S = 0.02


@dataclass(frozen=True)
class Mirror:
    """A folder on a node's own disk. Processes of the node share it: who comes second finds what the first has made."""

    folder: Path
    store: Store

    def bring(self, version: int, end: float) -> Path:
        """Have this version here; its folder of plain safetensors. end: the latest, in monotonic time.

        Raises TornError for a version that is not as it was written, DeadlineError, DiskFullError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone(end):
            try:
                if self._has(version) and not self._is_as_made(version):
                    shutil.rmtree(self._of(version), ignore_errors=True)
                if not self._has(version):
                    self._make(version, end)
            except (MegarlError, OSError):
                if not self._has(version):  # another process has put it together, and what it was made of is gone
                    raise
            return self._files(version)

    def meet(self, version: int, end: float) -> None:
        """Read a whole version where it was written, unless another process of this node has: many servers may wait for it.

        Raises TornError for one that is not as it was written, DeadlineError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone(end):
            manifest, files, note = self.store.manifest(version), self.store.files(version), self.folder / MET
            try:
                marks = [
                    mark(path) for path in (files.parent / MANIFEST, *(files / each.name for each in manifest.files))
                ]
            except OSError:
                marks = []  # which file it is `check` says
            met = json.dumps([version, *marks])
            if not marks or not note.exists() or note.read_text() != met:
                check(self.store, manifest)
                with suppress(OSError):  # on a full disk each reads for itself
                    note.write_text(met)

    def changed(self, version: int, held: int) -> Path | None:
        """A folder with only those files of a version that have changed since `held`; None where none has."""
        since = self._since(version)
        names = [name for name, last in since.items() if last > held]
        if len(names) == len(since):
            return self._files(version)
        if not names:
            return None
        # Of each caller its own: one that is there may be in the making, and whoever loads from it would miss files.
        part = self._of(version) / f"since-{held}-{secrets.token_hex(4)}" / self.store.model
        part.mkdir(parents=True)
        for name in names:
            os.link(self._files(version) / name, part / name)
        return part

    def _make(self, version: int, end: float) -> None:
        remove_orphans(self.folder, HIDDEN)
        held = max(self._versions(), default=None)
        if held == version:
            return
        chain = self.store.chain(version, held)
        held = chain[0].base
        try:
            self._assemble(chain, held, end)
        except TornError:
            if held is None or self._has(version):
                raise
            # What is here may be what is damaged.
            shutil.rmtree(self._of(held), ignore_errors=True)
            self._assemble(self.store.chain(version), None, end)
        for older in (each for each in self._versions() if each < version):  # newer ones are others', who were faster
            shutil.rmtree(self._of(older), ignore_errors=True)

    def _assemble(self, chain: Sequence[Manifest], held: int | None, end: float) -> None:
        newest = chain[-1]
        self._check_space(newest)
        temporary = self.folder / f"{HIDDEN}{secrets.token_hex(8)}{owner()}"
        files = temporary / self.store.model
        since, marks = self._known(newest, held)
        files.mkdir(parents=True)
        try:

            def make(file: StoredFile) -> None:
                if time.monotonic() > end:
                    raise DeadlineError(f"Weight version {newest.version} was not put together in time.")
                steps = [each for each in chain if each.by_name[file.name].num_bytes]
                old = None if held is None else self._files(held) / file.name
                if not steps:
                    assert old is not None, (newest.version, file.name)
                    self._link(newest, file, old, files / file.name, marks.get(file.name))
                else:
                    since[file.name] = steps[-1].version
                    self._write(steps, newest, file, old, files / file.name)
                marks[file.name] = mark(files / file.name)

            with self._explained(newest):
                side_by_side(make, newest.files)
                (temporary / SINCE).write_text(json.dumps(since))
                (temporary / MARKS).write_text(json.dumps(marks))
            try:
                temporary.rename(self._of(newest.version))
            except OSError:
                if not self._has(newest.version):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _link(self, newest: Manifest, file: StoredFile, old: Path, target: Path, met: Mark | None) -> None:
        """Have a bucket that did not change as it is here. met: the mark of what met its checksums; another one is read."""
        with self._held(newest, old):
            os.link(old, target)
            if mark(target) != met:
                self._read_again(newest, file, target)

    def _read_again(self, manifest: Manifest, file: StoredFile, path: Path) -> None:
        """Raises TornError, and whatever reading raises, where a bucket's file here is not as it was made."""
        found = TensorFile(path)
        if found.tensors != list(file.plain):
            raise self.store.torn(manifest, file, f"{path} holds other tensors")
        for tensor in file.tensors:
            if crc32(found.read(tensor.name)) != tensor.crc32:
                raise self.store.torn(manifest, file, f"{tensor.name} {OTHER}")

    def _write(
        self, steps: Sequence[Manifest], newest: Manifest, file: StoredFile, held: Path | None, target: Path
    ) -> None:
        """A bucket's plain file, of the one here and all that changed since then."""
        opened = [(each, self.store.open(each, each.by_name[file.name])) for each in steps]
        if len(steps) == 1 and steps[0].base is None and self._linked(steps[0], file, opened[0][1], target):
            return
        old = None
        if steps[0].base is not None:
            assert held is not None, (newest.version, file.name)
            with self._held(newest, held):
                old = TensorFile(held)

        def contents() -> Iterator[Bytes]:
            for index, tensor in enumerate(file.tensors):
                content = None
                if old is not None:
                    with self._held(newest, old.path):
                        content = old.read(tensor.name)
                for manifest, found in opened:
                    own = manifest.by_name[file.name]
                    if own.tensors[index].changed:
                        content = self._step(manifest, own, found, own.tensors[index], content)
                if content is None or crc32(content) != tensor.crc32:
                    raise self.store.torn(newest, file, f"{tensor.name} {OTHER}")
                yield content

        write_file(target, file.plain, contents(), lasting=False)

    def _step(
        self, manifest: Manifest, file: StoredFile, found: TensorFile, tensor: StoredTensor, base: Bytes | None
    ) -> Bytes:
        """A tensor as it is in a version. base: as it was in the one before."""
        content = self.store.read(manifest, file, found, tensor)
        if manifest.base is None:
            return content
        try:
            assert base is not None, (manifest.version, tensor.name)
            return decode(content, base, tensor.width)
        except DamagedDeltaError as error:
            raise self.store.torn(manifest, file, f"{tensor.name}: {error}") from error

    def _linked(self, manifest: Manifest, file: StoredFile, found: TensorFile, target: Path) -> bool:
        """Have a file of a whole version without a copy, where the store is on this disk: it is read all the same."""
        try:
            os.link(found.path, target)
        except OSError:
            return False
        for tensor in file.tensors:
            if crc32(self.store.read(manifest, file, found, tensor)) != tensor.crc32:
                raise self.store.torn(manifest, file, f"{tensor.name} {OTHER}")
        return True

    def _known(self, newest: Manifest, held: int | None) -> tuple[dict[str, int], dict[str, Mark]]:
        """Of each file here when it last changed, and its mark."""
        if held is None:
            return {}, {}
        with self._held(newest, self._of(held)):
            return self._since(held), self._marks(held)

    @contextmanager
    def _held(self, newest: Manifest, path: Path) -> Iterator[None]:
        """Within, what is here is read. Where that fails it is as torn as what has other content, and is made anew."""
        try:
            yield
        except (OSError, UserError, ValueError, KeyError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            raise TornError(f"Weight version {newest.version} cannot be made of {path}: {error}.") from error

    @contextmanager
    def _alone(self, end: float) -> Iterator[None]:
        """No second process of the node does the same work meanwhile.

        Only that: where the first stands still, or the disk has no locks, both do it, and whoever ends first has done it.
        """
        with (self.folder / "lock").open("a+") as lock:
            while not _locked(lock.fileno()):
                lock.seek(0)
                host, _, pid = lock.read().partition(" ")
                if host == socket.gethostname() and pid.isdigit() and stopped(int(pid)) is not None:
                    break
                if time.monotonic() > end:
                    raise DeadlineError(f"Another process was busy for too long in {self.folder}: {host} {pid}.")
                time.sleep(POLL_S)
            else:
                lock.truncate(0)
                lock.write(f"{socket.gethostname()} {os.getpid()}")
                lock.flush()
            yield

    def _check_space(self, manifest: Manifest) -> None:
        if shutil.disk_usage(self.folder).free < manifest.whole_bytes:
            raise self._full(manifest)

    @contextmanager
    def _explained(self, manifest: Manifest) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._full(manifest) from error
            raise MegarlError(f"Weight version {manifest.version} could not be put together: {error}") from error

    def _full(self, manifest: Manifest) -> DiskFullError:
        return DiskFullError(
            f"No room for weight version {manifest.version} in {self.folder} on {socket.gethostname()}: it takes "
            f"{manifest.whole_bytes / 2**20:,.0f} MiB beside the one before, and "
            f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} are free. Make room, or have TMPDIR name a larger disk."
        )

    def _versions(self) -> list[int]:
        return [int(path.name[1:]) for path in self.folder.glob("v*")]

    def _has(self, version: int) -> bool:
        return self._of(version).exists()

    def _is_as_made(self, version: int) -> bool:
        """Whether a version's files here meet their checksums: those that nobody has touched since they did are not read."""
        try:
            marks, files = self._marks(version), self._files(version)
            self._since(version)
            touched = [name for name, met in marks.items() if mark(files / name) != met]
            if touched:
                manifest = self.store.manifest(version)
                side_by_side(lambda name: self._read_again(manifest, manifest.by_name[name], files / name), touched)
        except (OSError, UserError, TornError, ValueError, KeyError):
            return False
        return True

    def _since(self, version: int) -> dict[str, int]:
        """File -> the version in which it last changed."""
        found: dict[str, int] = json.loads((self._of(version) / SINCE).read_text())
        return found

    def _marks(self, version: int) -> dict[str, Mark]:
        """File -> what it looked like when it had met its checksums."""
        found: dict[str, Mark] = json.loads((self._of(version) / MARKS).read_text())
        return found

    def _files(self, version: int) -> Path:
        return self._of(version) / self.store.model

    def _of(self, version: int) -> Path:
        return version_folder(self.folder, version)


def _locked(handle: int) -> bool:
    """Whether the lock is ours now; also where there are none on this disk."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
