"""Weight versions as folders of safetensors, whole or as what changed since the one before. Without torch.

    v000012/manifest.json                       written last: without it there is no version 12
    v000012/<model>/model-00001.safetensors     of a whole version plain; else of each tensor that changed its difference

The manifest has the CRC-32 of every tensor as it is in that version, so that whoever puts a version together knows whether it is
the one that was written. What is cut off, damaged or half written is a torn version, and nobody loads it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megarl.core.disk import FULL, replace_text, sync
from megarl.core.errors import DiskFullError, TornError, UserError
from megarl.core.json_file import read_object
from megarl.models.hf_header import BITS
from megarl.sync.delta import Bytes
from megarl.sync.tensor_files import Named, TensorFile, size_of

MANIFEST = "manifest.json"
MOST_READERS = 8
OTHER = "has other content than was written"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a version. dtype: as safetensors writes it. crc32: of its content in that version, eight hex digits.

    changed: whether the version's own file has something of it; in a whole version always.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32: str
    changed: bool

    @property
    def named(self) -> Named:
        """As a plain file has it."""
        return self.name, self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        """Of its content."""
        return size_of(self.named)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return max(1, BITS[self.dtype] // 8)


@dataclass(frozen=True)
class StoredFile:
    """A bucket. num_bytes: of the version's own file; 0: there is none, as nothing in it changed."""

    name: str
    num_bytes: int
    tensors: tuple[StoredTensor, ...]

    @property
    def plain(self) -> tuple[Named, ...]:
        """What the bucket's plain file has."""
        return tuple(each.named for each in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """What a version consists of. base: the version that its differences are to; None: it is whole."""

    version: int
    base: int | None
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of its own files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def whole_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)

    @cached_property
    def by_name(self) -> dict[str, StoredFile]:
        """The buckets by their names."""
        return {file.name: file for file in self.files}

    def text(self) -> str:
        """As it is written: with a checksum over all the rest."""
        content = json.dumps(asdict(self), separators=(",", ":"))
        return json.dumps({"crc32": crc32(content.encode()), "content": content})

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Manifest:
        """From JSON. Raises UserError, ValueError, KeyError or TypeError for anything else than `text` makes.

        Nothing that it says leads out of the version's folder, or from version to version without an end.
        """
        content = raw.get("content")
        if not isinstance(content, str) or crc32(content.encode()) != raw.get("crc32"):
            raise UserError("its checksum is another than that of what it says")
        found = json.loads(content)
        files = tuple(
            StoredFile(
                file["name"],
                file["num_bytes"],
                tuple(StoredTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in file["tensors"]),
            )
            for file in found["files"]
        )
        made = cls(found["version"], found["base"], files)
        if made.base is not None and not 0 <= made.base < made.version:
            raise UserError(f"its differences are to version {made.base}, which does not come before it")
        for file in files:
            if file.name in ("", "..") or Path(file.name).name != file.name:
                raise UserError(f"{file.name!r} is no name of a file in its folder")
            if strange := [tensor.dtype for tensor in file.tensors if tensor.dtype not in BITS]:
                raise UserError(f"{file.name} holds {strange[0]!r}, which is no dtype of safetensors")
        return made


