"""The placement that a recipe itself asks for, beside what a search picked: what it takes, or why it cannot run there."""

from __future__ import annotations

from itertools import permutations

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.layout_check import check_layout, check_server_layout
from megarl.placement.cluster import Cluster
from megarl.placement.plan import Own
from megarl.placement.recipe_plan import predict_recipe, too_full
from megarl.placement.workload import ROLLOUT, Workload
from megarl.recipe.batch import plan_batches
from megarl.recipe.layouts import role_layouts
from megarl.recipe.sampling_rules import check_beside
from megarl.recipe.schema import Recipe


def own_placement(recipe: Recipe, workload: Workload, cluster: Cluster) -> Own:
    """On a cluster of several kinds of nodes, the fastest way to put its ranks on one and its servers on the same or another."""
    try:
        for role, layout in role_layouts(recipe).items():
            if role in workload.models:
                check_layout(_with_tower(role, workload), layout, f"{role}.parallel")
        plan_batches(recipe)
        check_server_layout(workload.models[ROLLOUT], recipe.rollout.tp, pads=cluster.device.pads_servers)
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


def _with_tower(role: str, workload: Workload) -> ModelConfig:
    """A role's model; of a tower that learns with it no more is known here than how large it is."""
    config = workload.models[role]
    if role not in workload.towers or config.vision is None:
        return config
    return config.with_tower({"": (config.vision.tower_elements,)}, newer_names=False)


def _on(recipe: Recipe, workload: Workload, cluster: Cluster, kind: Cluster, serving: Cluster | None) -> Own:
    plan = predict_recipe(recipe, workload, kind, serving=serving, within=cluster if cluster.others else None)
    if plan.step_s == float("inf"):
        return Own(None, "its servers do not hold the weights and, in the KV cache, one sample of the greatest length")
    [generating] = [pool for pool in plan.pools if any(role.role == ROLLOUT for role in pool.roles)]
    # Where processes stand for devices servers take none of the ranks'.
    beside = len(generating.roles) == 1 or not kind.device.offloads_to_host
    devices, tp = recipe.cluster.devices, recipe.rollout.tp
    if not beside and tp > devices:
        return Own(plan, f"a server of rollout.tp {tp} fits neither beside the ranks nor on their {devices} devices")
    try:
        check_beside(recipe, beside=beside)
    except UserError as error:
        return Own(plan, str(error))
    return Own(plan, too_full(plan, kind))
