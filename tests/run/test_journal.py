"""Whose journal it is: what may differ where a run goes on, and what is refused; what checkpoints make needless."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.load import Loaded
from megarl.recipe.save import RECIPE_FILE
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml
from megarl.report.history import METRICS_FILE
from megarl.rollout.journal import JOURNAL, steps_of
from megarl.run.journal import (
    MADE_WITH,
    begin_journal,
    changes,
    check_journal,
    evaluations_before,
    made_with,
    trim_journal,
)
from megarl.training.run_checkpoints import Committed
from tests.rollout.test_collector import make_recipe

ROWS = {"ids": "1a", "answers": "2b"}  # what training rows say


def recipe_of(folder: Path, **sections: dict[str, Any]) -> Recipe:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "model" / "config.json").write_text("{}")
    return make_recipe(folder, **sections)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    begin_journal(recipe_of(tmp_path), ROWS, keeps=False)
    folder = tmp_path / "run" / JOURNAL
    for step in (2, 3, 4):
        (folder / f"step_{step:06d}-aa.sqlite").touch()
    return folder


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 9, "save_every": 3}},
        {"deadlines": {"start_s": 5.0}, "report": {"tensorboard": False}},
        {"rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8, "servers": 3}},
        {"eval": {"every": 2}},
        {"cluster": {"max_recoveries": 9, "spares": 1}},
        {"train": {"steps": 1, "max_rewinds": 9}},
        {"reward": {"workers": 3, "max_failed_share": 0.9}},
        {"actor": {"micro_batch_tokens": 64, "optimizer": {"on_bad_gradient": "skip"}}},
        {"algorithm": {"normalize_std": False, "on_logprob_diff": "rewind"}},
    ],
)
def test_what_changes_no_sample_may_change(tmp_path: Path, journal: Path, sections: dict[str, Any]) -> None:
    check_journal(recipe_of(tmp_path, **sections), ROWS)
    assert steps_of(journal) == [2, 3, 4]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"run": {"seed": 7}}, "run.seed was 1 and is 7"),
        ({"algorithm": {"kl_coef": 0.5}}, "algorithm.kl_coef was 0.0 and is 0.5"),
        ({"actor": {"optimizer": {"schedule": "cosine"}}}, "actor.optimizer.schedule was 'constant' and is 'cosine'"),
    ],
)
def test_what_changes_samples_or_learning_is_refused(
    tmp_path: Path, journal: Path, sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told.replace(".", r"\.")) as caught:
        check_journal(recipe_of(tmp_path, **sections), ROWS)
    assert "--discard-journal" in str(caught.value) and str(journal) in str(caught.value)
    begin_journal(recipe_of(tmp_path, **sections), ROWS, keeps=False)
    assert not steps_of(journal)


def test_a_teacher_may_be_anywhere_and_has_to_be_the_same(tmp_path: Path) -> None:
    """By its log-probs of a text: 0.15 apart on average at most."""
    recipe = recipe_of(tmp_path)
    begin_journal(recipe, ROWS, (-1.0, -2.0, -3.0, -4.0), keeps=False)
    check_journal(recipe, ROWS, (-1.0, -2.0, -3.0, -4.59))
    check_journal(recipe, ROWS)  # behind no address any more: teacher.path says so
    with pytest.raises(UserError, match=r"serve another teacher: .* are 0\.20 from .*\n.*--discard-journal"):
        check_journal(recipe, ROWS, (-1.4, -2.0, -3.0, -3.6))
    begin_journal(recipe, ROWS, keeps=True)
    check_journal(recipe, ROWS, (-1.0,))  # one of an older megarl says nothing of it


def test_a_grader_may_be_at_another_address_and_be_asked_otherwise(tmp_path: Path) -> None:
    """Its server may be on another machine in every job; what it counts for is what samples are worth."""

    def served(**changed: Any) -> Recipe:
        grader = {"kind": "remote", "url": "http://10.0.0.1:8000", "weight": 1.0, **changed}
        return recipe_of(tmp_path, reward={"fn": None, "graders": {"served": grader}})

    moved = {
        "url": "http://10.0.0.9:8001",
        "timeout_s": 9.0,
        "retries": 9,
        "retry_for_s": 9.0,
        "concurrency": 2,
        "batch": 4,
        "key_env": "A_KEY",
    }
    begin_journal(served(), ROWS, keeps=False)
    check_journal(served(**moved), ROWS)
    written = tmp_path / "run" / JOURNAL / MADE_WITH
    old = json.loads(written.read_text()) | {"reward.graders.served.url": "http://10.0.0.1:8000"}
    written.write_text(json.dumps(old))  # as of an older megarl
    check_journal(served(**moved), ROWS)
    with pytest.raises(UserError, match=r"reward\.graders\.served\.weight was 1\.0 and is 0\.5"):
        check_journal(served(**moved, weight=0.5), ROWS)


def test_a_journal_of_before_a_key_was_there_is_gone_on_with_where_the_key_is_at_its_default(tmp_path: Path) -> None:
    """As written before routers could be frozen, when whitening, which this recipe does not read, had another default."""
    recipe = recipe_of(tmp_path)
    begin_journal(recipe, ROWS, keeps=False)
    written = tmp_path / "run" / JOURNAL / MADE_WITH
    old = json.loads(written.read_text()) | {"algorithm.whiten": True}
    del old["actor.optimizer.freeze_router"]
    written.write_text(json.dumps(old))
    check_journal(recipe, ROWS)
    with pytest.raises(UserError, match=r"actor\.optimizer\.freeze_router was None and is True"):
        check_journal(recipe_of(tmp_path, actor={"optimizer": {"freeze_router": True}}), ROWS)
    with pytest.raises(UserError, match=r"algorithm\.correction\.kind was None and is 'truncate'"):
        check_journal(recipe_of(tmp_path, algorithm={"correction": {}}), ROWS)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("optimizer", "counts"),
    [
        ({}, False),
        ({"schedule": "constant", "warmup_steps": 1}, False),
        ({"schedule": "constant", "warmup_share": 0.5}, True),
        ({"schedule": "cosine"}, True),
    ],
)
def test_how_long_a_run_is_counts_where_a_rate_depends_on_it(
    tmp_path: Path, role: str, optimizer: dict[str, Any], counts: bool
) -> None:
    """Half of 4 steps of warm-up: the first has 1/2 of the rate; of 8 steps it has 1/4."""

    def recipe(steps: int) -> Recipe:
        sections = {"critic": {}, role: {"optimizer": optimizer}, "train": {"steps": steps}}
        return recipe_of(tmp_path, algorithm={"advantage": "gae"}, **sections)

    begin_journal(recipe(4), ROWS, keeps=False)
    with pytest.raises(UserError, match=r"train\.steps was 4 and is 8") if counts else nullcontext():
        check_journal(recipe(8), ROWS)
    written = tmp_path / "run" / JOURNAL / MADE_WITH
    made = json.loads(written.read_text())
    written.write_text(json.dumps({name: made[name] for name in made if name != "train.steps"}))
    check_journal(recipe(4), ROWS)  # one of an older megarl may not say it


def test_a_reward_that_was_written_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "my_reward_of_the_journal.py"
    code.write_text("def score(prompt, response, answer, metadata):\n    return 1.0\n")
    recipe = recipe_of(tmp_path, reward={"fn": "my_reward_of_the_journal:score"})
    begin_journal(recipe, ROWS, keeps=False)
    check_journal(recipe, ROWS)
    code.write_text(code.read_text().replace("1.0", "2.0"))
    with pytest.raises(UserError, match="the file of my_reward_of_the_journal:score was edited"):
        check_journal(recipe, ROWS)


def test_other_weights_are_refused(tmp_path: Path, journal: Path) -> None:
    recipe = recipe_of(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"longer weights")
    with pytest.raises(UserError, match="model's files was "):
        check_journal(recipe, ROWS)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"another")  # as large
    with pytest.raises(UserError, match="model's fingerprint was ") as caught:
        check_journal(recipe, ROWS)
    assert "model's files" not in str(caught.value)


def test_the_model_may_be_in_another_folder_as_long_as_it_is_the_same(tmp_path: Path, journal: Path) -> None:
    copy = shutil.copytree(recipe_of(tmp_path).model.path, tmp_path / "copy")
    moved = recipe_of(tmp_path, model={"path": str(copy)})
    check_journal(moved, ROWS)
    made = json.loads((journal / MADE_WITH).read_text())
    (journal / MADE_WITH).write_text(json.dumps({name: made[name] for name in made if "fingerprint" not in name}))
    check_journal(recipe_of(tmp_path), ROWS)  # one of an older megarl says nothing of it
    with pytest.raises(UserError, match=r"model\.path was "):
        check_journal(moved, ROWS)


OTHER_MODELS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"advantage": "gae"}},
    "reward_model": {},
    "teacher": {"algorithm": {"policy_loss": "distill"}},
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_weights_of_any_model_that_is_learned_from_are_refused(tmp_path: Path, name: str) -> None:
    """What they say of samples is not written down: steps that were done would be learned otherwise."""
    folder = shutil.copytree(recipe_of(tmp_path).model.path, tmp_path / name)

    def recipe(path: Path) -> Recipe:
        return recipe_of(tmp_path, **{name: {"path": str(path)}}, **OTHER_MODELS[name])

    begin_journal(recipe(folder), ROWS, keeps=False)
    moved = recipe(shutil.copytree(folder, tmp_path / "moved"))
    check_journal(moved, ROWS)
    assert changes(tmp_path / "run", recipe(folder), recipe(folder)) == []
    (folder / "model.safetensors").write_bytes(b"another")  # as large
    [line] = changes(tmp_path / "run", recipe(folder), recipe(folder))
    assert line.startswith(f"  {name}'s fingerprint was ")
    with pytest.raises(UserError, match=rf"{name}'s fingerprint was ") as caught:
        check_journal(recipe(folder), ROWS)
    assert "model's files" not in str(caught.value) and "path" not in str(caught.value).replace(str(tmp_path), "")
    with pytest.raises(UserError, match=rf"{name}\.path was .*{name}"):
        check_journal(recipe_of(tmp_path, **OTHER_MODELS[name]), ROWS)
    written = tmp_path / "run" / JOURNAL / MADE_WITH
    made = json.loads(written.read_text())
    written.write_text(json.dumps({key: made[key] for key in made if key != f"{name}'s fingerprint"}))
    check_journal(recipe(folder), ROWS)  # one of an older megarl says nothing of it
    with pytest.raises(UserError, match=rf"{name}\.path was "):
        check_journal(moved, ROWS)


def test_a_model_that_is_gone_has_no_fingerprint(tmp_path: Path) -> None:
    """A replay may have another in its place, and says that the path is another."""
    gone = recipe_of(tmp_path, teacher={"path": str(tmp_path / "gone")}, **OTHER_MODELS["teacher"])
    assert "teacher's fingerprint" not in made_with(gone) and "model's fingerprint" in made_with(gone)
    half = shutil.copytree(recipe_of(tmp_path).model.path, tmp_path / "gone")
    for weights in half.glob("*.safetensors"):  # as of a cache that was cleared
        weights.unlink()
        weights.symlink_to(tmp_path / "nowhere")
    assert any(half.glob("*.safetensors")) and "teacher's fingerprint" not in made_with(gone)


def test_a_new_run_begins_with_nothing(tmp_path: Path, journal: Path) -> None:
    begin_journal(recipe_of(tmp_path), ROWS, keeps=True)
    assert steps_of(journal) == [2, 3, 4]
    begin_journal(recipe_of(tmp_path), ROWS, keeps=False)
    assert steps_of(journal) == []
    begin_journal(recipe_of(tmp_path, train={"steps": 1, "journal": False}), ROWS, keeps=False)
    assert not journal.exists()


def test_other_rows_are_refused_where_no_checkpoint_knows_of_them(tmp_path: Path, journal: Path) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(UserError, match=r"answers of the rows of data\.train was '2b' and is '3c'") as caught:
        check_journal(recipe, {**ROWS, "answers": "3c"})
    assert "ids of" not in str(caught.value)
    made = json.loads((journal / MADE_WITH).read_text())
    (journal / MADE_WITH).write_text(json.dumps({name: made[name] for name in made if "of the rows" not in name}))
    check_journal(recipe, {**ROWS, "answers": "3c"})  # one of an older megarl says nothing of rows


def test_rows_may_be_in_another_folder_as_long_as_they_say_the_same(tmp_path: Path, journal: Path) -> None:
    moved = recipe_of(tmp_path, data={"train": str(tmp_path / "moved" / "train.jsonl")})
    check_journal(moved, ROWS)
    with pytest.raises(UserError, match=r"answers of the rows of data\.train was"):
        check_journal(moved, {**ROWS, "answers": "3c"})
    with pytest.raises(UserError, match=r"data\.train was "):
        check_journal(moved, {})  # nobody knows what they say


@pytest.mark.parametrize("name", [None, "own/rows@5e0c91d2", "rows"])
def test_evaluations_stand_as_long_as_the_held_out_rows_are_the_same(tmp_path: Path, name: str | None) -> None:
    """name: what the recipe has in the place of the file: of a data set on the hub, or of a folder."""
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("a row\n")
    recipe = recipe_of(tmp_path, data={"eval": str(rows)})
    loaded = Loaded(recipe, {}, {}, tmp_path / "recipe.yaml", (), {"data.eval": name} if name else {})
    begin_journal(recipe, ROWS, keeps=False)
    (recipe.run.folder / RECIPE_FILE).write_text(dump_yaml(loaded.with_recipe(recipe).resolved))
    (recipe.run.folder / METRICS_FILE).write_text('{"step": 2, "eval/accuracy": 0.5}\n')
    assert evaluations_before(loaded)[2].accuracy == 0.5
    rows.write_text("another\n")
    check_journal(recipe, ROWS)
    assert evaluations_before(loaded) == {}
    rows.write_text("a row\n")
    assert evaluations_before(replace(loaded, names={"data.eval": "own/rows@another"})) == {}


def test_evaluations_of_a_life_without_a_journal_are_of_weights_that_the_journal_does_not_lead_to(
    tmp_path: Path,
) -> None:
    """It came to no checkpoint: whoever goes on with the journal of the life before it makes other weights."""
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("a row\n")
    recipe = recipe_of(tmp_path, data={"eval": str(rows)})
    loaded = Loaded(recipe, {}, {}, tmp_path / "recipe.yaml", (), {})
    begin_journal(recipe, ROWS, keeps=False)
    (recipe.run.folder / METRICS_FILE).write_text('{"step": 2, "eval/accuracy": 0.5}\n')
    found = []
    for journal in (True, False):
        before = recipe_of(tmp_path, data={"eval": str(rows)}, train={"steps": 1, "journal": journal})
        (recipe.run.folder / RECIPE_FILE).write_text(dump_yaml(loaded.with_recipe(before).resolved))
        found.append(sorted(evaluations_before(loaded)))
    assert found == [[2], []]


@pytest.mark.parametrize("content", [b"\xff\x00", b"", b"older_key: 1\n"])
def test_a_broken_recipe_in_the_runs_folder_may_be_removed(tmp_path: Path, content: bytes) -> None:
    recipe = recipe_of(tmp_path)
    loaded = Loaded(recipe, {}, {}, tmp_path / "recipe.yaml", (), {})
    recipe.run.folder.mkdir()
    (recipe.run.folder / METRICS_FILE).write_text('{"step": 2, "eval/accuracy": 0.5}\n')
    written = recipe.run.folder / RECIPE_FILE
    written.write_bytes(content)
    with pytest.raises(UserError, match=rf"{written}(.|\n)*It may be removed: steps that are made again are then eval"):
        evaluations_before(loaded)
    written.unlink()
    assert evaluations_before(loaded) == {}


def test_a_journal_behind_a_link_is_begun_anew_as_well(tmp_path: Path, journal: Path) -> None:
    elsewhere = journal.rename(tmp_path / "elsewhere")
    journal.symlink_to(elsewhere)
    begin_journal(recipe_of(tmp_path), ROWS, keeps=False)
    assert [path.name for path in elsewhere.iterdir()] == [MADE_WITH] and journal.is_symlink()


def test_a_journal_that_cannot_be_removed_is_told_and_not_gone_on_with(tmp_path: Path, journal: Path) -> None:
    (journal / "step_000005-aa.sqlite").mkdir()
    with pytest.raises(UserError, match=r"cannot be written to: .*step_000005"):
        begin_journal(recipe_of(tmp_path), ROWS, keeps=False)


def test_what_only_looks_like_a_function_has_no_source(tmp_path: Path) -> None:
    """A judge's name at its server, texts that end a response."""
    judge = {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "qwen2.5:7b"}
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8}
    found = made_with(
        recipe_of(tmp_path, reward={"fn": None, "graders": {"j": judge}}, rollout={**sizes, "stop": ["no.such:thing"]})
    )
    assert not [name for name in found if name.startswith("source of")]


