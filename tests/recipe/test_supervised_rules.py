from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.batch import plan_batches
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import load_recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe


@pytest.mark.parametrize(
    ("given", "mends"),
    [
        (["eval.before=false"], ["data.eval=held_out.jsonl"]),
        (["eval.every=5"], ["data.eval=held_out.jsonl"]),
        (["dpo.loss=ipo", "dpo.label_smoothing=0.1"], ["dpo.loss=sigmoid"]),
        (["dpo.loss=hinge", "dpo.label_smoothing=0.1"], ["dpo.loss=robust"]),
        (["dpo.loss=apo_zero", "dpo.margin=0.5"], ["dpo.loss=apo_down"]),
        (["dpo.loss=simpo", "dpo.length_normalized=true"], ["dpo.loss=ipo"]),
        (["dpo.loss=orpo", "dpo.sft_coef=0.5"], ["dpo.loss=simpo"]),
        (["actor.lora={}", "reference.offload=[params]"], ["actor.lora=null"]),
        (["dpo.loss=simpo", "reference.offload=[params]"], ["dpo.loss=sigmoid"]),
        (["dpo.loss=orpo", "reference.parallel={}"], ["dpo.loss=sigmoid"]),
        (["reference.refresh_every=2"], []),
        (["deadlines.sync_s=2.0"], []),
        (["deadlines.answer_s=2.0"], []),
    ],
)
def test_a_key_that_nothing_reads_is_refused_until_it_counts(
    dpo_file: Path, given: list[str], mends: list[str]
) -> None:
    key = given[-1].partition("=")[0]
    with pytest.raises(UserError) as caught:
        load_recipe(dpo_file, given, DpoRecipe)
    assert f"`{key}` (on the command line) is read by nothing in this configuration" in str(caught.value)
    if mends:
        assert load_recipe(dpo_file, given + mends, DpoRecipe)


@pytest.mark.parametrize("kind", [SftRecipe, RmRecipe])
def test_held_out_rows_are_for_every_kind(sft_file: Path, rm_file: Path, kind: Any) -> None:
    file = rm_file if kind is RmRecipe else sft_file
    with pytest.raises(UserError, match=r"`eval\.every`.*set data\.eval to a file"):
        load_recipe(file, ["eval.every=5"], kind)


BEST = ("data.eval=held_out.jsonl", "eval.every=2", "train.save_every=2")


@pytest.mark.parametrize(
    "metric", ["rm/eval_score", "dpo/eval_margin", "kto/eval_kl", "sft/eval_loss", "eval/accuracy"]
)
def test_the_best_is_known_by_what_this_kind_of_run_writes(
    sft_file: Path, rm_file: Path, dpo_file: Path, kto_file: Path, metric: str
) -> None:
    files: dict[str, tuple[Path, Any]] = {
        "sft": (sft_file, SftRecipe),
        "rm": (rm_file, RmRecipe),
        "dpo": (dpo_file, DpoRecipe),
        "kto": (kto_file, KtoRecipe),
    }
    for name, (file, kind) in files.items():
        given = [*BEST, f"train.keep_best={{metric: {metric}}}"]
        if metric.startswith(name):
            assert load_recipe(file, given, kind)
            continue
        with pytest.raises(
            UserError, match=rf"{metric} is no metric that this run writes.*Name one of {name}/eval_loss"
        ):
            load_recipe(file, given, kind)


def test_a_reference_under_adapters_has_no_layout_of_its_own(dpo_file: Path) -> None:
    with pytest.raises(UserError, match=r"Remove reference\.parallel"):
        load_recipe(dpo_file, ["actor.lora={}", "reference.parallel.tp=1"], DpoRecipe)


def test_the_reference_has_a_layout(dpo_file: Path, rm_file: Path) -> None:
    recipe = load_recipe(dpo_file, ["cluster.devices=2", "reference.parallel.tp=2"], DpoRecipe).recipe
    assert {role: layout.tp for role, layout in role_layouts(recipe).items()} == {"actor": 1, "reference": 2}
    for loss in ("simpo", "orpo"):
        assert role_layouts(load_recipe(dpo_file, [f"dpo.loss={loss}"], DpoRecipe).recipe).keys() == {"actor"}
    assert role_layouts(load_recipe(rm_file, [], RmRecipe).recipe).keys() == {"actor"}


@pytest.mark.parametrize("value", ["0.5", "-0.1"])
def test_more_than_half_of_the_pairs_cannot_be_wrong(dpo_file: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"`dpo\.label_smoothing`"):
        load_recipe(dpo_file, [f"dpo.label_smoothing={value}"], DpoRecipe)


def test_robust_is_told_how_many_labels_are_wrong(dpo_file: Path) -> None:
    with pytest.raises(UserError, match=r"`dpo\.loss`.*robust without dpo\.label_smoothing is the loss of sigmoid"):
        load_recipe(dpo_file, ["dpo.loss=robust"], DpoRecipe)
    assert load_recipe(dpo_file, ["dpo.loss=robust", "dpo.label_smoothing=0.1"], DpoRecipe)


def test_kto_asks_for_two_rows_and_has_a_reference(kto_file: Path) -> None:
    with pytest.raises(UserError, match=r"`train\.batch_samples`.*Set it to at least 2"):
        load_recipe(kto_file, ["train.batch_samples=1"], KtoRecipe)
    assert load_recipe(kto_file, ["train.batch_samples=1", "kto.loss=apo_zero"], KtoRecipe)
    given = ["train.batch_samples=2", "cluster.devices=2", "reference.parallel.tp=2"]
    layouts = role_layouts(load_recipe(kto_file, given, KtoRecipe).recipe)
    assert {role: layout.tp for role, layout in layouts.items()} == {"actor": 1, "reference": 2}
    with pytest.raises(
        UserError, match=r"actor\.micro_batch_tokens 100 does not hold the longest labelled answer, 200"
    ):
        plan_batches(load_recipe(kto_file, ["actor.micro_batch_tokens=100", "data.max_tokens=200"], KtoRecipe).recipe)
