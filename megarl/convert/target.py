"""Where a conversion writes: under a temporary name, whole and on the disk before it gets its own. Without torch."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.core.disk import FULL, sync, sync_tree
from megarl.core.errors import UserError
from megarl.training.manifest import MANIFEST

SPARE_BYTES = 16 * 2**20  # for configs, tokenizers and headers
CONTENT, PREVIOUS = "content", "previous"
WEIGHTS = ("*.safetensors", "*.bin")
# Folders in which published models have their weights in other forms.
FORMS = ("original", "onnx", "openvino", "metal", "consolidated")


@dataclass(frozen=True)
class Target:
    """A folder in the making. `content` is to be filled, and `commit` called."""

    path: Path
    temporary: Path

    @property
    def content(self) -> Path:
        """Does not exist yet."""
        return self.temporary / CONTENT

    def commit(self) -> None:
        """Wait until everything is on the disk, then give it its name; what was there before goes. Raises UserError."""
        with explained(self.path):
            sync_tree(self.content)
            if self.path.exists():
                self.path.rename(self.temporary / PREVIOUS)
            self.content.rename(self.path)
            sync(self.path.parent)


def followed(path: Path) -> Path:
    """Where a target will lie: behind links, which stay. Raises UserError where they lead in a circle."""
    try:
        return path.resolve()
    except RuntimeError as error:
        raise UserError(f"{path} is a link that leads in a circle. Name another folder.") from error


def apart(target: Path, *sources: Path) -> None:
    """Raise UserError where a target, as `followed` gives it, is one of the folders that are read, or holds it or its files."""
    for each in (source.resolve() for source in sources):
        if each == target or target in each.parents:
            raise UserError(f"{target} {'is' if each == target else 'holds'} the source, {each}. Name another folder.")
        linked = (path for path in sorted(each.rglob("*")) if path.is_symlink() and target in path.resolve().parents)
        if (link := next(linked, None)) is not None:
            raise UserError(f"{target} holds what {link} leads to, a part of the source. Name another folder.")


def check_target(path: Path, needed_bytes: int, *, force: bool) -> None:
    """Raise UserError, before anything is done, where a target exists, or has no room or no folder to lie in."""
    if path.exists() and not force:
        raise UserError(
            f"{path} exists already. Name another folder, or say --force to replace it when all is written."
        )
    if path.exists() and (not path.is_dir() or not _is_replaceable(path)):
        raise UserError(f"{path} is not a model's folder, so --force does not replace it. Name another folder.")
    if path.exists() and (other := _other_model(path)) is not None:
        raise UserError(
            f"{path} holds another model, {other}, so --force does not replace it. Move that one, or name another folder."
        )
    if path.exists() and not _may_write(path):
        raise UserError(f"{path} cannot be written to, so --force does not replace it. Name another folder.")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not _may_write(existing):
        raise UserError(f"{path} cannot be made: {existing} cannot be written to. Name another folder.")
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + SPARE_BYTES:
        raise UserError(
            f"No room for {path}: it needs {(needed_bytes + SPARE_BYTES) / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free. "
            "Free some space or name a folder on another disk; nothing was written."
        )


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _is_replaceable(folder: Path) -> bool:
    """An empty folder, or one with a model in it: many programs call their settings config.json."""
    has_weights = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
    is_model = (folder / MANIFEST).exists() or ((folder / "config.json").exists() and has_weights)
    return is_model or not any(folder.iterdir())


def _other_model(folder: Path) -> Path | None:
    """A model further down in the folder of one, which would go with it."""
    below = (path for pattern in (MANIFEST, *WEIGHTS) for path in folder.rglob(pattern) if path.parent != folder)
    found = (path.parent for path in below if path.name == MANIFEST or not _is_form(path.parent, folder))
    return next(found, None)


def _is_form(below: Path, folder: Path) -> bool:
    """Whether weights there are the folder's own model once more, as published ones have it."""
    return below.parent == folder and below.name in FORMS and not (below / "config.json").exists()


@contextmanager
def explained(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """What the system refuses within, as a UserError. path: the target. num_bytes: that it needs, where that is known."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            free = shutil.disk_usage(path.parent).free
            needs = f"it needs {num_bytes / 1e9:.3f} GB, and " if num_bytes else ""
            raise UserError(
                f"No room for {path}: {needs}{free / 1e9:.3f} GB are free (or a quota allows less). Free some space or name "
                "a folder on another disk; nothing was left behind."
            ) from error
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(
            f"{path} was not written: {where}{error.strerror or error}. Mend what is there, or name another folder."
        ) from error


@contextmanager
def open_target(path: Path) -> Iterator[Target]:
    """A target to fill and commit; whatever was not committed is removed in the end.

    What a conversion that was killed left behind is removed by the next one to the same place; raises UserError where
    that one is still at work, and for what the system refuses.
    """
    path = path.absolute()
    temporary = path.with_name(f".tmp-{path.name}")
    with ExitStack() as stack:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_taken(temporary, path))
            _put_back(path, temporary)
            for left in temporary.iterdir():
                _remove(left)
        try:
            yield Target(path, temporary)
        except BaseException as error:
            try:
                _end(path, temporary)
            except UserError as more:
                error.add_note(str(more))
            raise
        _end(path, temporary)


def _put_back(path: Path, temporary: Path) -> None:
    """The old one, where a conversion ended between taking it away and naming the new one."""
    if (temporary / PREVIOUS).exists() and not path.exists():
        (temporary / PREVIOUS).rename(path)


def _end(path: Path, temporary: Path) -> None:
    with explained(path):
        _put_back(path, temporary)
    _remove(temporary)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UserError(
            f"{folder}, where a conversion keeps what is not whole yet and what it replaces, cannot be removed: "
            f"{error.strerror or error}. Remove it."
        ) from error


@contextmanager
def _taken(folder: Path, target: Path) -> Iterator[None]:
    """Within the block the folder is there, and no other conversion has it. Raises UserError where one has."""
    is_ours = False
    while not is_ours:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"Another conversion is writing to {target}. Wait for it, or name another folder."
                ) from error
            # One that has just ended may have removed what was opened here.
            is_ours = folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle))
            if is_ours:
                yield
        finally:
            os.close(handle)