@pytest.mark.parametrize(("waiting", "left"), [([], [4]), ([[0, 5, 0], [7, 3, 2]], [3, 4])])
def test_what_no_checkpoint_needs_is_forgotten(
    tmp_path: Path, journal: Path, waiting: list[list[int]], left: list[int]
) -> None:
    """The older of two checkpoints is of step 3; a group that was under way then was meant for that step."""
    kept = [Committed(tmp_path, step, {"data": {"waiting": waiting, "decisions": 2 * step}}) for step in (3, 4)]
    told: list[Any] = []
    trim_journal(recipe_of(tmp_path, train={"steps": 1, "journal_keep": "all"}), kept, lambda *each: told.append(each))
    assert steps_of(journal) == [2, 3, 4] and not told
    trim_journal(recipe_of(tmp_path), kept, lambda *each: told.append(each))
    assert steps_of(journal) == left and told == [(6, waiting)]
    trim_journal(recipe_of(tmp_path), [], lambda *each: told.append(each))
    assert steps_of(journal) == left and len(told) == 1


@pytest.mark.parametrize(("numbers", "told"), [((9, None, 4), [4]), ((None,), []), ((0, 3), [3])])
def test_decisions_are_forgotten_by_the_numbers_that_the_journal_has_now(
    tmp_path: Path, numbers: tuple[int | None, ...], told: list[int]
) -> None:
    """Behind a life without a journal they begin anew; a checkpoint from before has a larger one, of others."""
    kept = [Committed(tmp_path, step, {"data": {"decisions": each}}) for step, each in enumerate(numbers, 1)]
    found: list[int] = []
    trim_journal(recipe_of(tmp_path), kept, lambda number, _: found.append(number))
    assert found == told


def test_the_code_of_environments_and_tools_is_a_part_of_what_samples_are_made_with(tmp_path: Path) -> None:
    agent = {"environment": "tests.agents.test_check:Whole.within", "tools": ["tests.agents.toolkit:multiply"]}
    found = made_with(recipe_of(tmp_path, agent=agent))
    named = {name for name in found if name.startswith("source of tests.agents")}
    assert named == {"source of tests.agents.test_check:Whole.within", "source of tests.agents.toolkit:multiply"}
