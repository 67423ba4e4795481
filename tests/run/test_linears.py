"""`actor.lora.targets: all` stands for the linears that the recipe's model has, wherever its model is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.placement.cluster import make_cluster
from megarl.recipe.load import KINDS, load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.begin import found
from megarl.run.model_check import with_linears
from megarl.run.plan import PlanOptions, run_plan
from megarl.run.preflight import preflight
from tests.support.dry import driver
from tests.support.dry.world import write_world

DENSE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT = ("linear_proj", "linear_fc1", "linear_fc2", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    return root


@pytest.mark.parametrize("given", ["all", "[all]"])
@pytest.mark.parametrize(
    ("model", "linears"),
    [("dense", DENSE), ("moe", DENSE[:2]), ("latent", (*LATENT, "linear_kv_up_proj"))],
)
def test_all_are_those_that_the_model_has_outside_of_routed_experts(
    world: Path, model: str, linears: tuple[str, ...], given: str
) -> None:
    loaded = load_recipe(world / "train.yaml", [f"model.path={world / model}", f"actor.lora.targets={given}"], Recipe)
    filled = with_linears(loaded)
    assert filled.recipe.actor.lora is not None and filled.recipe.actor.lora.targets == linears
    assert with_linears(loaded, load_model_config(world / model)) == filled
    assert with_linears(filled) is filled


@pytest.mark.parametrize("kind", ["train", "sft", "dpo"])
def test_it_is_the_run_with_all_of_them_named(world: Path, kind: str) -> None:
    named, every = (
        driver.run(
            KINDS[kind], world / f"{kind}.yaml", [f"run.name={kind}{at}", f"actor.lora.targets={targets}"], world
        )
        for at, targets in enumerate(("[linear_fc2, linear_fc1, linear_qkv, linear_proj]", "all"))
    )
    [one], [other] = ([each.lora for each in book.specs.values() if each.lora] for book in (named, every))
    assert sorted(one.targets) == sorted(other.targets) == sorted(DENSE)


def test_what_a_run_writes_down_names_them_and_the_plan_takes_them(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, _ = found(
        load_recipe(world / "train.yaml", ["run.name=new", "actor.lora.targets=all"], Recipe), False, False
    )
    assert loaded.resolved["actor"]["lora"]["targets"] == list(DENSE)
    run_plan(world / "train.yaml", ["actor.lora.targets=all"], make_cluster("H100", 1, 1), PlanOptions(top=1))
    few = capsys.readouterr().out
    run_plan(
        world / "train.yaml",
        [f"actor.lora.targets=[{', '.join(DENSE)}]"],
        make_cluster("H100", 1, 1),
        PlanOptions(top=1),
    )
    assert few == capsys.readouterr().out


def test_another_word_for_it_is_answered_with_ours(world: Path) -> None:
    with pytest.raises(
        UserError, match=r"all-linear cannot have LoRA adapters: choose among linear_qkv, .*, or set all"
    ):
        preflight(load_recipe(world / "train.yaml", ["actor.lora.targets=[all-linear]"], Recipe).recipe)
