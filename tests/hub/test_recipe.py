from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.convert.commands import run_convert
from megarl.convert.convert import Settings
from megarl.core.errors import UserError
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import load_prompts
from megarl.hub.recipe import TRAIN, localize
from megarl.launch.submit import submit_ray
from megarl.placement.cluster import make_cluster
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.reward import Classify
from megarl.recipe.save import PROVENANCE_FILE, RECIPE_FILE, save_recipe
from megarl.recipe.schema import Recipe
from megarl.run.plan import PlanOptions, run_plan
from megarl.run.preflight import preflight
from megarl.run.train import run_train
from tests.hub.conftest import CARD, MODEL, ROWS, parquet
from tests.support.dry.driver import run
from tests.support.stand_in_hub import StandInHub, ask_stand_in


def found(path: Path, *overrides: str, going_on: Path | None = None, skip: tuple[str, ...] = ()) -> Loaded[Recipe]:
    loaded = load_recipe(path, overrides)
    return localize(loaded, lambda folder: None, lambda line: None, run=going_on, skip=skip)


def test_names_become_files_and_the_run_keeps_names_and_commits(
    hub: StandInHub, recipe_file: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    loaded = localize(load_recipe(recipe_file), lambda folder: None, lines.append)
    checked = preflight(loaded.recipe, sources=loaded.sources)
    assert (checked.rows, checked.eval_rows) == (8, 2)
    [of_model], [of_rows] = (set(hub.commits[key]) for key in (("model", MODEL), ("dataset", ROWS)))
    assert f"model.path: {MODEL}, commit {of_model}, of the hub" in lines
    assert f"data.train: {ROWS}, commit {of_rows}, of the hub" in lines
    assert not [name for name in hub.downloads() if "socratic" in name]

    save_recipe(loaded, tmp_path / "run")
    kept = json.loads((tmp_path / "run" / PROVENANCE_FILE).read_text())["hub"]
    assert kept["model.path"] == {"name": MODEL, "revision": None, "commit": of_model}
    asked = len(hub.asked)
    again = load_recipe(tmp_path / "run" / RECIPE_FILE)
    assert str(again.recipe.model.path) == f"{MODEL}@{of_model}" and again.recipe.data.config == "main"
    assert found(tmp_path / "run" / RECIPE_FILE).recipe == loaded.recipe
    assert len(hub.asked) == asked  # a commit does not change


def test_a_run_that_goes_on_stays_with_its_commits(hub: StandInHub, recipe_file: Path, tiny: Path) -> None:
    first = found(recipe_file, "data.eval=null")
    save_recipe(first, Path("run"))
    hub.put_folder("model", MODEL, tiny, **{"README.md": b"another"})
    hub.put("dataset", ROWS, {"README.md": CARD.encode(), "main/train-0.parquet": parquet(50, 9)})
    assert found(recipe_file, "data.eval=null", going_on=Path("run")).recipe == first.recipe
    for overrides in ([], [f"model.path={MODEL}@main"]):
        changed = found(recipe_file, "data.eval=null", *overrides, going_on=Path("run") if overrides else None).recipe
        assert changed.model.path != first.recipe.model.path


def test_a_run_that_was_submitted_stays_with_the_commits_that_the_cluster_was_told(
    hub: StandInHub, recipe_file: Path, tiny: Path
) -> None:
    first = found(recipe_file, "data.eval=null")
    told = [f"{key}={name}" for key, name in first.names.items()]
    save_recipe(found(recipe_file, "data.eval=null", *told), Path("run"))  # as the job does
    hub.put_folder("model", MODEL, tiny, **{"README.md": b"another"})
    hub.put("dataset", ROWS, {"README.md": CARD.encode(), "main/train-0.parquet": parquet(50, 9)})
    assert found(recipe_file, "data.eval=null", going_on=Path("run")).recipe == first.recipe


def test_of_a_reward_model_behind_an_address_the_tokenizer_alone_is_fetched(
    hub: StandInHub, recipe_file: Path, tmp_path: Path, tiny: Path
) -> None:
    hub.put_folder("model", "own/liked", tiny)
    key = "reward.graders.liked.tokenizer"
    grader = "reward.graders={liked: {kind: classify, url: 'http://rm', tokenizer: own/liked}}"
    loaded = found(recipe_file, "data.final_answer=true", grader, "model.path=" + str(tiny))
    grader_now = loaded.recipe.reward.graders["liked"]
    assert isinstance(grader_now, Classify) and (grader_now.tokenizer / "tokenizer.json").is_file()
    assert "model.safetensors" not in hub.downloads()
    preflight(loaded.recipe, sources=loaded.sources)
    save_recipe(loaded, tmp_path / "run")
    [commit] = hub.commits["model", "own/liked"]
    assert json.loads((tmp_path / "run" / PROVENANCE_FILE).read_text())["hub"][key]["commit"] == commit
    assert f"own/liked@{commit}" in (tmp_path / "run" / RECIPE_FILE).read_text()
    assert found(tmp_path / "run" / RECIPE_FILE).recipe == loaded.recipe


def test_an_evaluation_leaves_the_rows_to_train_on_where_they_are(hub: StandInHub, recipe_file: Path) -> None:
    recipe = found(recipe_file, skip=(TRAIN,)).recipe
    assert str(recipe.data.train) == ROWS
    assert "test-00000-of-00001.parquet" in hub.downloads() and "train-00000-of-00002.parquet" not in hub.downloads()


def test_what_is_here_wins_also_a_data_set(hub: StandInHub, recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    for name, content in hub.commits["dataset", ROWS].popitem()[1].items():
        (tmp_path / ROWS / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ROWS / name).write_bytes(content)
    recipe = found(recipe_file).recipe
    assert (recipe.model.path, recipe.data.train) == (Path(MODEL), Path(ROWS) / "main" / "train-0000*-of-00002.parquet")
    assert hub.asked == []
    with pytest.raises(UserError, match=r"data\.train is own/grade-school: there is no configuration 'man'"):
        found(recipe_file, "data.config=man")


def test_what_needs_no_files_is_refused_before_any_is_fetched(hub: StandInHub, recipe_file: Path) -> None:
    (Path("runs") / "done" / "hf").mkdir(parents=True)
    for overrides in (["rollout.prompts_per_step=3", "actor.mini_batch_samples=4"], ["run.name=done"]):
        with pytest.raises(UserError):
            run_train(recipe_file, overrides, resume=False, go_on=False)
    assert hub.asked == []
    Path("other").mkdir()
    with pytest.raises(UserError, match=r"data\.train is own/grade-skool: there is no own/grade-skool here"):
        run_train(recipe_file, ["data.train=own/grade-skool"], resume=False, go_on=False)
    assert hub.downloads() == []


def test_a_whole_run_on_names(hub: StandInHub, recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    book = run(
        Recipe, recipe_file, ["critic.path=" + MODEL, "algorithm.preset=ppo", "data.final_answer=true"], tmp_path
    )
    folder = tmp_path / "home" / "hub" / "models--own--tiny" / "snapshots"
    assert {spec.folder.parent for spec in book.specs.values()} == {folder} and len(book.specs) == 2


def test_rows_of_several_files_have_answers_and_names_of_their_own(hub: StandInHub, recipe_file: Path) -> None:
    recipe = found(recipe_file, "data.final_answer=true").recipe
    prompts = load_prompts(recipe.data.train, load_tokenizer(recipe.model.path), recipe.data).prompts
    assert [prompt.answer for prompt in prompts] == [str(2 * n) for n in range(1, 9)]
    assert len({prompt.id for prompt in prompts}) == 8


def test_plan_convert_and_submit_take_names(
    hub: StandInHub,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = make_cluster("H100", 1, 2)
    run_plan(recipe_file, [], cluster, PlanOptions())
    assert hub.downloads() == ["config.json"]
    commit = hub.branches["model", MODEL]["main"]
    lines: list[str] = []
    absolute = f"run.dir={tmp_path}/runs"
    submit_ray(recipe_file, [absolute], "http://head", tmp_path, resume=False, dry_run=True, say=lines.append)
    assert f"model.path={MODEL}@{commit}" in lines[-1]  # the cluster has a cache of its own
    ask_stand_in(monkeypatch, hub.url, tmp_path / "home", offline=True)
    run_plan(recipe_file, [], cluster, PlanOptions())
    assert (
        run_convert("hf-to-mcore", Path(MODEL), tmp_path / "mcore", {}, None, Settings(False, False, 100), as_json=True)
        == 0
    )
    assert (tmp_path / "mcore" / "megarl.json").exists()
    capsys.readouterr()
