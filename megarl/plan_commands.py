"""`megarl plan`: reads a recipe and a cluster, searches, and shows what was found; without torch and without devices."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from megarl.core.errors import UserError
from megarl.past_run import calibrated, cluster_of_run, compare, read_run
from megarl.placement.apply import AUTO, plan_recipe
from megarl.placement.cluster import Cluster, make_cluster, read_cluster
from megarl.placement.lengths import lognormal
from megarl.placement.page import page
from megarl.placement.report import as_json, render
from megarl.placement.simulate import Conditions, render_simulation, simulate
from megarl.placement.workload import ASSUMED_SPREAD, Workload, read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class PlanOptions:
    """What `megarl plan` was asked for.

    name: only placements of that name. response_mean, response_spread: of the lengths; mean None is not known.
    from_run: folder of a run that rates and lengths are taken from. simulate: steps to play; 0 plays none. as_text: JSON in
    place of tables. html: also a page at that path.
    """

    top: int = 5
    name: str = AUTO
    response_mean: float | None = None
    response_spread: float = ASSUMED_SPREAD
    explain: bool = False
    from_run: Path | None = None
    simulate: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    as_text: bool = False
    html: Path | None = None


def choose_cluster(
    path: Path | None, device: str | None, nodes: int, devices_per_node: int | None, from_run: Path | None = None
) -> Cluster:
    """The cluster of a file, of a device of the table, or of a run. Raises UserError for none and for two."""
    if path is None and device is None and from_run is not None:
        return cluster_of_run(read_run(from_run))
    if (path is None) == (device is None):
        raise UserError(
            "A plan is made for a cluster: give either --cluster FILE (`nodes: 2`, `device: H100`), or --device NAME "
            "with --nodes N."
        )
    if path is not None:
        return read_cluster(path)
    assert device is not None
    return make_cluster(device, nodes, devices_per_node)


def run_plan(path: Path, overrides: list[str], cluster: Cluster, options: PlanOptions) -> None:
    """Plan and print."""
    recipe = load_recipe(path, overrides, Recipe).recipe
    workload = recipe_workload(recipe, read_model(recipe.model.path))
    console = Console(stderr=options.as_text)
    if options.from_run is not None:
        run = read_run(options.from_run)
        console.print(compare(run, cluster), highlight=False)
        cluster = calibrated(run, cluster)
        workload = recipe_workload(
            recipe, read_model(recipe.model.path), run.workload.responses, run.workload.prompt_tokens
        )
    workload = _with_lengths(recipe, workload, options, console)
    plan = plan_recipe(recipe, workload, cluster, options.name, top=options.top)
    if options.html is not None:
        options.html.write_text(page(plan))
    if options.as_text:
        Console().print_json(json.dumps(as_json(plan)))
    else:
        console.print(render(plan, explain=options.explain), highlight=False)
    if options.simulate:
        played = simulate(plan.best, workload, cluster, options.simulate, options.conditions)
        console.print(render_simulation(played, plan.best), highlight=False)


def _with_lengths(recipe: Recipe, workload: Workload, options: PlanOptions, console: Console) -> Workload:
    """The lengths that were asked for; where nothing is known of them, it is said what is assumed."""
    if options.response_mean is not None:
        limit = recipe.rollout.max_response_tokens
        return replace(workload, responses=lognormal(options.response_mean, options.response_spread, limit))
    if options.from_run is None:
        console.print(
            f"Response lengths are not known: log-normal with a mean of {workload.responses.mean:.0f} tokens and a "
            f"spread of {ASSUMED_SPREAD} is assumed. Say better by --response-mean and --response-spread.",
            highlight=False,
        )
    return workload
