"""Pools of devices, and the layouts of their roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.layouts import SHARED, kept_roles, num_shards, pools_of, role_layouts
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe

PPO = ("algorithm.advantage=gae", "algorithm.kl_coef=0.1", "cluster.devices=4")


def recipe_of(file: Path, *overrides: str) -> Recipe:
    return load_recipe(file, overrides).recipe


def test_without_pools_every_role_shares_all_devices(recipe_file: Path) -> None:
    recipe = recipe_of(recipe_file, *PPO, "actor.parallel.tp=2", "critic.parallel.pp=2")
    assert {name: (pool.devices, pool.roles) for name, pool in pools_of(recipe).items()} == {
        SHARED: (4, ("actor", "reference", "critic"))
    }
    layouts = role_layouts(recipe)
    assert (layouts["actor"].tp, layouts["reference"].tp, layouts["critic"].tp, layouts["critic"].pp) == (2, 2, 1, 2)
    assert kept_roles(recipe) == ["actor", "critic"]


def test_a_role_has_a_layout_over_the_devices_of_its_pool(recipe_file: Path) -> None:
    pools = "placement.pools={a: {devices: 3, roles: [actor, reference]}, b: {devices: 1, roles: [critic]}}"
    recipe = recipe_of(recipe_file, *PPO, pools)
    assert {role: layout.world_size for role, layout in role_layouts(recipe).items()} == {
        "actor": 3,
        "reference": 3,
        "critic": 1,
    }
    assert num_shards(recipe) == 3


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ("{a: {devices: 4, roles: [actor, critic]}}", "reference is in no pool"),
        ("{a: {devices: 4, roles: [actor, reference, critic, teacher]}}", "teacher is in a pool, and the run has none"),
        ("{a: {devices: 2, roles: [actor, reference, critic]}}", "2 devices together, and cluster.devices is 4"),
        (
            "{a: {devices: 3, roles: [actor, reference, critic]}, b: {devices: 1, roles: [critic]}}",
            "critic is in more than one pool",
        ),
    ],
)
def test_pools_that_do_not_fit_the_run_are_refused(recipe_file: Path, pools: str, says: str) -> None:
    recipe: Any = recipe_of(recipe_file, *PPO, f"placement.pools={pools}")
    with pytest.raises(UserError) as caught:
        role_layouts(recipe)
    assert says in str(caught.value) and "The run's roles: actor, reference, critic" in str(caught.value)
