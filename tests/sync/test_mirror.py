"""What a node has put together before: looked at again before anything is made of it, and left by processes that were killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.core.errors import TornError
from megarl.sync import mirror as module
from megarl.sync.disk import DiskSender
from megarl.sync.mirror import MARKS, SINCE, Mirror
from megarl.sync.orphans import owner
from megarl.sync.store import Manifest, Store, check
from megarl.sync.tensor_files import TensorFile
from tests.sync.test_store import NAMES, first_model, flip, moved, read, same, soon, write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "versions", "tiny")


@pytest.fixture
def sender(store: Store) -> Iterator[DiskSender]:
    made = DiskSender(rank=0, store=store, whole_bytes=2**16)
    yield made
    made.close()


@pytest.fixture
def mirror(store: Store, tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "node", store)


def apart(path: Path) -> Path:
    """A file of the node's alone, as it is where the store is on another disk."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit": lambda path: flip(path, -1),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "header": lambda path: os.truncate(path, 20),
    "shape": lambda path: path.write_bytes(path.read_bytes().replace(b"[50, 8]", b"[8, 50]")),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("changed", [{"model.bias"}, set(NAMES)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_was_damaged_on_the_node_is_never_passed_on(
    store: Store, sender: DiskSender, mirror: Mirror, changed: set[str], damage: str
) -> None:
    """Whether something changed in it since or not."""
    model = first_model()
    write(sender, model, 1)
    path = apart(min(mirror.bring(1, soon()).iterdir()))
    DAMAGES[damage](path)
    model = moved(model, changed, 2)
    write(sender, model, 2)
    assert same(read(mirror.bring(2, soon())), model)


@pytest.mark.parametrize("damage", DAMAGES)
def test_who_comes_late_is_not_told_of_what_was_damaged_meanwhile(
    store: Store, sender: DiskSender, mirror: Mirror, damage: str
) -> None:
    model = first_model()
    write(sender, model, 1)
    DAMAGES[damage](apart(min(mirror.bring(1, soon()).iterdir())))
    late = Mirror(mirror.folder, store)
    assert same(read(late.bring(1, soon())), model)


def test_who_comes_late_takes_what_is_whole_as_it_is(store: Store, sender: DiskSender, mirror: Mirror) -> None:
    """Also a file with another time: other servers may be loading the version."""
    write(sender, first_model(), 1)
    path = apart(min(mirror.bring(1, soon()).iterdir()))
    inode = path.stat().st_ino
    assert same(read(mirror.bring(1, soon())), first_model()) and path.stat().st_ino == inode


@pytest.mark.parametrize("name", [SINCE, MARKS])
@pytest.mark.parametrize("content", ["", "[", None])
def test_what_is_said_of_the_files_here_may_be_damaged_too(
    store: Store, sender: DiskSender, mirror: Mirror, name: str, content: str | None
) -> None:
    model = first_model()
    write(sender, model, 1)
    path = mirror.bring(1, soon()).parent / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    late = Mirror(mirror.folder, store)
    assert late.bring(1, soon()) == late.changed(1, 0)
    path.write_text(content or "")
    model = moved(model, {"model.bias"}, 2)
    write(sender, model, 2)
    assert same(read(mirror.bring(2, soon())), model)


def test_a_file_that_met_its_checksums_is_not_read_again_by_anybody(
    store: Store, sender: DiskSender, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that is another since, here that of a copy, and then once."""
    model = first_model()
    write(sender, model, 1)
    apart(min(mirror.bring(1, soon()).iterdir()))
    opened: list[Path] = []

    class Seen(TensorFile):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(module, "TensorFile", Seen)
    for version, count in ((2, 1), (3, 1), (4, 1)):
        write(sender, model, version)
        assert same(read(Mirror(mirror.folder, store).bring(version, soon())), model) and len(opened) == count


def test_a_version_that_is_loaded_where_it_was_written_is_read_by_one_process_of_a_node(
    store: Store, sender: DiskSender, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is another since, of the same number or not."""
    checked: list[int] = []

    def checking(store: Store, manifest: Manifest) -> None:
        checked.append(manifest.version)
        check(store, manifest)

    monkeypatch.setattr(module, "check", checking)
    for version in (1, 1, 2):
        write(sender, first_model(), version)
        sender.close()  # the next is whole
        for _ in range(3):
            Mirror(mirror.folder, store).meet(version, soon())
    assert checked == [1, 1, 2]
    flip(min(store.files(2).iterdir()), -1)
    for _ in range(2):
        with pytest.raises(TornError, match="has other content"):
            mirror.meet(2, soon())
    min(store.files(2).iterdir()).unlink()
    with pytest.raises(TornError, match="No such file"):
        mirror.meet(2, soon())


def test_who_ends_late_leaves_what_is_newer(store: Store, sender: DiskSender, mirror: Mirror) -> None:
    """A process that was stopped in the middle goes on when others have gone on: servers may be reading the newer version."""
    model = first_model()
    write(sender, model, 1)
    write(sender, moved(model, set(NAMES), 2), 2)
    newer = mirror.bring(2, soon())
    assert same(read(mirror.bring(1, soon())), model)
    assert same(read(newer), moved(model, set(NAMES), 2))
    write(sender, model, 3)
    assert same(read(mirror.bring(3, soon())), model)
    assert sorted(path.name for path in mirror.folder.glob("v*")) == ["v000003"]


DIES = """
import os, signal, sys, time
from pathlib import Path
from megarl.sync import mirror
from megarl.sync.store import Store
def dies(work, items):
    for item in items:
        work(item)
    os.kill(os.getpid(), signal.SIGKILL)
mirror.side_by_side = dies
mirror.Mirror(Path(sys.argv[1]), Store(Path(sys.argv[2]), "tiny")).bring(1, time.monotonic() + 10)
"""


def test_what_a_killed_process_was_making_goes_with_the_next_version(
    store: Store, sender: DiskSender, mirror: Mirror
) -> None:
    """That of others, who work where there are no locks or on another host, stays."""
    write(sender, first_model(), 1)
    died = subprocess.Popen([sys.executable, "-c", DIES, str(mirror.folder), str(store.folder)])
    assert died.wait() == -signal.SIGKILL
    [left] = [path for path in mirror.folder.iterdir() if path.name != "lock"]
    assert any(left.rglob("*.safetensors"))
    others = {f".0{owner()}", left.name.replace(socket.gethostname(), "elsewhere")}
    for name in others:
        (mirror.folder / name).mkdir()
    mirror.bring(1, soon())
    assert {path.name for path in mirror.folder.iterdir()} == {"lock", "v000001", *others}
