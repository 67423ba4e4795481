"""A store of versions and what nodes make of it: cut off, damaged, killed in the middle, on full disks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.errors import DeadlineError, DiskFullError, TornError, UserError
from megarl.sync import disk
from megarl.sync.disk import DiskSender
from megarl.sync.mirror import Mirror
from megarl.sync.store import MANIFEST, Manifest, Store, check
from tests.sync.given import Given
from tests.sync.written import names

Model = dict[str, Tensor]
NAMES = ("model.embed.weight", "model.norm.weight", "model.bias", "model.head.weight")


def first_model(dtype: torch.dtype = torch.bfloat16) -> Model:
    generator = torch.Generator().manual_seed(1)
    shapes = ((50, 8), (8,), (), (0, 3))
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in zip(NAMES, shapes, strict=True)}
    return {**made, "model.router": torch.randn(4, 8, generator=generator)}


def moved(model: Model, names: set[str], seed: int) -> Model:
    """The same tensors, those with these names changed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + torch.randn(tensor.shape, generator=generator) * 0.01).to(tensor.dtype)
        if name in names
        else tensor
        for name, tensor in model.items()
    }


def write(sender: DiskSender, model: Model, version: int) -> int:
    """In two buckets."""
    items = list(model.items())
    report = sender.write(Given([items[:2], items[2:]]), names(2), version)
    assert report is not None and report.ok == () and report.failed == {}
    return report.num_bytes


def read(folder: Path) -> Model:
    found: Model = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(one: Model, other: Model) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def soon() -> float:
    return time.monotonic() + 60


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


def test_a_whole_version_is_plain_safetensors_under_the_models_name(store: Store, sender: DiskSender) -> None:
    model = first_model()
    write(sender, model, 7)
    assert store.versions() == [7] and store.files(7).name == "tiny"
    assert same(read(store.files(7)), model)
    check(store, store.manifest(7))


