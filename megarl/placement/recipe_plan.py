"""What a recipe's own placement is predicted to take: its pools, layouts and servers as they stand, nothing searched.

Servers stand on devices of their own where the cluster has enough beside the ranks', on the first pool's otherwise
(cluster/slots.py). Where processes stand for devices servers have none; they count as the actor's.
"""

from __future__ import annotations

import numpy as np

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.placement.cluster import Cluster
from megarl.placement.devices import GIB
from megarl.placement.plan import PlacementPlan, placement_plan, smallest_cluster
from megarl.placement.search import Found
from megarl.placement.sizes import kv_bytes
from megarl.placement.space import RECOMPUTE, Layouts, Servers
from megarl.placement.tables import AllTables, RoleTable, RolloutTable, price_role, price_rollout
from megarl.placement.workload import ACTOR, CRITIC, ROLLOUT, Workload
from megarl.recipe.layouts import pools_of, role_layouts
from megarl.recipe.schema import Recipe

FRACTION_FLAG = "--mem-fraction-static"
# SGLang's own share of a device, and that of a server which shares it with ranks (core/platform.py).
OWN_FRACTION, SHARED_FRACTION = 0.85, 0.3


def predict_recipe(recipe: Recipe, workload: Workload, cluster: Cluster) -> PlacementPlan:
    """Seconds by phase and bytes by pool of the recipe's own placement. Raises UserError for layouts that do not fit."""
    layouts = role_layouts(recipe)
    pools: list[tuple[tuple[str, ...], int]] = [
        (tuple(role for role in pool.roles if role in workload.models), pool.devices)
        for pool in pools_of(recipe).values()
    ]
    ranks = sum(devices for _, devices in pools)
    used = recipe.rollout.servers * recipe.rollout.tp
    apart = cluster.device.offloads_to_host and cluster.num_devices - ranks >= used
    if apart:
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
        rollout=_rollout_table(recipe, workload, cluster, used, shared=not apart),
    )
    found = Found(
        partition=tuple(roles for roles, _ in pools),
        asynchronous=False,
        seconds=0.0,
        devices=tuple(devices for _, devices in pools),
        rows=tuple((0,) * len(roles) for roles, _ in pools),
    )
    return placement_plan(found, tables, workload, cluster)


def check_fits(recipe: Recipe, workload: Workload, cluster: Cluster) -> PlacementPlan:
    """The prediction of a recipe's own placement. Raises UserError where its devices do not hold it."""
    plan = predict_recipe(recipe, workload, cluster)
    usable = cluster.usable_bytes + cluster.rates.reserved_bytes
    if cluster.device.offloads_to_host:
        full = [pool for pool in plan.pools if pool.peak_bytes > usable]
        if not full:
            return plan
        worst = max(full, key=lambda pool: pool.peak_bytes)
        what = f"{worst.describe()} needs {worst.peak_bytes / GIB:.1f} GiB of each device while {worst.peak_role} works"
        have = f"{cluster.device.name} lets roles use {usable / GIB:.1f} GiB"
    else:
        # Devices that are processes take what they need of one memory.
        needed = sum(pool.peak_bytes * pool.devices for pool in plan.pools)
        if needed <= usable * cluster.num_devices:
            return plan
        what = f"{' and '.join(pool.describe() for pool in plan.pools)} need {needed / GIB:.1f} GiB together"
        have = f"this machine's processes can use {usable * cluster.num_devices / GIB:.1f} GiB"
    smallest = smallest_cluster(workload, cluster)
    advice = (
        "No placement of it fits any number of such nodes: take shorter samples or a smaller model."
        if smallest is None
        else f"The smallest cluster of this kind that holds the run, placed best: {smallest.describe()}."
    )
    raise UserError(
        f"The run does not fit into memory: {what}, and {have}. Cut the models further (<role>.parallel), lower "
        f"actor.micro_batch_tokens, or offload roles and servers (<role>.offload, rollout.offload). {advice}"
    )


def _role_table(role: str, layout: Layout, recipe: Recipe, workload: Workload, cluster: Cluster) -> RoleTable:
    section = getattr(recipe, role)
    kind = recipe.critic.recompute if role == CRITIC and recipe.critic is not None else recipe.actor.recompute
    sizes = (layout.world_size, layout.tp, layout.pp, layout.cp, layout.ep)
    values = (*sizes, recipe.actor.micro_batch_tokens, RECOMPUTE.index(kind))
    choice = Layouts(*(np.array([value], np.int64) for value in values))
    return price_role(role, choice, np.array(["params" in section.offload]), workload, cluster)


def _rollout_table(recipe: Recipe, workload: Workload, cluster: Cluster, devices: int, *, shared: bool) -> RolloutTable:
    settings, config = recipe.rollout, workload.models[ROLLOUT]
    tp, each = np.array([settings.tp], np.int64), workload.bytes_each
    used = np.array([settings.servers * settings.tp], np.int64)
    fraction = _fraction(settings.server_args) or (SHARED_FRACTION if shared else OWN_FRACTION)
    if settings.kv_tokens is not None:
        held = settings.kv_tokens * kv_bytes(config, tp, each) + workload.served_weights / tp
        # A little more, so that rounding takes no token away.
        fraction = float(held[0] * (1 + 1e-9) + cluster.rates.server_bytes) / cluster.device.memory_bytes
    choice = Servers(np.array([devices], np.int64), tp, np.array([fraction]), used)
    offloaded = cluster.device.offloads_to_host and {"weights", "kv_cache"} <= set(settings.offload)
    return price_rollout(choice, np.array([offloaded]), workload, cluster)


def _fraction(args: tuple[str, ...]) -> float | None:
    """What a recipe's own flags say of a server's share of the memory."""
    for index, word in enumerate(args[:-1]):
        if word == FRACTION_FLAG:
            return float(args[index + 1])
    return None
