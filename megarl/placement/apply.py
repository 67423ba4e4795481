"""Turns a plan into what a recipe says: pools, layouts of the roles, micro-batches, servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.placement.cluster import Cluster
from megarl.placement.partitions import Partition
from megarl.placement.plan import Plan, RolePlan, make_plan
from megarl.placement.recipe_plan import FRACTION_FLAG
from megarl.placement.workload import ACTOR, REFERENCE, ROLLOUT, TRAINED, Workload
from megarl.recipe.batch import plan_batches
from megarl.recipe.placement import Pool
from megarl.recipe.roles import Parallel
from megarl.recipe.schema import Recipe

AUTO = "auto"
_PARTS = {True: ("grads", "params", "optimizer"), False: ("params",)}


def plan_recipe(recipe: Recipe, workload: Workload, cluster: Cluster, name: str = AUTO, *, top: int = 5) -> Plan:
    """The best placement that the recipe can run. name: auto looks at all, else one of NAMES.

    Raises UserError: an unknown name; nothing fits.
    """
    tied = REFERENCE in workload.models and is_tied(recipe)

    def runs(partition: Partition) -> bool:
        return not tied or any(ACTOR in pool and REFERENCE in pool for pool in partition)

    return make_plan(workload, cluster, top=top, name=None if name == AUTO else name, allowed=runs)


def is_tied(recipe: Recipe) -> bool:
    """Whether the reference has to be where the actor is: under LoRA it is the actor, refreshed it takes its weights."""
    return recipe.actor.lora is not None or recipe.reference.refresh_every is not None


def apply_plan(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the plan's pick for its pools, devices, layouts and servers. Raises UserError: it does not add up."""
    pools, values = {}, {}
    for pool in plan.best.pools:
        roles = [role for role in pool.roles if role.role != ROLLOUT]
        if roles:
            names = tuple(role.role for role in roles)
            pools["_".join(names)] = Pool(devices=pool.devices, roles=names)
        for role in pool.roles:
            values[role.role] = _rollout(recipe, role) if role.role == ROLLOUT else _section(recipe, role)
    devices = sum(pool.devices for pool in pools.values())
    placed = recipe.model_copy(
        update={
            **{role: getattr(recipe, role).model_copy(update=update) for role, update in values.items()},
            "cluster": recipe.cluster.model_copy(update={"devices": devices}),
            "placement": recipe.placement.model_copy(update={"pools": pools if len(pools) > 1 else {}}),
        }
    )
    plan_batches(placed)
    return placed


def _section(recipe: Recipe, role: RolePlan) -> Mapping[str, Any]:
    """What a Megatron role's section says of the plan."""
    choice = role.choice
    tp, pp, cp, ep = (int(choice[axis]) for axis in ("tp", "pp", "cp", "ep"))
    update: dict[str, Any] = {
        "parallel": Parallel(tp=tp, pp=pp, cp=cp, ep=ep),
        "resting": _PARTS[role.role in TRAINED] if choice["rests"] else (),
    }
    if role.role in TRAINED:
        update["recompute"] = choice["recompute"]
    if role.role == ACTOR:
        update["micro_batch_tokens"] = int(choice["micro_batch_tokens"])
    if role.role == REFERENCE and is_tied(recipe):
        update["parallel"] = None
    return update


def _rollout(recipe: Recipe, role: RolePlan) -> Mapping[str, Any]:
    update: dict[str, Any] = {"servers": int(role.choice["servers"]), "tp": int(role.choice["tp"])}
    if recipe.rollout.kv_tokens is None and FRACTION_FLAG not in recipe.rollout.server_args:
        update["server_args"] = (*recipe.rollout.server_args, FRACTION_FLAG, f"{role.choice['memory_share']:g}")
    return update
