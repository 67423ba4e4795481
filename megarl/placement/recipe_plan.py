"""What a recipe's own placement is predicted to take: its pools, layouts and servers as they stand, nothing searched.

Servers stand on devices of their own where the cluster has enough beside the ranks', on the first pool's otherwise
(cluster/slots.py). Where processes stand for devices servers have none; they count as the actor's. Those that somebody else
started take none of the run's; their seconds are those of servers of one such device each, for want of anything known of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.placement.cluster import Cluster
from megarl.placement.devices import GIB
from megarl.placement.host import host_problem
from megarl.placement.placed import PlacementPlan
from megarl.placement.plan import smallest_cluster
from megarl.placement.prediction import placement_plan
from megarl.placement.search import Found
from megarl.placement.server_share import chosen_share
from megarl.placement.space import Servers, one_layout
from megarl.placement.tables import AllTables, RoleTable, RolloutTable, price_role, price_rollout, served_bytes
from megarl.placement.workload import ACTOR, CRITIC, ROLLOUT, Workload, server_share
from megarl.recipe.layouts import pools_of, role_layouts
from megarl.recipe.schema import Recipe

# Of a server that is on ranks' devices, where the recipe says nothing (core/platform.py).
SHARED_FRACTION = 0.3


def predict_recipe(
    recipe: Recipe,
    workload: Workload,
    cluster: Cluster,
    *,
    serving: Cluster | None = None,
    within: Cluster | None = None,
) -> PlacementPlan:
    """Seconds by phase and bytes by pool of the recipe's own placement.

    serving: nodes of another kind that the servers are on. within: the whole cluster, where it has several kinds of nodes.
    Raises UserError for layouts that do not fit the recipe's devices.
    """
    layouts = role_layouts(recipe)
    pools: list[tuple[tuple[str, ...], int]] = [
        (tuple(role for role in pool.roles if role in workload.models), pool.devices)
        for pool in pools_of(recipe).values()
    ]
    ranks = sum(devices for _, devices in pools)
    used = recipe.rollout.server_devices
    apart = serving is not None or recipe.rollout.external is not None
    separate = apart or (cluster.device.offloads_to_host and cluster.num_devices - ranks >= used)
    if separate:
        pools.append(((ROLLOUT,), used))
    else:
        host = 0 if cluster.device.offloads_to_host else [ACTOR in roles for roles, _ in pools].index(True)
        roles, used = pools[host]
        pools[host] = ((*roles, ROLLOUT), used)
    tables = AllTables(
        roles={
            role: _role_table(role, layout, recipe, workload, cluster)
            for role, layout in layouts.items()
            if role in workload.models
        },
        rollout=_rollout_table(
            recipe, workload, serving or cluster, used, shared=not separate, across=serving is not None
        ),
        serving=serving,
    )
    found = Found(
        partition=tuple(roles for roles, _ in pools),
        asynchronous=workload.staleness > 0 and separate,
        seconds=0.0,
        devices=tuple(devices for _, devices in pools),
        rows=tuple((0,) * len(roles) for roles, _ in pools),
    )
    return placement_plan(found, tables, workload, cluster, within)


def check_fits(recipe: Recipe, workload: Workload, cluster: Cluster) -> PlacementPlan:
    """The prediction of a recipe's own placement. Raises UserError where its devices do not hold it."""
    plan = predict_recipe(recipe, workload, cluster)
    problem = too_full(plan, cluster)
    if problem is None:
        return plan
    if problem == host_problem(plan):
        raise UserError(
            f"The run does not fit into memory: {problem}. Leave roles on their devices (<role>.offload), save without "
            "train.async_save, or take more nodes."
        )
    smallest = smallest_cluster(workload, cluster)
    advice = (
        "No placement of it fits any number of such nodes: take shorter samples or a smaller model."
        if smallest is None
        else f"The smallest cluster of this kind that holds the run, placed best: {smallest.describe()}."
    )
    raise UserError(
        f"The run does not fit into memory: {problem}. Cut the models further (<role>.parallel), lower "
        "actor.micro_batch_tokens, have fewer servers where several share a device (rollout.servers), or offload roles and "
        f"servers (<role>.offload, rollout.offload). {advice}"
    )


def too_full(plan: PlacementPlan, cluster: Cluster) -> str | None:
    """What a placement needs that its devices do not have; None where they hold it."""
    own = [pool for pool in plan.pools if pool.devices]
    if cluster.device.offloads_to_host:
        over = {pool.peak_bytes - usable_bytes(pool.kind): pool for pool in own}
        worst = over[max(over)]
        if max(over) <= 0:
            return host_problem(plan)
        return (
            f"{worst.describe()} needs {worst.peak_bytes / GIB:.1f} GiB of each device while {worst.peak_role} works, and "
            f"{worst.kind.device.name} lets roles use {usable_bytes(worst.kind) / GIB:.1f} GiB"
        )
    # Devices that are processes take what they need of one memory.
    needed, have = (
        sum(pool.peak_bytes * pool.devices for pool in own),
        usable_bytes(cluster) * cluster.num_devices,
    )
    if needed <= have:
        return None
    pools = " and ".join(pool.describe() for pool in own)
    return f"{pools} need {needed / GIB:.1f} GiB together, and this machine's processes can use {have / GIB:.1f} GiB"


def usable_bytes(cluster: Cluster) -> float:
    """What a pool may take of each device, with what is kept for communicators and the like."""
    return cluster.usable_bytes + cluster.rates.reserved_bytes


def _role_table(role: str, layout: Layout, recipe: Recipe, workload: Workload, cluster: Cluster) -> RoleTable:
    section = getattr(recipe, role)
    learns = recipe.critic if role == CRITIC and recipe.critic is not None else recipe.actor
    choice = one_layout(layout, recipe.actor.micro_batch_tokens, learns.recompute, learns.recompute_num_layers)
    offloaded = np.array([bool(section.offload)])
    return price_role(role, choice, offloaded, workload, cluster, parts=section.offload)


def _rollout_table(
    recipe: Recipe, workload: Workload, cluster: Cluster, devices: int, *, shared: bool, across: bool
) -> RolloutTable:
    settings = recipe.rollout
    tp = np.array([settings.tp], np.int64)
    most = settings.num_servers * settings.tp
    per_device = 1
    if shared and cluster.device.offloads_to_host:
        # Servers that share devices with each other as well generate no faster than one on each.
        places = max(1, recipe.cluster.devices // settings.tp)
        per_device = math.ceil(settings.num_servers / places)
        most = min(settings.num_servers, places) * settings.tp
    used = np.array([most], np.int64)
    # The recipe's, for the workload may be that of the recipe before a plan was applied to it.
    fraction = server_share(settings.server_args) or (SHARED_FRACTION if shared else None)
    if fraction is None:
        most_running, most_tokens = settings.max_running_requests, settings.kv_tokens
        fraction = chosen_share(workload.models[ROLLOUT], settings.tp, cluster, most_running, most_tokens)
    choice = Servers(np.array([devices], np.int64) if devices else used, tp, np.array([fraction]), used)
    offloaded = cluster.device.offloads_to_host and bool(settings.offload)
    held = served_bytes(choice, workload, cluster)
    parts = {"weights": held.weights, "kv_cache": held.cache + held.states}
    stays = sum(size for part, size in parts.items() if part not in settings.offload)
    table = price_rollout(choice, np.array([offloaded]), workload, cluster, across=across, stays=stays)
    return replace(table, per_device=per_device)
