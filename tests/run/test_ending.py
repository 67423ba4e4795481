"""What is said of a run that ends early: the newest whole checkpoint, and a command that can be pasted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.errors import DeadlineError, DiskFullError, GradientError, MegarlError, UserError
from megarl.core.timing import PhaseTimer
from megarl.recipe.schema import Recipe
from megarl.run.ending import SUBMITTED_BY, called_with, ending, full_disks, go_on_command
from megarl.training.run_checkpoints import Checkpoints

OVERRIDES = ("run.seed=2", "reward.fn=a b:c")


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    recipe: Any = Recipe.model_construct()
    values = {"run": SimpleNamespace(folder=tmp_path / "run"), "train": SimpleNamespace(steps=9)}
    for name, value in values.items():
        object.__setattr__(recipe, name, value)
    return SimpleNamespace(recipe=recipe, path=Path("my recipe.yaml"), overrides=OVERRIDES)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2)


def commit(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.begin(step, ["actor"])
    checkpoints.commit(step, {"weight_version": step})


def told(loaded: Any, checkpoints: Checkpoints, error: BaseException, timer: PhaseTimer | None = None) -> BaseException:
    with pytest.raises(BaseException) as caught, ending(loaded, checkpoints) as early:
        early.timer = timer
        raise error
    return caught.value


def test_before_the_first_checkpoint_a_run_begins_anew(loaded: Any, checkpoints: Checkpoints) -> None:
    error = told(loaded, checkpoints, DeadlineError("too late"))
    assert isinstance(error, DeadlineError)
    *_, last = error.told().splitlines()
    assert "No checkpoint had been committed yet" in error.told() and "had not begun" in error.told()
    assert shlex.split(last)[-5:] == ["train", "my recipe.yaml", *OVERRIDES, "--continue"]


def test_a_bad_gradient_is_replayed_by_a_command_that_can_be_pasted(loaded: Any, checkpoints: Checkpoints) -> None:
    timer = PhaseTimer()
    with timer.step(5), timer.phase("update"):
        pass
    loaded.recipe.train.journal = True
    [note] = told(loaded, checkpoints, GradientError("a spike"), timer).__notes__
    folder = str(loaded.recipe.run.folder)
    assert shlex.split(note.splitlines()[-1])[-6:] == ["replay", folder, "--from-step", "5", "--to-step", "5"]
    assert "in the journal" not in told(loaded, checkpoints, MegarlError("another"), timer).__notes__[0]
    loaded.recipe.train.journal = False
    assert "in the journal" not in told(loaded, checkpoints, GradientError("a spike"), timer).__notes__[0]


def test_the_newest_whole_checkpoint_is_named_and_a_half_one_is_removed(loaded: Any, checkpoints: Checkpoints) -> None:
    commit(checkpoints, 2)
    commit(checkpoints, 4)
    (checkpoints.folder / "step_000004" / "state.json").write_text("")  # not whole any more
    checkpoints.begin(6, ["actor"])
    timer = PhaseTimer()
    with timer.step(6), timer.phase("save"):
        pass
    error = told(loaded, checkpoints, KeyboardInterrupt(), timer)
    assert isinstance(error, KeyboardInterrupt)
    [note] = error.__notes__
    assert (
        "in step 6 of 9 (save)" in note and "The checkpoint of step 6 was not whole yet and has been removed." in note
    )
    assert f"The last good checkpoint is {checkpoints.folder / 'step_000002'}, of step 2." in note
    assert shlex.split(note.splitlines()[-1])[-1] == "--resume"
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_000002", "step_000004"]


def test_a_refusal_is_left_as_it_is_and_a_bug_keeps_its_trace(loaded: Any, checkpoints: Checkpoints) -> None:
    refused = told(loaded, checkpoints, UserError("no such file"))
    assert isinstance(refused, UserError) and refused.told() == "no such file"
    bug = told(loaded, checkpoints, ZeroDivisionError("a bug"))
    assert isinstance(bug, ZeroDivisionError) and "begin anew" in bug.__notes__[0]


def test_a_full_disk_is_an_error_of_ours_whoever_met_it(loaded: Any, checkpoints: Checkpoints) -> None:
    commit(checkpoints, 3)

    def write() -> None:
        with Path("/dev/full").open("w") as full:
            full.write("a line")

    journal = "coordinator: JournalError: The journal in x cannot be written: database or disk is full."
    for fail in (
        write,
        lambda: remote("rank 0: OSError: [Errno 28] No space left on device"),
        lambda: remote(journal),
    ):
        with pytest.raises(DiskFullError, match=r"No space left|disk is full") as caught, ending(loaded, checkpoints):
            fail()
        assert "Make room there first" in caught.value.told() and "of step 3" in caught.value.told()
        assert caught.value.exit_code == 1


def remote(text: str) -> None:
    raise MegarlError(text)


def test_disks_are_named_by_where_they_are_mounted() -> None:
    assert full_disks([Path("/proc/self/not/there"), Path("/proc")]) == ["/proc: 0.0 of 0 MB are free"]


def test_the_command_is_how_this_megarl_was_called(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "megarl"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert go_on_command(loaded, "--resume").startswith(f"{program} train ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert go_on_command(loaded, "--resume").startswith("megarl train 'my recipe.yaml' ")
    monkeypatch.setattr(sys, "argv", ["/x/megarl/__main__.py"])
    assert go_on_command(loaded, "--resume").startswith(f"{sys.executable} -m megarl train ")


def test_a_run_that_was_submitted_is_submitted_again(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever pastes it is on a login node, where nothing is to be trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["/x/megarl/__main__.py", "submit", "my recipe.yaml", "--slurm", "--resume", "a=b c"]
    )
    again = called_with(but=("--resume",))
    assert again == f"cd {tmp_path} && {sys.executable} -m megarl submit 'my recipe.yaml' --slurm 'a=b c'"
    submitted = SimpleNamespace(**vars(loaded) | {"path": tmp_path / "recipe.yaml"})
    assert "megarl train" in go_on_command(submitted, "--resume")
    (tmp_path / SUBMITTED_BY).write_text(f"{again}\n")
    assert go_on_command(submitted, "--resume") == f"{again} --resume"
    assert "megarl train" in go_on_command(submitted, "--continue"), "nothing is there that --resume could go on with"


@pytest.mark.parametrize("full", [True, False])
def test_a_stream_of_torchs_that_was_not_written_is_a_full_disk_where_that_is_full(
    full: bool, loaded: Any, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path("/proc/self/not/there") if full else tmp_path
    object.__setattr__(loaded.recipe, "run", SimpleNamespace(folder=folder))
    error = MegarlError("save (actor), rank 0: RuntimeError: basic_ios::clear: iostream error")
    with pytest.raises(MegarlError, match="iostream error") as caught, ending(loaded, checkpoints) as early:
        early.look(error)
        raise error
    assert isinstance(caught.value, DiskFullError) == full
    assert ("A disk is full (/proc: " in str(caught.value)) == full
