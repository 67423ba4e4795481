"""What a run cannot go on with from its checkpoint is refused before anything is started, written or thrown away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from megarl.run import supervised, train
from tests.support.dry import driver
from tests.support.dry.actors import Book
from tests.support.dry.world import write_world

TWO_STEPS = ("cluster.platform=cpu", "train.save_every=1", "train.steps=2")
ADAPTED = "actor.lora={rank: 4, alpha: 8, targets: [linear_qkv, linear_proj]}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    driver.run(Recipe, root / "train.yaml", ("run.name=plain", *TWO_STEPS), root)
    driver.run(Recipe, root / "train.yaml", ("run.name=critic", "algorithm.preset=ppo", *TWO_STEPS), root)
    driver.run(Recipe, root / "train.yaml", ("run.name=adapted", ADAPTED, *TWO_STEPS), root)
    driver.run(SftRecipe, root / "sft.yaml", ("run.name=sft", ADAPTED, *TWO_STEPS), root)
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(root: Path, kind: type[Recipe] | type[SftRecipe], name: str, *overrides: str) -> str:
    """What is said; nothing in the run's folder is another."""
    words = (f"run.name={name}", *TWO_STEPS, "train.steps=3", *overrides)
    folder = root / "runs" / name
    before = files(folder)
    with pytest.raises(UserError) as refusal:
        driver.run(kind, root / ("sft.yaml" if kind is SftRecipe else "train.yaml"), words, root, resume=True)
    assert files(folder) == before
    return str(refusal.value)


def test_another_model_at_its_place_is_named(world: Path) -> None:
    """It would be the reference, or what adapters stand upon; the actor's weights are the checkpoint's."""
    for kind, name, words in ((Recipe, "plain", ()), (SftRecipe, "sft", (ADAPTED,))):
        said = refused(world, kind, name, *words, f"model.path={world / 'dense2'}")
        assert "dense2 (model.path) is another model than it began with" in said


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("plain", ["run.seed=9"], "run.seed was 1 and is 9"),
        ("plain", ["data.shuffle=false"], "data.shuffle was True and is False"),
        ("plain", ["data.mix={a: 1, b: 1}"], "data.mix was None and is {'a': 1.0, 'b': 1.0}"),
        ("plain", ["data.chat_template_kwargs={opening: c}"], "options of the chat template of the rows of data.train"),
        ("plain", ["actor.optimizer.name=sgd"], "actor.optimizer.name was 'adam' and is 'sgd'"),
        ("plain", [ADAPTED], "actor.lora was None and is {"),
        (
            "critic",
            ["algorithm.preset=ppo", "critic.optimizer.name=sgd"],
            "critic.optimizer.name was 'adam' and is 'sgd'",
        ),
        ("adapted", [], "and is None"),
        ("adapted", [ADAPTED.replace("rank: 4", "rank: 8")], "'rank': 4, 'alpha': 8.0"),
        ("adapted", [ADAPTED.replace("alpha: 8", "alpha: 16")], "'alpha': 16.0"),
        ("adapted", [ADAPTED.replace(", linear_proj", "")], "'targets': ['linear_qkv']}"),
    ],
)
def test_a_resume_with_others_is_refused_and_nothing_is_touched(
    name: str, overrides: list[str], said: str, world: Path
) -> None:
    message = refused(world, Recipe, name, *overrides)
    assert said in message and "Resume with what it was made with" in message and "step_000002" in message


def test_so_it_is_where_the_journal_would_be_thrown_away(world: Path) -> None:
    before = files(world / "runs" / "plain")
    words = ["run.name=plain", *TWO_STEPS, "train.steps=3", "run.seed=9"]
    with driver.stage(Book(), world), pytest.raises(UserError, match=r"run\.seed was 1 and is 9"):
        train.run_train(world / "train.yaml", words, resume=True, go_on=False, discard_journal=True)
    assert files(world / "runs" / "plain") == before