@settings(max_examples=30, deadline=None)
@given(
    changes=st.lists(st.sets(st.sampled_from([*NAMES, "model.router"])), min_size=1, max_size=6),
    seen=st.sets(st.integers(0, 6)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_chain_of_versions_is_put_together_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, changes: list[set[str]], seen: set[int], dtype: torch.dtype
) -> None:
    """One node sees some of the versions, another joins at the end; both have what was written."""
    folder = tmp_path_factory.mktemp("chain")
    store = Store(folder / "versions", "tiny")
    sender = DiskSender(rank=0, store=store, whole_bytes=0)
    early, late, model = Mirror(folder / "early", store), Mirror(folder / "late", store), first_model(dtype)
    for version, changed in enumerate([set(), *changes]):
        model = moved(model, changed, version)
        write(sender, model, version)
        if version in seen:
            assert same(read(early.bring(version, soon())), model)
    for mirror in (early, late):
        assert same(read(mirror.bring(version, soon())), model)
        assert [path.name for path in mirror.folder.glob("v*")] == [f"v{version:06d}"]
    sender.close()
    shutil.rmtree(folder)


def test_only_what_changed_is_written_and_loaded(store: Store, sender: DiskSender, mirror: Mirror) -> None:
    model = first_model()
    whole = write(sender, model, 1)
    held = mirror.bring(1, soon())
    assert mirror.changed(1, 0) == held
    model = moved(model, {"model.norm.weight"}, 2)
    assert write(sender, model, 2) < whole / 3
    manifest = store.manifest(2)
    changed = [tensor.name for file in manifest.files for tensor in file.tensors if tensor.changed]
    assert manifest.base == 1 and changed == ["model.norm.weight"]
    first, second = manifest.files
    assert first.num_bytes and not second.num_bytes and not (store.files(2) / second.name).exists()
    files = mirror.bring(2, soon())
    # A file without changes is the very same one.
    assert (files / second.name).stat().st_nlink == 2 or (store.files(1) / second.name).samefile(files / second.name)
    part = mirror.changed(2, 1)
    assert part is not None and part.name == "tiny" and [path.name for path in part.iterdir()] == [first.name]
    assert mirror.changed(2, 0) == files and mirror.changed(2, 2) is None
    assert write(sender, model, 3) == 0
    assert same(read(mirror.bring(3, soon())), model) and mirror.changed(3, 2) is None
    assert [path.name for path in (mirror.changed(3, 1) or mirror.folder).iterdir()] == [first.name]


def test_versions_are_whole_again_before_differences_are_too_many_or_too_large(
    store: Store, sender: DiskSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOST_DELTAS", 2)
    model = first_model()
    for version in range(1, 8):
        write(sender, model, version)
    assert store.versions() == [7] and store.manifest(7).base is None  # 1, 4 and 7 are whole; what was before is gone
    random = torch.Generator().manual_seed(3)
    monkeypatch.setattr(disk, "MOST_DELTAS", 100)
    for version in (8, 9, 10):  # nothing is left of the old weights: two differences are more than the weights
        write(sender, {n: torch.randn(t.shape, generator=random).to(t.dtype) for n, t in model.items()}, version)
    assert store.versions() == [10] and store.manifest(10).base is None


def test_a_store_is_never_larger_than_its_message_says(
    store: Store, sender: DiskSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the old weights each time: differences save little, and two are there with two whole versions."""
    random, peaks, commit = torch.Generator().manual_seed(3), [0], Store.commit

    def committed(store: Store, manifest: Manifest) -> None:
        peaks.append(sum(path.stat().st_size for path in store.folder.rglob("*.safetensors")))
        commit(store, manifest)

    monkeypatch.setattr(Store, "commit", committed)
    for version in range(1, 8):
        write(sender, {"a": torch.randn(20_000, generator=random), "b": torch.randn(9, generator=random)}, version)
    times = max(peaks) / store.manifest(7).whole_bytes
    assert 3.5 < times < 4
    with pytest.raises(DiskFullError, match="up to four times the model's bytes"):
        store.begin(8, 2**60)


def test_a_version_that_is_written_again_is_whole(store: Store, sender: DiskSender, mirror: Mirror) -> None:
    model = first_model()
    write(sender, model, 1)
    model = moved(model, set(NAMES), 2)
    write(sender, model, 2)
    assert store.manifest(2).base == 1
    write(sender, model, 2)
    assert store.manifest(2).base is None and same(read(mirror.bring(2, soon())), model)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, 100), lambda path: shutil.rmtree(path.parent)]
)
def test_a_rank_whose_files_are_gone_writes_a_whole_version(
    store: Store, mirror: Mirror, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cleans temporary folders finds files that did not change for days."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender, model = DiskSender(rank=0, store=store, whole_bytes=0), first_model()
    write(sender, model, 1)
    write(sender, model, 2)
    [path] = tmp_path.glob("sent-*/model-00001.safetensors")
    damage(path)
    model = moved(model, set(NAMES), 3)
    write(sender, model, 3)
    assert store.versions() == [3] and store.manifest(3).base is None
    assert same(read(mirror.bring(3, soon())), model)
    sender.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def two_versions(store: Store, sender: DiskSender) -> Model:
    """Version 1 is whole, 2 is a difference."""
    model = first_model()
    write(sender, model, 1)
    model = moved(model, set(NAMES) | {"model.router"}, 2)
    write(sender, model, 2)
    return model


@pytest.mark.parametrize("version", [1, 2])
def test_a_flipped_bit_anywhere_is_found(store: Store, sender: DiskSender, tmp_path: Path, version: int) -> None:
    """In any byte of any file of a version, its manifest too: it is not loaded, or is what was written all the same."""
    model = two_versions(store, sender)
    sender.close()
    paths = [path for path in (store.folder / f"v{version:06d}").rglob("*") if path.is_file()]
    assert len(paths) == 3
    refused = 0
    for path in paths:
        for at in range(0, path.stat().st_size, 7):
            flip(path, at)
            mirror = Mirror(tmp_path / f"{path.name}-{at}", store)
            try:
                assert same(read(mirror.bring(2, soon())), model)  # blanks of a header, say
            except TornError as error:
                refused += 1
                assert "torn" in str(error) and str(store.folder) in str(error)
                assert not list(mirror.folder.glob("v*"))
            flip(path, at)
    assert refused > 100


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_cut_off_or_gone_is_torn_and_named(
    store: Store, sender: DiskSender, mirror: Mirror, version: int
) -> None:
    model = two_versions(store, sender)
    sender.close()
    for path in [path for path in (store.folder / f"v{version:06d}").rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for damaged in (content[:-1], content[: len(content) // 2], b"", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(TornError, match=f"Weight version {version} is torn, and nobody loads it.*{path.name}"):
                mirror.bring(2, soon())
            path.unlink(missing_ok=True)
            path.write_bytes(content)
    assert same(read(mirror.bring(2, soon())), model)


def test_a_manifest_of_another_version_is_refused(store: Store, sender: DiskSender) -> None:
    two_versions(store, sender)
    (store.folder / "v000002" / MANIFEST).write_bytes((store.folder / "v000001" / MANIFEST).read_bytes())
    with pytest.raises(TornError, match="is of 1"):
        store.manifest(2)
    with pytest.raises(UserError):
        Manifest.parse({"crc32": "00000000", "content": 3})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"base": 2}, "to version 2, which does not come before it"),
        ({"base": 3}, "to version 3, which does not come before it"),
        ({"name": "../../other/model.safetensors"}, "is no name of a file in its folder"),
        ({"name": "/tmp/model.safetensors"}, "is no name of a file in its folder"),
        ({"name": ".."}, "is no name of a file in its folder"),
        ({"name": ""}, "is no name of a file in its folder"),
        ({"dtype": "F12"}, "'F12', which is no dtype"),
    ],
)
def test_a_manifest_leads_nowhere_else(store: Store, sender: DiskSender, changed: dict[str, Any], reason: str) -> None:
    """Somebody else may write into a folder that nodes share. Its checksum is right."""
    write(sender, first_model(), 1)
    write(sender, moved(first_model(), {NAMES[0]}, 1), 2)
    manifest = store.manifest(2)
    file = manifest.files[0]
    tensors = (replace(file.tensors[0], dtype=changed.get("dtype", file.tensors[0].dtype)), *file.tensors[1:])
    file = replace(file, name=changed.get("name", file.name), tensors=tensors)
    other = replace(manifest, base=changed.get("base", manifest.base), files=(file, *manifest.files[1:]))
    (store.files(2).parent / MANIFEST).write_text(other.text())
    with pytest.raises(TornError, match=reason):
        store.chain(2)


def test_what_is_damaged_on_the_node_is_read_anew_from_the_store(
    store: Store, sender: DiskSender, mirror: Mirror
) -> None:
    model = first_model()
    write(sender, model, 1)
    [path, _] = sorted(mirror.bring(1, soon()).iterdir())
    content = path.read_bytes()
    path.unlink()  # its own from now on, not the store's
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    model = moved(model, set(NAMES), 2)
    write(sender, model, 2)
    assert same(read(mirror.bring(2, soon())), model)


WRITER = """
import signal, sys, time
from pathlib import Path
import torch
from megarl.sync.disk import DiskSender
from megarl.sync.store import Store
from tests.sync.given import Given
store = Store(Path(sys.argv[1]), "tiny")
sender = DiskSender(rank=0, store=store, whole_bytes=0)
def stop(number):
    if number == 2:
        while not (store.files(2) / "model-00001.safetensors").exists():
            time.sleep(0.01)
        print("half", flush=True)
        signal.pause()
def write(value, version, before):
    buckets = [[(name, torch.full((1000,), value))] for name in "abc"]
    sender.write(Given(buckets, before), [f"model-0000{number}.safetensors" for number in (1, 2, 3)], version)
write(1.0, 1, lambda number: None)
write(2.0, 2, stop)
"""


def test_a_writer_that_is_killed_leaves_the_version_before_and_no_other(store: Store, mirror: Mirror) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(store.folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "half\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert (store.files(2) / "model-00001.safetensors").exists() and store.versions() == [1]
    with pytest.raises(TornError, match=MANIFEST):
        mirror.bring(2, soon())
    assert read(mirror.bring(1, soon()))["b"].eq(1.0).all()
    # Who writes next begins anew.
    sender = DiskSender(rank=0, store=store, whole_bytes=0)
    write(sender, first_model(), 2)
    assert same(read(mirror.bring(2, soon())), first_model()) and store.versions() == [2]
    sender.close()


HOLDER = """
import sys, time
from pathlib import Path
from megarl.sync.mirror import Mirror
from megarl.sync.store import Store
mirror = Mirror(Path(sys.argv[1]), Store(Path(sys.argv[2]), "tiny"))
mirror.folder.mkdir(exist_ok=True)
with mirror._alone(time.monotonic() + 10):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_stands_still_in_the_middle_holds_up_nobody(
    store: Store, sender: DiskSender, mirror: Mirror, stopped: bool
) -> None:
    """One that works is waited for, as long as there is time."""
    write(sender, first_model(), 1)
    command = [sys.executable, "-c", HOLDER, str(mirror.folder), str(store.folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "mine\n"
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
        assert same(read(mirror.bring(1, soon())), first_model())
    else:
        with pytest.raises(DeadlineError, match=f"{child.pid}"):
            mirror.bring(1, time.monotonic() + 0.3)
    child.kill()
    child.communicate()
    assert same(read(mirror.bring(1, soon())), first_model())


def test_many_at_once_all_have_it_also_without_locks(
    store: Store, sender: DiskSender, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each puts the version together, and whoever ends first has done it."""
    monkeypatch.setattr("megarl.sync.mirror._locked", lambda handle: True)
    model = first_model()
    for version in range(1, 6):
        model = moved(model, {"model.norm.weight"} if version % 2 else set(NAMES), version)
        write(sender, model, version)
        with ThreadPoolExecutor(4) as pool:
            folders = list(pool.map(lambda _, at=version: mirror.bring(at, soon()), range(4)))
        assert len(set(folders)) == 1 and same(read(folders[0]), model)
        assert sorted(path.name for path in mirror.folder.iterdir()) == ["lock", f"v{version:06d}"]


def test_nothing_half_made_stays_where_what_it_is_made_of_is_gone(
    store: Store, sender: DiskSender, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was faster has removed it: it is made of the store alone."""
    write(sender, first_model(), 1)
    mirror.bring(1, soon())
    model = moved(first_model(), {"model.norm.weight"}, 2)
    write(sender, model, 2)

    def gone(mirror: Mirror, version: int) -> dict[str, int]:
        raise FileNotFoundError(version)

    monkeypatch.setattr(Mirror, "_since", gone)
    assert same(read(mirror.bring(2, soon())), model)
    assert sorted(path.name for path in mirror.folder.iterdir()) == ["lock", "v000002"]


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Writing more into a file fails within, as a full disk's does (EFBIG): what this process may write is limited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_what_was_there_stays(store: Store, tmp_path: Path) -> None:
    large = {"a": torch.zeros(2**18), "b": torch.zeros(2**18)}  # 2 MiB
    with pytest.raises(DiskFullError, match=r"takes 1,099,511,627,776 MiB.*sync\.folder"):
        write(DiskSender(rank=0, store=store, whole_bytes=2**60), large, 1)  # said before anything is written
    sender = DiskSender(rank=0, store=store, whole_bytes=0)
    with no_file_above(3 * 2**19):
        write(sender, {"a": torch.zeros(2**17), "b": torch.zeros(2**17)}, 1)
        sender.close()
        with pytest.raises(DiskFullError, match=f"No room for a weight version in {store.folder}"):
            write(DiskSender(rank=0, store=store, whole_bytes=0), large, 2)
    assert store.versions() == [1] and not (store.folder / "v000002").exists()
    assert read(Mirror(tmp_path / "node", store).bring(1, soon()))["a"].numel() == 2**17


def test_a_rank_without_room_for_what_it_keeps_says_where(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that the store is full: what changed is small, and there is room for it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender, model = DiskSender(rank=0, store=store, whole_bytes=0), {"a": torch.ones(2**17), "b": torch.ones(2**17)}
    write(sender, model, 2)
    with no_file_above(2**18), pytest.raises(DiskFullError, match=rf"No room in {tmp_path}/sent-.* TMPDIR"):
        write(sender, {name: tensor + 1 for name, tensor in model.items()}, 3)
    assert store.versions() == [2]
    sender.close()


def test_a_rank_without_room_for_the_folder_of_what_it_keeps_says_where(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(DiskFullError, match=rf"No room in {tmp_path} on .* TMPDIR"):
        write(DiskSender(rank=0, store=store, whole_bytes=0), first_model(), 1)


DIES = """
import tempfile
from megarl.sync.orphans import owner
print(tempfile.mkdtemp(prefix="sent-", suffix=owner(), dir={folder!r}))
"""


def test_what_a_killed_rank_kept_goes_with_the_next_ranks_first_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on after a death, or back to its checkpoint, has new ranks in the same temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = DIES.format(folder=str(tmp_path))
    left = Path(subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True).stdout.strip())
    assert left.is_dir()
    first, second = (DiskSender(rank=rank, store=store, whole_bytes=0) for rank in (0, 0))
    write(first, first_model(), 1)
    write(second, first_model(), 2)
    assert not left.exists() and len(list(tmp_path.glob("sent-*"))) == 2
    first.close()
    second.close()


def test_a_node_without_room_says_so(store: Store, tmp_path: Path) -> None:
    sender, model = DiskSender(rank=0, store=store, whole_bytes=0), {"a": torch.zeros(2**18), "b": torch.zeros(2**18)}
    mirror = Mirror(tmp_path / "node", store)
    write(sender, model, 1)
    mirror.bring(1, soon())
    write(sender, {name: tensor + 1 for name, tensor in model.items()}, 2)
    says = f"No room for weight version 2 in {mirror.folder}.*TMPDIR"
    with no_file_above(2**20), pytest.raises(DiskFullError, match=says):
        mirror.bring(2, soon())
    assert [path.name for path in mirror.folder.glob("v*")] == ["v000001"]
    sender.close()
