"""`megarl plan`: reads a recipe and a cluster, searches, and shows what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megarl.core.errors import UserError
from megarl.placement.cluster import Cluster, make_cluster, read_cluster
from megarl.placement.lengths import lognormal
from megarl.placement.page import page
from megarl.placement.plan import make_plan
from megarl.placement.report import as_json, render
from megarl.placement.workload import ASSUMED_SPREAD, read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe


def choose_cluster(path: Path | None, device: str | None, nodes: int, devices_per_node: int | None) -> Cluster:
    """The cluster of a file, or of a device of the table. Raises UserError for neither and for both."""
    if (path is None) == (device is None):
        raise UserError(
            "A plan is made for a cluster: give either --cluster FILE (`nodes: 2`, `device: H100`), or --device NAME "
            "with --nodes N."
        )
    if path is not None:
        return read_cluster(path)
    assert device is not None
    return make_cluster(device, nodes, devices_per_node)


def run_plan(
    path: Path,
    overrides: list[str],
    cluster: Cluster,
    *,
    top: int,
    name: str | None,
    response_mean: float | None,
    response_spread: float,
    explain: bool,
    as_text: bool,
    html: Path | None,
) -> None:
    """Plan and print. as_text: JSON in place of tables. html: also a page at that path."""
    recipe = load_recipe(path, overrides, Recipe).recipe
    workload = recipe_workload(recipe, read_model(recipe.model.path))
    console = Console()
    if response_mean is not None:
        limit = recipe.rollout.max_response_tokens
        workload = replace(workload, responses=lognormal(response_mean, response_spread, limit))
    plan = make_plan(workload, cluster, top=top, name=name)
    if html is not None:
        html.write_text(page(plan))
    if as_text:
        console.print_json(json.dumps(as_json(plan)))
        return
    if response_mean is None:
        console.print(
            f"Response lengths are not known: log-normal with a mean of {workload.responses.mean:.0f} tokens and a "
            f"spread of {ASSUMED_SPREAD} is assumed. Say better by --response-mean and --response-spread.",
            highlight=False,
        )
    console.print(render(plan, explain=explain), highlight=False)
