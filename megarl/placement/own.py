"""The placement that a recipe itself asks for, beside what a search picked: what it takes, or why it cannot run there."""

from __future__ import annotations

from itertools import permutations

from megarl.core.errors import UserError
from megarl.models.layout_check import check_layout
from megarl.placement.cluster import Cluster
from megarl.placement.plan import Own
from megarl.placement.recipe_plan import predict_recipe, too_full
from megarl.placement.workload import Workload
from megarl.recipe.layouts import role_layouts
from megarl.recipe.schema import Recipe


def own_placement(recipe: Recipe, workload: Workload, cluster: Cluster) -> Own:
    """On a cluster of several kinds of nodes, the fastest way to put its ranks on one and its servers on the same or another."""
    try:
        for role, layout in role_layouts(recipe).items():
            if role in workload.models:
                check_layout(workload.models[role], layout, f"{role}.parallel")
    except UserError as error:
        return Own(None, str(error))
    ranks, servers = recipe.cluster.devices, recipe.rollout.server_devices
    hosts: list[tuple[Cluster, Cluster | None]] = [(kind, None) for kind in cluster.kinds if kind.num_devices >= ranks]
    hosts += [
        (kind, serving)
        for kind, serving in permutations(cluster.kinds, 2)
        if kind.num_devices >= ranks and serving.num_devices >= servers
    ]
    if not hosts:
        most = max(kind.num_devices for kind in cluster.kinds)
        return Own(None, f"its ranks are {ranks} devices (cluster.devices), and there are {most}")
    every = [_on(recipe, workload, cluster, kind, serving) for kind, serving in hosts]
    # What runs comes first, and then what is fastest.
    return min(every, key=lambda own: (own.problem is not None, own.predicted.step_s if own.predicted else 0.0))


def _on(recipe: Recipe, workload: Workload, cluster: Cluster, kind: Cluster, serving: Cluster | None) -> Own:
    plan = predict_recipe(recipe, workload, kind, serving=serving, within=cluster if cluster.others else None)
    if plan.step_s == float("inf"):
        return Own(None, "the KV cache of its servers does not hold one sample of the greatest length")
    return Own(plan, too_full(plan, kind))
