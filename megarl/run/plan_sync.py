"""`megarl plan --sync`: who sends which weights of a recipe's placement to whom; without torch and without devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from megarl.placement.apply import apply_plan, plan_recipe
from megarl.placement.cluster import Cluster, one_kind
from megarl.placement.workload import recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.plan_models import PlannedModels
from megarl.sync.listing import as_json, render
from megarl.sync.places import plan_of


def run_plan_sync(path: Path, overrides: list[str], cluster: Cluster, *, as_text: bool) -> None:
    """Plan the weight sync of a recipe and print it. as_text: JSON, with every row of the table.

    Where placement.name asks for a search, the placement is what that finds. Raises UserError: nodes of several kinds;
    ranks that the cluster has no devices for.
    """
    recipe = load_recipe(path, overrides, Recipe).recipe
    cluster, console = one_kind(cluster), Console(stderr=as_text)
    models = PlannedModels(recipe)
    if recipe.placement.name is not None:
        workload = recipe_workload(recipe, models.policy, read=models)
        recipe = apply_plan(recipe, plan_recipe(recipe, workload, cluster, recipe.placement.name, top=1))
    for note in models.notes:
        console.print(note, highlight=False)
    plan = plan_of(recipe, models.policy, cluster)
    if as_text:
        sys.stdout.write(json.dumps(as_json(plan, cluster)) + "\n")
    else:
        console.print(render(plan, cluster), highlight=False)
