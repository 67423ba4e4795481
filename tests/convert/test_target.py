import errno
import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from megarl.convert import convert
from megarl.convert.convert import Settings
from megarl.convert.source import Source
from megarl.convert.target import check_target, followed, open_target
from megarl.core.errors import UserError, WorkerDiedError
from megarl.core.layout import Layout
from megarl.models.hf_dtypes import Dtypes
from megarl.training.manifest import MANIFEST
from tests.support.privileges import without_privileges


def fill(target, text="new"):
    target.content.mkdir()
    (target.content / "config.json").write_text(text)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_committed_appears_under_its_name(tmp_path):
    with open_target(tmp_path / "a" / "x") as target:
        fill(target)
        assert not target.path.exists()
        target.commit()
    assert (tmp_path / "a" / "x" / "config.json").read_text() == "new"
    assert names(tmp_path / "a") == ["x"]


def test_what_is_not_committed_leaves_nothing_and_the_old_one_in_place(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="full"), open_target(tmp_path / "x") as target:
        fill(target)
        raise OSError("full")
    assert names(tmp_path) == ["x"] and names(tmp_path / "x") == []


def test_the_old_one_is_replaced(tmp_path):
    for text in ("old", "new"):
        with open_target(tmp_path / "x") as target:
            fill(target, text)
            target.commit()
    assert (tmp_path / "x" / "config.json").read_text() == "new" and names(tmp_path) == ["x"]


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    (tmp_path / ".tmp-x" / "content" / "deep").mkdir(parents=True)
    with open_target(tmp_path / "x") as target:
        fill(target)
        target.commit()
    assert names(tmp_path) == ["x"]


def test_the_old_one_comes_back_where_a_conversion_was_killed_between_the_renames(tmp_path):
    (tmp_path / ".tmp-x" / "previous").mkdir(parents=True)
    (tmp_path / ".tmp-x" / "previous" / "config.json").write_text("old")
    with open_target(tmp_path / "x") as target:
        assert (target.path / "config.json").read_text() == "old"


def test_the_old_one_comes_back_where_the_new_one_does_not_get_its_name(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text("old")
    rename = Path.rename

    def refused(self, target):
        if self.name == "content":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with (
        pytest.raises(UserError, match=r"/x was not written: Input/output error\."),
        open_target(tmp_path / "x") as target,
    ):
        fill(target)
        target.commit()
    assert names(tmp_path) == ["x"] and (tmp_path / "x" / "config.json").read_text() == "old"


def test_what_stands_in_the_place_of_the_temporary_folder_is_named(tmp_path):
    (tmp_path / ".tmp-x").touch()
    with pytest.raises(UserError, match=r"/x was not written: \S+/\.tmp-x: File exists"), open_target(tmp_path / "x"):
        pass
    assert names(tmp_path) == [".tmp-x"]


def test_what_cannot_be_removed_is_named_beside_what_went_wrong(tmp_path):
    locked = tmp_path / ".tmp-x" / "content" / "locked"
    with without_privileges(), pytest.raises(OSError, match="full") as caught, open_target(tmp_path / "x"):
        (locked / "deep").mkdir(parents=True)
        locked.chmod(0o555)
        raise OSError("full")
    [note] = caught.value.__notes__
    assert note.startswith(f"{tmp_path / '.tmp-x'}, ") and note.endswith("Permission denied. Remove it.")
    with (
        without_privileges(),
        pytest.raises(UserError, match=r"\.tmp-x/content, .*Remove it"),
        open_target(tmp_path / "x"),
    ):
        pass


def test_two_conversions_to_one_place(tmp_path):
    with open_target(tmp_path / "x") as target:
        fill(target)
        with pytest.raises(UserError, match="Another conversion is writing to"), open_target(tmp_path / "x"):
            pass
        target.commit()
    assert (tmp_path / "x").is_dir()


def test_an_existing_target_needs_force(tmp_path):
    (tmp_path / "x").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "x" / name).touch()
    with pytest.raises(UserError, match=r"exists already.*--force"):
        check_target(tmp_path / "x", 10, force=False)
    check_target(tmp_path / "x", 10, force=True)


