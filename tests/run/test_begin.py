"""The first files of a run, and the last: what cannot be written is named, and the HF folder comes last."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.process import ProcessSpec
from megarl.core.errors import UserError
from megarl.core.progress import Progress, read_progress
from megarl.core.ray_env import AGAIN_VARIABLE
from megarl.core.stop import STOP_SIGNAL, StopRequest
from megarl.recipe.load import load_recipe
from megarl.recipe.save import save_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from megarl.report.writers import open_writers
from megarl.run import begin, supervised, train
from megarl.run.exported import NOTE, exported_step
from megarl.run.journal import evaluations_before
from megarl.run.lock import LOCK, locked
from megarl.run.serve import servable
from megarl.training import run_checkpoints
from tests.support.dry import driver
from tests.support.dry.actors import Book
from tests.support.dry.world import write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    return root


def run(root: Path, name: str, *overrides: str, resume: bool = False, go_on: bool = False) -> Book:
    words: Sequence[str] = (f"run.name={name}", "cluster.platform=cpu", *overrides)
    return driver.run(Recipe, root / "train.yaml", words, root, resume=resume, go_on=go_on)


def test_the_policys_folder_is_written_last(world: Path) -> None:
    """A run that has it has nothing left to do: killed before, it writes the others when it is gone on with."""
    adapted = run(world, "adapted", "actor.lora={}")
    told = [each[0] for each in adapted.told if str(each[0]).startswith("export")]
    assert told == ["export adapters", "export"]
    critic = run(world, "critic", "algorithm.preset=ppo")
    assert [each[1] for each in critic.told if each[0] == "export"] == ["critic", "actor"]


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_a_scheduler_starts_again_goes_on_by_itself(
    again: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At night wandb's server may be away: it was refused then, with exit code 2, and its job was over."""
    seen: list[bool] = []

    def noted(*arguments: Any, recovered: bool, **named: Any) -> Any:
        seen.append(recovered)
        return open_writers(*arguments, recovered=recovered, **named)

    monkeypatch.setattr(begin, "open_writers", noted)
    if again:
        monkeypatch.setenv(AGAIN_VARIABLE, "1")
    run(world, f"again_{again}", "train.steps=1")
    assert seen == [again]


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_a_request_to_stop_that_comes_before_the_start_is_heeded(
    kind: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one between two lives of a run is: the signal would otherwise kill the driver."""
    module, name = (train, "preflight") if kind == "train" else (supervised, "preflight_supervised")
    check = getattr(module, name)

    def asked(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), STOP_SIGNAL)
        return check(*arguments, **named)

    monkeypatch.setattr(module, name, asked)
    words = (f"run.name=stopped_{kind}", "cluster.platform=cpu", "train.steps=2")
    book = driver.run(Recipe if kind == "train" else SftRecipe, world / f"{kind}.yaml", words, world)
    assert ("stopped", "stopped as it was asked to, after step 1 of 2, which is committed.") in book.told


@pytest.mark.parametrize("last", ["setup_logging", "open_writers", "save_recipe"])
def test_evaluations_are_not_taken_for_those_of_a_start_that_came_to_nothing(
    last: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked with other keys, and was killed at one of its first files: step 3, behind the checkpoint, is asked anew."""
    words = [f"run.name=stale_{last}", "cluster.platform=cpu", f"data.eval={world / 'prompts.jsonl'}", "train.steps=3"]
    driver.run(Recipe, world / "train.yaml", (*words, "train.save_every=2"), world)
    old = load_recipe(world / "train.yaml", words, Recipe)
    folder = old.recipe.run.folder
    save_recipe(old, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000003")
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 3, "eval/accuracy": 0.5}\n')
    new = load_recipe(world / "train.yaml", [*words, "eval.samples_per_prompt=4", "eval.temperature=1.0"], Recipe)
    assert 3 in evaluations_before(old) and evaluations_before(new) == {}
    done = getattr(begin, last)

    open_files = ExitStack()

    def killed_after(*arguments: Any, **named: Any) -> Any:
        made = done(*arguments, **named)
        open_files.callback(getattr(made, "close", lambda: None))
        raise KeyboardInterrupt

    monkeypatch.setattr(begin, last, killed_after)
    committed = run_checkpoints.Checkpoints(folder / "checkpoints", keep_last=9).latest()
    with open_files, pytest.raises(KeyboardInterrupt), begin.opened(new, [], committed, StopRequest()):
        raise AssertionError("it has begun")
    assert committed.step == 2 and 3 not in evaluations_before(new)


@pytest.mark.parametrize("name", ["logs", "journal", "metrics.jsonl", "exported.json"])
def test_what_stands_in_the_place_of_a_runs_files_is_named(world: Path, name: str) -> None:
    run_name = f"in_the_way_{name.partition('.')[0]}"
    folder = world / "runs" / run_name
    run(world, run_name, "train.save_every=1", "train.steps=2")
    file = folder / name
    if file.exists():
        file.rename(file.with_name("moved"))
    if "." in name:  # what would be a file
        file.mkdir()
    else:
        file.touch()
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"cannot be written to|is not a file"):
        run(world, run_name, "train.save_every=1", "train.steps=3", resume=True)
    assert {path.name for path in before} <= {path.name for path in folder.rglob("*")}, "nothing is lost"