@dataclass(frozen=True)
class Store:
    """A folder of versions. model: what servers are to call what they load from it, the last part of its paths."""

    folder: Path
    model: str

    def files(self, version: int) -> Path:
        """Where a version's files are."""
        return self._of(version) / self.model

    def versions(self) -> list[int]:
        """Those that have a manifest, the oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.folder.glob(f"v*/{MANIFEST}"))

    def begin(self, version: int, needed_bytes: int) -> None:
        """Make room for a version; what there was of it is gone. Raises DiskFullError."""
        self.discard(version)
        self.files(version).mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise self._full(needed_bytes)

    def commit(self, manifest: Manifest) -> None:
        """From now on the version is there."""
        with self.explained(manifest.whole_bytes):
            path = self._of(manifest.version) / MANIFEST
            sync(self.files(manifest.version))
            replace_text(path, manifest.text(), lasting=True)
            sync(path.parent)
            sync(self.folder)

    def discard(self, version: int) -> None:
        """Remove a version, whatever there is of it."""
        shutil.rmtree(self._of(version), ignore_errors=True)

    def manifest(self, version: int) -> Manifest:
        """Raises TornError."""
        path = self._of(version) / MANIFEST
        try:
            found = Manifest.parse(read_object(path, ""))
        except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TornError(f"Weight version {version} is torn, and nobody loads it: {path}: {error}") from error
        if found.version != version:
            raise TornError(f"Weight version {version} is torn, and nobody loads it: {path} is of {found.version}.")
        return found

    def chain(self, version: int, held: int | None = None) -> list[Manifest]:
        """What has to be read for a version, in this order: what follows on `held`, or a whole version and what follows on it.

        Nothing where it is held already. Raises TornError.
        """
        found: list[Manifest] = []
        while version != held:
            found.append(self.manifest(version))
            base = found[-1].base
            if base is None:
                break
            version = base
        return found[::-1]

    def open(self, manifest: Manifest, file: StoredFile) -> TensorFile:
        """A version's own file of a bucket. Raises TornError where it is not what the manifest says."""
        path = self.files(manifest.version) / file.name
        try:
            size = path.stat().st_size
            if size != file.num_bytes:
                raise self.torn(manifest, file, f"it has {size} bytes of {file.num_bytes}")
            found = TensorFile(path)
        except (OSError, UserError) as error:
            raise self.torn(manifest, file, str(error)) from error
        kept = [each for each in file.tensors if each.changed]
        names = [each.name for each in kept]
        if [name for name, _, _ in found.tensors] != names or (
            manifest.base is None and found.tensors != [each.named for each in kept]
        ):
            raise self.torn(manifest, file, "it holds other tensors than were written")
        return found

    def read(self, manifest: Manifest, file: StoredFile, found: TensorFile, tensor: StoredTensor) -> Bytes:
        """What the version's own file has of a tensor. Raises TornError where it has become shorter."""
        try:
            return found.read(tensor.name)
        except OSError as error:
            raise self.torn(manifest, file, str(error)) from error

    def torn(self, manifest: Manifest, file: StoredFile, why: str) -> TornError:
        """Of a version one of whose files is not as it was written."""
        path = self.files(manifest.version) / file.name
        return TornError(f"Weight version {manifest.version} is torn, and nobody loads it: {path}: {why}.")

    def prune(self, keep: Collection[int]) -> None:
        """Remove all other versions, and what was never committed."""
        for path in self.folder.glob("v*"):
            if int(path.name[1:]) not in keep:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def explained(self, needed_bytes: int) -> Iterator[None]:
        """A disk that turns out to be full within is a DiskFullError."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._full(needed_bytes) from error
            raise

    def _full(self, needed_bytes: int) -> DiskFullError:
        free = shutil.disk_usage(self.folder).free
        return DiskFullError(
            f"No room for a weight version in {self.folder}: it takes {needed_bytes / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} are free (or a quota allows less). Versions take up to four times the model's bytes. Make "
            "room, or set sync.folder to a folder on another disk."
        )

    def _of(self, version: int) -> Path:
        return version_folder(self.folder, version)


def version_folder(folder: Path, version: int) -> Path:
    """Where a weight version is, in a store or a mirror."""
    return folder / f"v{version:06d}"


def crc32(content: Bytes | bytes) -> str:
    """As eight hex digits."""
    return f"{zlib.crc32(content.data if isinstance(content, np.ndarray) else content):08x}"


def check(store: Store, manifest: Manifest) -> None:
    """Read all of a whole version. Raises TornError for what is not as it was written."""
    assert manifest.base is None, manifest.version

    def read(file: StoredFile) -> None:
        found = store.open(manifest, file)
        for tensor in file.tensors:
            content = store.read(manifest, file, found, tensor)
            if crc32(content) != tensor.crc32:
                raise store.torn(manifest, file, f"{tensor.name} {OTHER}")

    side_by_side(read, manifest.files)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Several at once, as reading, checksums and compression leave Python's lock alone. Raises what the first raises."""
    with ThreadPoolExecutor(min(MOST_READERS, len(os.sched_getaffinity(0)))) as pool:
        try:
            return [future.result() for future in [pool.submit(work, item) for item in items]]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
