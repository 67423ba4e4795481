"""Whether a SLURM job's nodes and GPUs are those that a recipe uses, and where its servers will then stand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megarl.core.errors import UserError
from megarl.recipe.sampling_rules import check_beside
from megarl.recipe.schema import AnyRecipe, Recipe


@dataclass(frozen=True)
class Fit:
    """What of a job's nodes a run uses.

    per_node: devices of each node. servers: where the servers will be, for people; nothing where that is no question.
    """

    per_node: int
    servers: str = ""


def check_fit(recipe: AnyRecipe, nodes: int, gpus_per_node: int | None) -> Fit:
    """How a recipe fits on so many nodes, spares included. gpus_per_node: None for a run on CPUs.

    Servers get GPUs of their own where there are as many as ranks and servers use, and stand on the ranks' where there are
    only these: by the same numbers the run decides. Raises UserError where they do not match the recipe.
    """
    devices, spares = recipe.cluster.devices, recipe.cluster.spares
    used = nodes - spares
    if used < 1:
        raise UserError(
            f"cluster.spares is {spares}, and --nodes {nodes} counts them: give at least {spares + 1} nodes, or lower "
            "cluster.spares."
        )
    if gpus_per_node is None:
        # Processes stand for devices: as many as are needed, evenly.
        return Fit(-(-devices // used))
    there = used * gpus_per_node
    given = f"--nodes {nodes}{f' without cluster.spares {spares}' if spares else ''} x --gpus-per-node {gpus_per_node}"
    if isinstance(recipe, Recipe) and recipe.rollout.server_devices:
        return Fit(gpus_per_node, _servers(recipe, there, gpus_per_node, given))
    if there != devices:
        raise UserError(
            f"{given} are {there} GPUs, and the recipe uses {devices} (cluster.devices). Give as many nodes as it takes, or set "
            "cluster.devices to match."
        )
    return Fit(gpus_per_node)


def _servers(recipe: Recipe, there: int, per_node: int, given: str) -> str:
    """Where a run's own servers will be on so many GPUs. Raises UserError."""
    devices, rollout = recipe.cluster.devices, recipe.rollout
    wanted = devices + rollout.server_devices
    product = f"rollout.servers {rollout.servers} x rollout.tp {rollout.tp}"
    if there == wanted:
        return f"the servers on {rollout.server_devices} GPUs of their own, beside the ranks' {devices}"
    why_not = _why_not_on_ranks(recipe, per_node)
    if there == devices and why_not:
        raise UserError(
            f"{given} are {there} GPUs, as many as the ranks alone use (cluster.devices), and servers cannot be on these: "
            f"{why_not} With GPUs of their own for the servers it takes {wanted} ({product} more)."
        )
    if there == devices:
        return f"the servers ({product}) on the ranks' {devices} GPUs; {wanted} GPUs would give them their own"
    shared = "" if why_not else f", or {devices} with the servers on the ranks' GPUs"
    raise UserError(
        f"{given} are {there} GPUs, and the recipe uses {wanted} (cluster.devices {devices} + {product}){shared}. Give as many "
        "nodes as it takes, or set cluster.devices or rollout.servers to match."
    )


def _why_not_on_ranks(recipe: Recipe, per_node: int) -> str:
    """Why the servers of a recipe cannot stand on the devices of its ranks, which fill their nodes; nothing where they can."""
    tp, devices = recipe.rollout.tp, recipe.cluster.devices
    if tp > devices:
        return f"rollout.tp is {tp}, more than there are."
    nodes = [device // per_node for device in range(devices)]
    homes = [nodes[first : first + tp] for first in range(0, devices - tp + 1, tp)][: recipe.rollout.num_servers]
    if any(len(set(Counter(home).values())) > 1 for home in homes):
        return f"a server of rollout.tp {tp} would have uneven parts on nodes of {per_node}."
    try:
        check_beside(recipe, beside=False)
    except UserError as error:
        return str(error)
    return ""
