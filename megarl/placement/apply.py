"""Turns a plan into what a recipe says: pools, layouts of the roles, micro-batches, servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import UserError
from megarl.core.ray_env import RAY_NODES_VARIABLE
from megarl.placement.cluster import Cluster
from megarl.placement.devices import DEVICES, Device
from megarl.placement.local import run_cluster
from megarl.placement.partitions import Partition
from megarl.placement.placed import UNEVEN, PlacementPlan, RolePlan
from megarl.placement.plan import Plan, make_plan
from megarl.placement.recipe_plan import check_fits
from megarl.placement.workload import (
    ACTOR,
    FRACTION_FLAG,
    REFERENCE,
    ROLLOUT,
    TRAINED,
    Workload,
    is_tied,
    read_model,
    recipe_workload,
    server_share,
)
from megarl.recipe.batch import plan_batches
from megarl.recipe.placement import Pool
from megarl.recipe.roles import Parallel
from megarl.recipe.sampling_rules import asks_beside
from megarl.recipe.schema import Recipe

AUTO = "auto"
SHARED_NAMES = ("colocate", "hybrid")
_SERVER_PARTS = ("weights", "kv_cache")
_PARTS = {True: ("grads", "params", "optimizer"), False: ("params",)}


@dataclass(frozen=True)
class Placed:
    """A recipe as it runs, and what is predicted of it: None where nothing is known of the cluster.

    plan: what was searched; None where the recipe's own placement is kept.
    """

    recipe: Recipe
    predicted: PlacementPlan | None = None
    plan: Plan | None = None


def place(recipe: Recipe) -> Placed:
    """Do what placement.name asks for, or check that the recipe's own placement fits.

    Raises UserError: what does not fit, with the smallest cluster that works; a search for a cluster that nothing is known of.
    """
    cluster, name = run_cluster(recipe), recipe.placement.name
    if cluster is None:
        if name is None:
            return Placed(recipe)
        raise UserError(
            f"placement.name {name} asks for a search, and what the run's cluster is like is not known: its devices are not in "
            f"the table of devices ({', '.join(DEVICES)}), or {RAY_NODES_VARIABLE} does not say how many nodes its Ray has. "
            "Describe it in a cluster file (docs/placement.md) and name that by cluster.file."
        )
    workload = recipe_workload(recipe, read_model(recipe.model.path))
    if name is None:
        return Placed(recipe, check_fits(recipe, workload, cluster))
    plan = plan_recipe(recipe, workload, cluster, name, as_it_is=True)
    return Placed(apply_plan(recipe, plan), plan.best, plan)


def plan_recipe(
    recipe: Recipe, workload: Workload, cluster: Cluster, name: str = AUTO, *, top: int = 5, as_it_is: bool = False
) -> Plan:
    """The best placement of a recipe. name: auto looks at all, else one of NAMES.

    as_it_is: the recipe runs there without a change: where it has servers work while the ranks train, they have devices of
    their own. Raises UserError: an unknown name; nothing fits.
    """
    # Where processes stand for devices servers take none of the ranks'.
    beside = asks_beside(recipe) if as_it_is and cluster.device.offloads_to_host else None
    if beside is not None and name in SHARED_NAMES:
        raise UserError(
            f"placement.name {name} puts the servers on devices of the ranks, and {beside} has them work while the ranks train. "
            "Set placement.name to auto, split or standalone, or remove that key."
        )

    def runs(partition: Partition) -> bool:
        return beside is None or (ROLLOUT,) in partition

    try:
        return make_plan(workload, cluster, top=top, name=None if name == AUTO else name, allowed=runs)
    except UserError as error:
        if beside is None:
            raise
        raise UserError(f"{error} Servers need devices of their own here, because of {beside}.") from None


def apply_plan(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the plan's pick for its pools, devices, layouts and servers. Raises UserError: it does not add up."""
    pools, values = {}, {}
    # Servers that share devices do so with the first pool.
    for pool in sorted(plan.best.pools, key=lambda pool: all(role.role != ROLLOUT for role in pool.roles)):
        roles = [role for role in pool.roles if role.role != ROLLOUT]
        if roles:
            names = tuple(role.role for role in roles)
            pools["_".join(names)] = Pool(devices=pool.devices, roles=names)
        for role in pool.roles:
            values[role.role] = (
                _rollout(recipe, role, pool.kind.device) if role.role == ROLLOUT else _section(recipe, role)
            )
    devices = sum(pool.devices for pool in pools.values())
    placed = recipe.model_copy(
        update={
            **{role: getattr(recipe, role).model_copy(update=update) for role, update in values.items()},
            "cluster": recipe.cluster.model_copy(update={"devices": devices}),
            # What was found is what the saved recipe says: it is not searched for again.
            "placement": recipe.placement.model_copy(update={"name": None, "pools": pools if len(pools) > 1 else {}}),
        }
    )
    plan_batches(placed)
    return placed


def _section(recipe: Recipe, role: RolePlan) -> Mapping[str, Any]:
    """What a Megatron role's section says of the plan."""
    choice = role.choice
    parallel = {axis: choice[axis] for axis in ("tp", "pp", "vpp", "cp", "ep")}
    parallel |= {key: choice[key] for key in UNEVEN if key in choice}
    update: dict[str, Any] = {
        "parallel": Parallel.model_validate(parallel),
        "offload": _PARTS[role.role in TRAINED] if choice["offloaded"] else (),
    }
    if role.role in TRAINED:
        update |= {"recompute": choice["recompute"], "recompute_num_layers": choice.get("recompute_num_layers")}
    if role.role == ACTOR:
        update["micro_batch_tokens"] = int(choice["micro_batch_tokens"])
    if role.role == REFERENCE and is_tied(recipe):
        update["parallel"] = None
    return update


def _rollout(recipe: Recipe, role: RolePlan, device: Device) -> Mapping[str, Any]:
    update: dict[str, Any] = {
        "servers": int(role.choice["servers"]),
        "tp": int(role.choice["tp"]),
        "offload": _SERVER_PARTS if role.choice["offloaded"] else (),
    }
    if device.offloads_to_host and server_share(recipe.rollout.server_args) is None:
        update["server_args"] = (*recipe.rollout.server_args, FRACTION_FLAG, f"{role.choice['memory_share']:g}")
    return update
