"""A length in epochs is one in steps from the start on, for every kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.recipe.batch import plan_batches
from megarl.recipe.load import KINDS, load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml
from megarl.run import epochs, supervised, train
from megarl.run.begin import found
from megarl.run.epochs import steps_of, with_steps
from megarl.run.preflight import preflight
from megarl.run.recovery import RewoundError
from tests.support.dry import driver
from tests.support.dry.actors import Book
from tests.support.dry.world import write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    return root


def run(root: Path, kind: str, name: str, *overrides: str, resume: bool = False) -> Book:
    words: Sequence[str] = (f"run.name={name}", *overrides)
    return driver.run(KINDS[kind], root / f"{kind}.yaml", words, root, resume=resume)


def steps(root: Path, kind: str, epochs: str, *overrides: str) -> int:
    words = ["train.steps=0", f"train.epochs={epochs}", *overrides]
    loaded: Any = with_steps(load_recipe(root / f"{kind}.yaml", words, KINDS[kind]))
    return int(loaded.recipe.train.steps)


@pytest.mark.parametrize(
    ("epochs", "rows", "a_step", "whole"),
    [(3, 100, 8, 37), (15, 7473, 1024, 109), (1, 10, 10, 1), (1, 10, 11, 0), (0.29, 100, 1, 29), (0.5, 7, 3, 1)],
)
def test_steps_are_those_that_are_whole_in_the_epochs(epochs: float, rows: int, a_step: int, whole: int) -> None:
    assert steps_of(epochs, rows, a_step) == whole


@given(st.integers(1, 50), st.integers(1, 10_000), st.integers(1, 500))
def test_less_than_a_step_of_the_epochs_is_left(epochs: int, rows: int, a_step: int) -> None:
    assert 0 <= epochs * rows - steps_of(epochs, rows, a_step) * a_step < a_step


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_run_of_so_many_steps(world: Path, kind: str) -> None:
    """Of 8 rows one is too long: twice through 7 are 3 steps of 4 rows, and what goes by steps goes by these."""
    schedule = "actor.optimizer={schedule: linear, warmup_share: 0.34}"
    by_steps = run(world, kind, f"{kind}_1", schedule, "train.steps=3")
    by_epochs = run(world, kind, f"{kind}_1b", schedule, "train.steps=0", "train.epochs=2")
    assert steps(world, kind, "2") == 3
    for told in (by_steps, by_epochs):
        told.told[:] = [each for each in told.told if f"{kind}_1" not in str(each)]
    assert by_epochs.told == by_steps.told and len(by_steps.told) > 10
    names = [
        str(path.relative_to(world / "runs" / f"{kind}_1b")) for path in (world / "runs").glob(f"{kind}_1b/check*/*")
    ]
    assert names == ["checkpoints/step_000003"]


@pytest.mark.parametrize(
    ("kind", "own", "read"), [("train", train, "load_prompts"), ("sft", supervised, "load_supervised")]
)
def test_a_life_that_goes_on_does_not_count_the_rows_again(
    world: Path, monkeypatch: pytest.MonkeyPatch, kind: str, own: Any, read: str
) -> None:
    counted, lives, original = [], [], getattr(epochs, read)
    monkeypatch.setattr(epochs, read, lambda *given, **named: counted.append(given[0]) or original(*given, **named))

    def checked(recipe: Any, **_: Any) -> None:
        """In the place of what follows, of which the first life ends."""
        lives.append((recipe.train.steps, recipe.train.epochs))
        raise RewoundError("back") if len(lives) == 1 else UserError("enough")

    monkeypatch.setattr(own, "preflight" if kind == "train" else "preflight_supervised", checked)
    words = [f"run.name={kind}_again", "train.steps=0", "train.epochs=2"]
    with pytest.raises(UserError, match="enough"):
        if kind == "train":
            train.run_train(world / "train.yaml", words, False, False)
        else:
            supervised.run_supervised(KINDS["sft"], world / "sft.yaml", words, False, False)
    assert lives == [(3, None)] * 2 and len(counted) == 1


def test_rows_of_a_mix_count_where_their_set_has_a_share(world: Path) -> None:
    """Rows 1, 3, 5 and 7 are of set b, 2, 4 and 6 of a; 8 is too long."""
    assert steps(world, "train", "2", "data.mix={a: 3, b: 1}") == 14 // 4
    assert steps(world, "train", "4", "data.mix={a: 0, b: 1}") == 16 // 4
    assert steps(world, "sft", "3", "data.mix={a: 0, b: 1}") == 12 // 4
    assert steps(world, "dpo", "3", "data.mix={a: 1, b: 0}") == 9 // 4


def test_a_supervised_run_goes_on_with_its_shares_alone(world: Path) -> None:
    run(world, "sft", "shares", "data.mix={a: 3, b: 1}")
    with pytest.raises(UserError, match=r"data.mix was \{'a': 3.0, 'b': 1.0\} and is None"):
        run(world, "sft", "shares", "train.steps=4", resume=True)
    run(world, "sft", "shares", "data.mix={b: 1, a: 3}", "train.steps=4", resume=True)
    assert (world / "runs/shares/checkpoints/step_000004").is_dir()


def test_what_a_run_writes_down_has_steps(world: Path, tmp_path: Path) -> None:
    loaded, _ = found(load_recipe(world / "train.yaml", ["train.steps=0", "train.epochs=2"], Recipe), False, False)
    assert loaded.resolved["train"]["steps"] == 3 and "epochs" not in loaded.resolved["train"]
    (tmp_path / "recipe.yaml").write_text(dump_yaml(loaded.resolved))
    assert load_recipe(tmp_path / "recipe.yaml", [], Recipe).recipe == loaded.recipe


def test_the_start_says_the_steps_and_a_recipe_alone_says_why_not(world: Path) -> None:
    loaded = load_recipe(world / "train.yaml", ["train.steps=0", "train.epochs=2"], Recipe)
    assert plan_batches(loaded.recipe).describe().endswith("; steps: as train.epochs says")
    lines = preflight(with_steps(loaded).recipe).lines()
    assert (
        "; 3 steps, 6 optimizer steps" in lines[0]
        and "7 rows, 1 over the length limit dropped, 1.71 epochs" in lines[1]
    )


def test_less_than_a_step_is_refused(world: Path) -> None:
    with pytest.raises(
        UserError, match=r"train.epochs 0.5 of the 7 usable rows of .*prompts.jsonl is less than one step of "
    ):
        steps(world, "train", "0.5")
    with pytest.raises(UserError, match=r"lower train.batch_samples, or set train.steps"):
        steps(world, "sft", "0.5")


def test_a_warm_up_of_all_steps_is_refused_once_they_are_known(world: Path) -> None:
    words = ("train.steps=0", "train.epochs=2", "actor.optimizer.warmup_steps=6")
    with pytest.raises(UserError, match=r"the actor makes 6 optimizer steps\. Set it to at most 5"):
        run(world, "train", "warm", *words)
    with pytest.raises(UserError, match=r"the run has 3 steps\. Set it to at most 2"):
        run(world, "train", "warm", *words[:2], "algorithm.preset=ppo", "critic.warmup_steps=3")


def test_a_run_goes_on_with_more_epochs(world: Path) -> None:
    run(world, "sft", "longer", "train.steps=0", "train.epochs=2")
    run(world, "sft", "longer", "train.steps=0", "train.epochs=3", resume=True)
    assert (world / "runs/longer/checkpoints/step_000005").is_dir()