def test_a_journal_is_thrown_away_by_nobody_but_the_life_that_has_the_folder(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are started at once look at the folder before either has it."""
    before = files(world / "runs" / "plain")
    assert any(name.startswith("journal/") for name in before)

    def other_was_first(folder: Path) -> None:
        raise UserError("in use")

    monkeypatch.setattr("megarl.run.begin.locked", other_was_first)
    words = ["run.name=plain", *TWO_STEPS, "train.steps=3"]
    with driver.stage(Book(), world), pytest.raises(UserError, match="in use"):
        train.run_train(world / "train.yaml", words, resume=True, go_on=False, discard_journal=True)
    assert files(world / "runs" / "plain") == before


def test_supervised_runs_are_looked_at_as_well(world: Path) -> None:
    said = refused(world, SftRecipe, "sft", "run.seed=9", "actor.optimizer.name=sgd")
    for each in ("run.seed was 1 and is 9", "actor.optimizer.name was 'adam'", "actor.lora was {"):
        assert each in said


def test_rows_that_were_added_are_counted(world: Path) -> None:
    rows = (world / "demonstrations.jsonl").read_text().splitlines()
    more = world / "more.jsonl"
    more.write_text("\n".join([*rows, rows[0]]) + "\n")
    said = refused(world, SftRecipe, "sft", ADAPTED, f"data.train={more}")
    assert f"rows of data.train was {len(rows) - 1} and is {len(rows)}" in said and "actor.lora" not in said


@pytest.mark.parametrize(
    ("kind", "name", "file", "key", "said"),
    [
        (Recipe, "plain", "prompts", "answer", ["answers of the rows of data.train are others"]),
        (SftRecipe, "sft", "demonstrations", "messages", ["texts of the rows of data.train are others"]),
    ],
)
def test_as_many_rows_that_say_something_else_are_refused(
    kind: type[Recipe] | type[SftRecipe], name: str, file: str, key: str, said: list[str], world: Path
) -> None:
    first, *rest = (world / f"{file}.jsonl").read_text().splitlines()
    other = world / "other" / f"{file}.jsonl"
    other.parent.mkdir(exist_ok=True)
    value = json.loads(first).get(key)
    said_now = [{**value[0], "content": "12345"}, *value[1:]] if isinstance(value, list) else "12345"
    other.write_text("\n".join([json.dumps({**json.loads(first), key: said_now}), *rest]) + "\n")
    told = refused(world, kind, name, *([ADAPTED] if name == "sft" else []), f"data.train={other}")
    assert [line.strip() for line in told.splitlines() if line.startswith("  ")] == said


def test_what_makes_no_other_run_is_gone_on_with(world: Path) -> None:
    same = ADAPTED.replace("[linear_qkv, linear_proj]", "[linear_proj, linear_qkv]")
    more = ("actor.optimizer.lr=0.5", "train.save_every=2")
    words = ("run.name=adapted", same, *TWO_STEPS, "train.steps=3", *more)
    book = driver.run(Recipe, world / "train.yaml", (*words, "train.journal=false"), world, resume=True)
    assert [each for each in book.told if each[0] == "load"]


@pytest.mark.parametrize("gone", [["checkpoints"], ["checkpoints", "hf"]])
def test_a_start_over_that_is_refused_has_forgotten_nothing(gone: list[str], world: Path) -> None:
    """Without a checkpoint `--continue` begins anew; a model that is there is a run's all the same."""
    name = f"over_{len(gone)}"
    driver.run(SftRecipe, world / "sft.yaml", (f"run.name={name}", *TWO_STEPS), world)
    folder = world / "runs" / name
    (folder / "hf").mkdir(exist_ok=True)
    for each in gone:
        (folder / each).rename(world / f"{name}_{each}")
    before = files(folder)
    wrong = ["data.train=nowhere.jsonl"] if "hf" in gone else []
    said = "nowhere.jsonl" if wrong else "already holds a run"
    words = [f"run.name={name}", *TWO_STEPS, *wrong]
    with driver.stage(Book(), world), pytest.raises(UserError, match=said):
        supervised.run_supervised(SftRecipe, world / "sft.yaml", words, resume=False, go_on=True)
    assert files(folder) == before and "metrics.jsonl" in before


def test_a_start_over_forgets_what_came_to_no_checkpoint(world: Path) -> None:
    name = "anew"
    driver.run(SftRecipe, world / "sft.yaml", (f"run.name={name}", *TWO_STEPS), world)
    folder = world / "runs" / name
    (folder / "checkpoints").rename(world / "anew_checkpoints")
    (folder / "metrics.jsonl").write_text("{}\n")
    with driver.stage(Book(), world):
        supervised.run_supervised(
            SftRecipe, world / "sft.yaml", [f"run.name={name}", *TWO_STEPS], resume=False, go_on=True
        )
    assert "{}" not in (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("actor.optimizer.momentum=0.9",), "actor.optimizer.momentum was 0.0 and is 0.9"),
        (("model.dtype=bfloat16",), "model.dtype was 'float32' and is 'bfloat16'"),
    ],
)
def test_a_state_that_the_optimizer_has_not_got_is_named(overrides: tuple[str, ...], said: str, world: Path) -> None:
    words = ("run.name=sgd", "actor.optimizer.name=sgd", *TWO_STEPS)
    if not (world / "runs" / "sgd").exists():
        driver.run(SftRecipe, world / "sft.yaml", words, world)
    message = refused(world, SftRecipe, "sgd", "actor.optimizer.name=sgd", *overrides)
    assert [line.strip() for line in message.splitlines() if line.startswith("  ")] == [said]


def test_routers_that_were_frozen_have_no_state_to_learn_from(world: Path) -> None:
    experts, frozen = f"model.path={world / 'moe'}", "actor.optimizer.freeze_router=true"
    driver.run(SftRecipe, world / "sft.yaml", ("run.name=frozen", experts, frozen, *TWO_STEPS), world)
    assert "actor.optimizer.freeze_router was True and is False" in refused(world, SftRecipe, "frozen", experts)


def test_another_model_at_the_critics_place_is_named(world: Path) -> None:
    """Its weights are the checkpoint's, and would be put through another model's layers."""
    config = json.loads((world / "scored" / "config.json").read_text())
    shutil.copytree(world / "scored", world / "turned")
    turned = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    (world / "turned" / "config.json").write_text(json.dumps(turned))
    words = ("algorithm.preset=ppo", f"critic.path={world / 'turned'}")
    said = refused(world, Recipe, "critic", *words)
    assert f"{world / 'turned'} (critic.path) is another model than it began with" in said
