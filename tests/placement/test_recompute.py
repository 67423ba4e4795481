"""The fewest layers that a role has to compute again: one fewer does not fit, and the seconds are those of the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.own import own_placement
from megarl.placement.recompute import spared_layers
from megarl.placement.workload import Workload, read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.placement.samples import write_config

CLUSTER = make_cluster("H100", 2)
PLACED = (
    "model.dtype=bfloat16",
    "rollout.prompts_per_step=256",
    "rollout.max_response_tokens=4096",
    "actor.mini_batch_samples=512",
    "cluster.devices=8",
    "actor.parallel.tp=4",
    "rollout.servers=8",
)
FULL = "actor.recompute=full"


def given(folder: Path, *overrides: str) -> tuple[Recipe, Workload, Cluster]:
    model = f"model.path={write_config(folder)}"
    recipe = load_recipe(Path("recipes/quickstart.yaml"), [model, *PLACED, *overrides], Recipe).recipe
    return recipe, recipe_workload(recipe, read_model(folder)), CLUSTER


def test_one_layer_fewer_does_not_fit(tmp_path: Path) -> None:
    long = "actor.micro_batch_tokens=65536"
    recipe, workload, cluster = given(tmp_path, long, FULL)
    [spared] = spared_layers(recipe, workload, cluster)
    assert 0 < spared.layers < spared.of == 28

    def seconds(layers: int) -> tuple[float, bool]:
        other, *_ = given(tmp_path, long, FULL, f"actor.recompute_num_layers={layers}")
        own = own_placement(other, workload, cluster)
        assert own.predicted is not None
        return own.predicted.step_s, own.problem is None

    whole, fits = seconds(28)
    assert fits and not seconds(spared.layers - 1)[1]
    step, fits = seconds(spared.layers)
    assert fits and whole - step == pytest.approx(spared.seconds) and spared.seconds > 0
    assert f"actor.recompute_num_layers={spared.layers} fits as well" in spared.words
    assert not list(spared_layers(given(tmp_path, long, FULL, "actor.recompute_num_layers=28")[0], workload, cluster))


def test_where_nothing_need_be_computed_again_that_is_said(tmp_path: Path) -> None:
    [spared] = spared_layers(*given(tmp_path, "actor.micro_batch_tokens=8192", FULL))
    assert spared.layers == 0 and spared.words.startswith("actor.recompute=none fits as well")


def test_of_stages_of_different_sizes_the_largest_counts(tmp_path: Path) -> None:
    """By hand: of 24 layers in the larger stage 20 are computed again. Of 14, the mean, that would be all."""
    uneven = (FULL, "actor.parallel.pp=2", "actor.parallel.first_stage_layers=4", "actor.micro_batch_tokens=131072")
    recipe, workload, cluster = given(tmp_path, *uneven)
    [spared] = spared_layers(recipe, workload, cluster)
    assert 14 < spared.layers < spared.of == 24

    def seconds(layers: int) -> float:
        other, *_ = given(tmp_path, *uneven, f"actor.recompute_num_layers={layers}")
        own = own_placement(other, workload, cluster)
        assert own.predicted is not None
        return own.predicted.step_s

    assert seconds(24) - seconds(20) == pytest.approx(2 * (seconds(24) - seconds(22)), rel=1e-3) != 0


@pytest.mark.parametrize("overrides", [(), (FULL, "actor.micro_batch_tokens=4000000")], ids=["none is", "too full"])
def test_nothing_is_said_of_what_does_not_recompute_or_does_not_fit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert not list(spared_layers(*given(tmp_path, *overrides)))
