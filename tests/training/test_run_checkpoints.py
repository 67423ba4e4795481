"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core import checksums
from megarl.core.errors import MegarlError, UserError
from megarl.training import run_checkpoints
from megarl.training.run_checkpoints import MARKER, Checkpoints, step_damage


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text(folder.parent.name)


def save(checkpoints: Checkpoints, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """As a run does: one role, whose files `write` makes."""
    write(checkpoints.begin(step, ["actor"])["actor"])
    return checkpoints.commit(step, state)


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    target = save(checkpoints, 7, write_weights, {"weight_version": 8, "data": {"position": 3}})
    latest = checkpoints.latest()
    assert latest.folder == target and latest.step == 7
    assert latest.state == {"step": 7, "weight_version": 8, "data": {"position": 3}}
    assert (latest.role("actor") / "weights").exists()


def test_a_checkpoint_holds_every_role_and_names_one_that_it_lacks(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for name, folder in checkpoints.begin(3, ["actor", "critic"]).items():
        (folder / "weights").write_text(name)
    checkpoints.commit(3, {})
    latest = checkpoints.latest()
    assert (latest.role("critic") / "weights").read_text() == "critic"
    with pytest.raises(UserError, match=r"step_000003 was saved without a reference, which this recipe has"):
        latest.role("reference")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (5, 10, 100):
        save(checkpoints, step, write_weights, {})
    assert [each.step for each in checkpoints.committed()] == [10, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000100"]


def test_one_that_is_removed_is_gone_at_once_and_what_was_left_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 1, write_weights, {})

    def killed(folder: Path, **_: Any) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(run_checkpoints.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, 2, write_weights, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".old-step_000001", "step_000002"]
    write_weights(checkpoints.begin(3, ["actor"])["actor"])  # by somebody who was killed before the commit
    save(checkpoints, 4, write_weights, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_one_that_was_moved_and_linked_back_goes_as_a_link_and_is_kept_where_it_is(tmp_path: Path) -> None:
    folder, far = tmp_path / "checkpoints", tmp_path / "far"
    checkpoints = Checkpoints(folder, keep_last=1)
    save(checkpoints, 2, write_weights, {}).rename(far)
    (folder / "step_000002").symlink_to(far)
    assert checkpoints.latest().step == 2
    (folder / ".old-step_000001").symlink_to(far)  # as an older megarl left it
    save(checkpoints, 4, write_weights, {})
    assert [path.name for path in folder.iterdir()] == ["step_000004"] and step_damage(far, read=True) == []


@pytest.mark.parametrize("name", ["step_000004", ".old-step_000004", ".tmp-step_000004"])
@pytest.mark.parametrize("place", ["a file", "a link to nothing", "a link to a folder"])
def test_what_stands_at_the_name_of_the_next_gives_way(tmp_path: Path, name: str, place: str) -> None:
    folder, far = tmp_path / "checkpoints", tmp_path / "far"
    checkpoints = Checkpoints(folder, keep_last=1)
    save(checkpoints, 2, write_weights, {})
    (far / "actor").mkdir(parents=True)
    if place == "a file":
        (folder / name).touch()
    else:
        (folder / name).symlink_to(far if place == "a link to a folder" else tmp_path / "nothing")
    target = save(checkpoints, 4, write_weights, {})
    assert [path.name for path in folder.iterdir()] == [target.name] and not target.is_symlink()
    assert checkpoints.latest().step == 4 and [path.name for path in far.rglob("*")] == ["actor"]


def test_only_what_a_run_began_is_abandoned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.begin(12, ["actor"])
    (tmp_path / ".tmp-step_of mine").mkdir()
    assert checkpoints.abandon() == [12] and [path.name for path in tmp_path.iterdir()] == [".tmp-step_of mine"]


def test_a_save_that_fails_leaves_the_older_one_in_force(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 1, write_weights, {})

    def full_disk(folder: Path) -> None:
        write_weights(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        save(checkpoints, 2, full_disk, {})
    assert checkpoints.latest().step == 1
    # The next save of that step is not disturbed by what was left.
    save(checkpoints, 2, write_weights, {})
    assert [each.step for each in checkpoints.committed()] == [2]


def test_without_its_marker_a_folder_is_ignored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    save(checkpoints, 1, write_weights, {})
    half = save(checkpoints, 2, write_weights, {})
    (half / MARKER).unlink()
    (tmp_path / "step_notes").mkdir()
    assert checkpoints.latest().step == 1


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    save(checkpoints, 1, write_weights, {"weight_version": 1})
    save(checkpoints, 1, write_weights, {"weight_version": 9})
    assert json.loads((tmp_path / "step_000001" / "state.json").read_text())["weight_version"] == 9


def test_nothing_to_resume_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no committed checkpoint\. Give --continue in the place of"):
        Checkpoints(tmp_path / "none", keep_last=1).latest()


def test_every_nth_is_kept_for_good(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=20)
    for step in range(10, 71, 10):
        save(checkpoints, step, write_weights, {})
    assert [each.step for each in checkpoints.committed()] == [20, 40, 60, 70]


def test_the_best_are_kept_while_they_are_the_best(tmp_path: Path) -> None:
    """Of what there still is: what was let go for a better one does not come back."""
    good = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.6, 6: 0.2}
    kept = []

    def best(steps: Sequence[int]) -> set[int]:
        return {max(steps, key=lambda step: good[step])}

    checkpoints = Checkpoints(tmp_path, keep_last=1, best=best)
    for step in good:
        save(checkpoints, step, write_weights, {})
        kept.append([each.step for each in checkpoints.committed()])
    assert kept == [[1], [2], [2, 3], [2, 4], [5], [5, 6]]


def truncate(step: Path) -> None:
    (step / "actor" / "weights").write_text("x")


def lose(step: Path) -> None:
    (step / "actor" / "weights").unlink()


def flip(step: Path) -> None:
    content = bytearray((step / "actor" / "weights").read_bytes())
    content[3] ^= 1
    (step / "actor" / "weights").write_bytes(content)


def break_state(step: Path) -> None:
    (step / "state.json").write_text('{"step": ')


def break_marker(step: Path) -> None:
    (step / MARKER).write_text("")


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (truncate, "actor/weights has 1 bytes of 16"),
        (lose, "actor/weights is missing"),
        (flip, "actor/weights has other content than was written"),
        (break_state, "state.json has 9 bytes of 14"),
        (break_marker, "COMMITTED is missing or broken"),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], problem: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        save(checkpoints, step, write_weights, {})
    newest = tmp_path / "step_000002"
    assert step_damage(newest, read=True) == []
    harm(newest)
    assert step_damage(newest, read=True) == [problem]
    assert checkpoints.latest().step == 1
    assert f"{newest} is damaged and is passed over: {problem}" in caplog.text


def test_one_under_another_steps_name_is_damaged_and_by_a_name_of_ones_own_is_not(tmp_path: Path) -> None:
    """It would be gone on from as if the steps between had been made."""
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        save(checkpoints, step, write_weights, {})
    later = (tmp_path / "step_000002").rename(tmp_path / "step_000009")
    problem = "it is of step 2, as its state.json says: the folder needs that step's name"
    for read in (False, True):
        assert step_damage(later, read=read) == [problem]
    assert checkpoints.latest().step == 1 and [each.step for each in checkpoints.committed()] == [1]
    assert step_damage(later.rename(tmp_path / "step_2"), read=True) == []
    assert step_damage((tmp_path / "step_2").rename(tmp_path / "the best"), read=True) == []


def test_one_that_its_run_removes_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else looks, while the run goes on."""
    checkpoints, look, looked = Checkpoints(tmp_path, keep_last=1), checksums.sum_files, []
    save(checkpoints, 3, write_weights, {})

    def slowly(folder: Path, names: list[str]) -> dict[str, checksums.FileSum]:
        looked.append(folder)
        if len(looked) == 1:
            save(checkpoints, 6, write_weights, {})
        return look(folder, names)

    monkeypatch.setattr(checksums, "sum_files", slowly)
    assert checkpoints.latest().step == 6 and "damaged" not in caplog.text


def test_where_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        lose(save(checkpoints, step, write_weights, {}))
    with pytest.raises(
        UserError,
        match=r"step_000002: actor/weights is missing. step_000001: actor/weights is missing\. Remove .*give --continue",
    ):
        checkpoints.latest()


def test_a_damaged_one_does_not_push_whole_ones_out(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2):
        save(checkpoints, step, write_weights, {})
    lose(tmp_path / "step_000002")
    save(checkpoints, 3, write_weights, {})
    assert [each.step for each in checkpoints.committed()] == [1, 3]


def test_a_damaged_one_goes_when_its_time_comes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in (4, 5):
        save(checkpoints, step, write_weights, {})
        lose(tmp_path / f"step_{step:06d}")
    for step in (6, 7):
        save(checkpoints, step, write_weights, {})
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"step_{step:06d}" for step in (4, 6, 7)]


def test_what_was_passed_over_does_not_push_out_what_is_saved_before_its_step(tmp_path: Path) -> None:
    """Damage that no size tells of; the run goes on from before it, and stops early."""
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (10, 20):
        save(checkpoints, step, write_weights, {})
    (tmp_path / "step_000020" / "actor" / "weights").write_text(".tmp-step_000030")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    assert checkpoints.latest().step == 10
    save(checkpoints, 13, write_weights, {})
    assert [each.step for each in checkpoints.committed()] == [13] and checkpoints.latest().step == 13


def test_what_has_begun_is_a_checkpoint_once_it_is_committed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 1, write_weights, {})
    write_weights(checkpoints.begin(2, ["actor"])["actor"])
    assert checkpoints.latest().step == 1
    checkpoints.commit(2, {"weight_version": 3})
    assert checkpoints.latest().state == {"step": 2, "weight_version": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_errors_while_writing_name_the_folder_to_be(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    folder = checkpoints.begin(7, ["actor"])["actor"]
    with pytest.raises(UserError) as error, checkpoints.naming(7):
        raise UserError(f"The disk is full at {folder}.")
    assert str(error.value) == f"The disk is full at {tmp_path}/checkpoints/step_000007/actor."


def test_a_marker_that_says_nothing_of_the_state_is_broken(tmp_path: Path) -> None:
    target = save(Checkpoints(tmp_path, keep_last=1), 7, write_weights, {})
    (target / MARKER).write_text(json.dumps({"files": {}}))
    assert step_damage(target, read=True) == ["COMMITTED does not speak of state.json"]


def test_one_that_is_harmed_anywhere_is_refused_or_is_what_it_was(tmp_path: Path) -> None:
    """A bit flipped, or a file cut short, anywhere in the newest: the older one is gone on with, which nobody has touched."""
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        save(checkpoints, step, write_weights, {"weight_version": step, "data": {"position": step}})
    newest, rng = tmp_path / "step_000002", np.random.default_rng(2)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    refused = 0
    for _ in range(300):
        path = files[int(rng.integers(len(files)))]
        whole = path.read_bytes()
        at, content = int(rng.integers(len(whole))), bytearray(whole)
        content[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(content if rng.integers(3) else whole[:at])
        found = checkpoints.latest()
        refused += found.step == 1
        assert found.state == {"step": found.step, "weight_version": found.step, "data": {"position": found.step}}
        assert (found.role("actor") / "weights").read_text() == (tmp_path / f".tmp-step_{found.step:06d}").name
        path.write_bytes(whole)
    assert refused > 250, "a bit of the marker's blanks may be another"
    assert checkpoints.latest().step == 2


def test_a_folder_that_takes_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(MegarlError, match=rf"The checkpoint of step 3 cannot be written into {tmp_path}/checkpoints: "):
        Checkpoints(tmp_path / "checkpoints", keep_last=1).begin(3, ["actor"])


def test_one_whose_files_are_gone_before_it_is_committed_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    write_weights(checkpoints.begin(3, ["actor"])["actor"])
    shutil.rmtree(checkpoints.folder)
    with pytest.raises(MegarlError, match=rf"step 3 cannot be committed in {tmp_path}/checkpoints: .*No such file"):
        checkpoints.commit(3, {})