@pytest.mark.parametrize("name", ["precious", "config.json"])
def test_force_replaces_models_only(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match="is not a model's folder"):
        check_target(tmp_path, 10, force=True)


@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors"])
def test_force_takes_no_other_model_with_the_one_that_it_replaces(tmp_path, name):
    (tmp_path / "other" / "hf").mkdir(parents=True)
    for path in (tmp_path / MANIFEST, tmp_path / "other" / name):
        path.touch()
    with pytest.raises(UserError, match=r"holds another model, .*/other, so --force does not replace it"):
        check_target(tmp_path, 10, force=True)


def test_force_replaces_a_model_that_has_its_weights_in_other_forms_too(tmp_path):
    for name in ("config.json", "model.safetensors", "original/consolidated.00.bin", "onnx/model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    check_target(tmp_path, 10, force=True)
    (tmp_path / "original" / "config.json").touch()
    with pytest.raises(UserError, match=r"holds another model, .*/original, so --force does not replace it"):
        check_target(tmp_path, 10, force=True)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"No room for .*it needs 1152921504\.62\d GB, and .* are free"):
        check_target(tmp_path / "x", 2**60, force=False)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        check_target(tmp_path / "file" / "x", 10, force=False)


def test_links_stay_and_what_they_lead_to_is_written(tmp_path):
    (tmp_path / "far").symlink_to(tmp_path / "disk" / "model")
    target = followed(tmp_path / "far")
    assert target == tmp_path / "disk" / "model"
    with open_target(target) as made:
        made.content.mkdir()
        made.commit()
    assert (tmp_path / "far").is_symlink() and (tmp_path / "far").is_dir()
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(UserError, match="leads in a circle"):
        followed(tmp_path / "round")


@pytest.mark.parametrize("target", ["ck", "ck/../ck", "ck/hf", "above", "link", "whole/.."])
def test_a_source_is_not_replaced_whatever_the_target_is_called(tmp_path, monkeypatch, target):
    """Or a folder that holds it, or the HF folder within it."""
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "above" / "ck"
    (inner / "hf").mkdir(parents=True)
    (tmp_path / "ck").symlink_to(inner)
    (tmp_path / "link").symlink_to(tmp_path / "above")
    (tmp_path / "whole").mkdir()
    settings = Settings(force=True)
    with pytest.raises(UserError, match=r"(is|holds) the source, .*Name another folder"):
        convert._convert(
            "mcore-to-hf",
            Source("mcore", Path("ck")),
            Path(target),
            Layout(),
            Dtypes("float32", {}),
            False,
            1,
            settings,
            Console(),
        )
    assert inner.is_dir()


@pytest.mark.parametrize("gone", [True, False])
def test_a_source_that_its_run_removes_meanwhile_is_told(tmp_path, monkeypatch, gone):
    (tmp_path / "ck" / "hf").mkdir(parents=True)

    def ranks(*_, **__):
        if gone:
            shutil.rmtree(tmp_path / "ck")
        raise WorkerDiedError("Rank 0 of the conversion ended with exit code 1")

    monkeypatch.setattr(convert, "run_ranks", ranks)
    words = (
        "mcore-to-hf",
        Source("mcore", tmp_path / "ck"),
        tmp_path / "out",
        Layout(),
        Dtypes("float32", {}),
        False,
        1,
    )
    with pytest.raises(
        UserError if gone else WorkerDiedError, match=r"was removed while it was read" if gone else "Rank 0"
    ):
        convert._convert(*words, Settings(), Console())
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_ends_as_another_begins_takes_nothing_from_it(tmp_path, monkeypatch):
    with ExitStack() as first:
        fill(first.enter_context(open_target(tmp_path / "x")))
        lock = fcntl.flock

        def late(handle, how):
            monkeypatch.setattr(fcntl, "flock", lock)
            first.close()
            lock(handle, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with open_target(tmp_path / "x") as target:
            fill(target)
            target.commit()
    assert names(tmp_path) == ["x"]