def test_a_run_that_another_process_writes_is_left_alone(world: Path) -> None:
    run(world, "taken", "train.save_every=1", "train.steps=2")
    folder = world / "runs" / "taken"
    rows = (folder / "metrics.jsonl").read_bytes()
    with locked(folder), pytest.raises(UserError, match="is in use: process"):
        run(world, "taken", "train.save_every=1", "train.steps=3", resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == rows
    run(world, "taken", "train.save_every=1", "train.steps=3", resume=True)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_folder_of_a_runs_earlier_end_is_not_taken_for_the_newest(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended at step 2, was lengthened, and died behind its last checkpoint: it has its models to write still."""
    folder = world / "runs" / "longer"
    run(world, "longer", "train.save_every=1", "train.steps=2")
    (folder / "hf").mkdir()  # no rank writes here
    (folder / "hf" / "config.json").touch()
    assert exported_step(folder, 2) == 2
    (folder / NOTE).unlink()  # as an earlier version leaves it
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr("megarl.run.begin.finish", killed)
        patch.setattr("megarl.run.train.finish", killed)
        run(world, "longer", "train.save_every=1", "train.steps=3", resume=True)
    assert exported_step(folder, 3) == 2
    with pytest.raises(UserError, match="is of step 2, and the run has gone on to step 3 since"):
        servable(folder)
    run(world, "longer", "train.save_every=1", "train.steps=3", resume=True)
    assert exported_step(folder, 3) == 3 and servable(folder) == folder / "hf"
    with pytest.raises(UserError, match="nothing is left to do"):
        run(world, "longer", "train.save_every=1", "train.steps=3", resume=True)
    for step in ('"x"', "null", "[3]"):
        (folder / NOTE).write_text(f'{{"step": {step}}}')
        assert exported_step(folder, 3) == -1, "a folder of no step is written anew"


def test_a_checkpoint_is_read_whole_once_and_another_that_was_committed_meanwhile_is_found(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may take minutes to read."""
    folder = world / "runs" / "read"
    run(world, "read", "train.save_every=1", "train.steps=3")
    newest, read, look = folder / "checkpoints" / "step_000003", [], run_checkpoints.step_damage

    def looked(each: Path, *, read: bool, seen: list[Path] = read) -> list[str]:
        seen += [each] if read else []
        return look(each, read=read)

    monkeypatch.setattr(run_checkpoints, "step_damage", looked)
    monkeypatch.setattr(begin, "names_of", lambda recipe: {"model.path": "of the hub"})
    run(world, "read", "train.save_every=1", "train.steps=4", resume=True)
    assert read == [newest]
    with pytest.raises(UserError, match="no-such-file"):  # told first
        run(world, "read", "train.save_every=1", "train.steps=5", "data.train=no-such-file.jsonl", resume=True)
    assert read == [newest]
    checkpoints = run_checkpoints.Checkpoints(newest.parent, keep_last=9)
    older = checkpoints.committed()[-2]
    found = begin._still_newest(checkpoints, older)
    assert found is not None and found.step == 4


def test_what_a_kill_within_the_last_save_has_left_is_removed_though_nothing_is_saved_any_more(world: Path) -> None:
    """It had as many bytes as a checkpoint, and stayed for good."""
    run(world, "left", "train.steps=2")
    checkpoints = world / "runs" / "left" / "checkpoints"
    whole = sorted(path.name for path in checkpoints.iterdir())
    for name in (".old-step_000001", ".tmp-step_000002"):
        (checkpoints / name / "actor").mkdir(parents=True)
    shutil.rmtree(checkpoints.with_name("hf"), ignore_errors=True)
    run(world, "left", "train.steps=2", resume=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == whole != []


@pytest.mark.parametrize("go_on", [False, True])
def test_a_run_that_came_and_ended_while_the_inputs_were_looked_at_is_not_begun_anew(
    go_on: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one recipe are started at once, the model of one takes minutes to read, and the other is killed meanwhile."""
    name, look = f"meanwhile-{go_on}", train.preflight
    folder, other = world / "runs" / name, world / "runs" / f"{name}-other"
    run(world, other.name, "train.save_every=1", "train.steps=2")
    shutil.rmtree(other / "hf", ignore_errors=True)

    def looked(recipe: Recipe, **settings: Any) -> Any:
        checked = look(recipe, **settings)
        if other.exists():
            other.rename(folder)
        return checked

    monkeypatch.setattr(train, "preflight", looked)
    with pytest.raises(UserError, match=r"step_000002 has come while this process looked .*Go on with it by --resume"):
        run(world, name, "train.save_every=1", "train.steps=3", go_on=go_on)
    run(world, name, "train.save_every=1", "train.steps=3", resume=True)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rows] == [0, 1, 2, 3]


def test_the_checkpoint_that_came_meanwhile_is_the_newest_by_its_number(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        (tmp_path / f"step_{step:06d}").mkdir()
    with pytest.raises(UserError, match="step_1000000 has come while"):
        begin._still_newest(run_checkpoints.Checkpoints(tmp_path, keep_last=1), None)


def killed(*_: object) -> None:
    raise RuntimeError("killed")


def test_a_lock_that_cannot_be_had_is_named(world: Path) -> None:
    run(world, "odd_lock", "train.save_every=1", "train.steps=2")
    lock = world / "runs" / "odd_lock" / LOCK
    lock.unlink()
    lock.mkdir()
    with pytest.raises(UserError, match=r"cannot be written to: .*/\.lock"):
        run(world, "odd_lock", "train.save_every=1", "train.steps=3", resume=True)


def test_a_folder_that_is_removed_under_a_run_ends_it_with_a_sentence(world: Path) -> None:
    folder = world / "runs" / "removed"
    loaded = load_recipe(world / "train.yaml", ["run.name=removed", "cluster.platform=cpu"], Recipe)
    with (
        driver.stage(Book(), world),
        pytest.raises(UserError, match=r"runs/removed cannot be written to: .*No such file"),
        begin.opened(loaded, [], None, StopRequest()) as opened,
    ):
        shutil.rmtree(folder)
        with opened.timer.phase("rollout"):
            raise AssertionError("it cannot be told in which phase the driver is")


def test_a_run_goes_on_where_what_it_does_cannot_be_told(world: Path) -> None:
    """Somebody has removed its logs, and metrics and checkpoints are as they were."""
    folder = world / "runs" / "without_logs"
    loaded = load_recipe(world / "train.yaml", ["run.name=without_logs", "cluster.platform=cpu"], Recipe)
    with driver.stage(Book(), world), begin.opened(loaded, [], None, StopRequest()) as opened:
        shutil.rmtree(folder / "logs")
        with opened.timer.step(1), opened.timer.phase("rollout"):
            opened.writers.write(1, {"reward/mean": 0.5})
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5}


@pytest.mark.parametrize(("kind", "busy"), [(Recipe, False), (SftRecipe, True)])
def test_ranks_are_at_work_in_an_evaluation_of_rows(world: Path, kind: Any, busy: bool) -> None:
    command = "sft" if kind is SftRecipe else "train"
    loaded = load_recipe(world / f"{command}.yaml", [f"run.name=busy_{command}", "cluster.platform=cpu"], kind)
    with driver.stage(Book(), world), begin.opened(loaded, [], None, StopRequest()) as opened:
        with opened.timer.step(1), opened.timer.phase("eval"):
            time.sleep(0.05)
        assert (opened.timer.metrics(0)["perf/ranks_idle"] < 0.5) == busy


def test_how_far_a_killed_process_was_is_not_told_of_the_next(world: Path) -> None:
    loaded = load_recipe(world / "train.yaml", ["run.name=far", "cluster.platform=cpu"], Recipe)
    spec = ProcessSpec("rank 0", world / "runs" / "far" / "logs")
    spec.logs.mkdir(parents=True)
    Progress(spec.progress).of(8, "micro-batches").__enter__()
    assert read_progress(spec.progress) is not None
    with driver.stage(Book(), world), begin.opened(loaded, [], None, StopRequest()):
        assert read_progress(spec.progress) is None
