"""`megarl plan --sync`: who sends which weights of a recipe's placement to whom; without torch and without devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from megarl.models.config import ModelConfig
from megarl.models.layout_check import check_layout, check_server_layout
from megarl.models.tower_files import with_tower
from megarl.placement.apply import apply_plan, plan_recipe
from megarl.placement.cluster import Cluster, one_kind
from megarl.placement.weight_sync import adapter_bytes, adapter_s
from megarl.placement.workload import recipe_workload, transport_of
from megarl.recipe.layouts import role_layouts, tower_roles
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.model_check import with_linears
from megarl.run.plan_models import PlannedModels
from megarl.sync.listing import as_json, render
from megarl.sync.places import plan_of


def run_plan_sync(path: Path, overrides: list[str], cluster: Cluster, *, as_text: bool) -> None:
    """Plan the weight sync of a recipe and print it. as_text: JSON, with every row of the table.

    Where placement.name asks for a search, the placement is what that finds. Raises UserError: nodes of several kinds;
    ranks that the cluster has no devices for; layouts that the model cannot have.
    """
    loaded = load_recipe(path, overrides, Recipe)
    cluster, console = one_kind(cluster), Console(stderr=as_text, markup=False)
    models = PlannedModels(loaded.recipe)
    recipe = with_linears(loaded, models.policy).recipe
    if recipe.placement.name is not None:
        workload = recipe_workload(recipe, models.policy, read=models)
        recipe = apply_plan(recipe, plan_recipe(recipe, workload, cluster, recipe.placement.name, top=1))
    policy = models.policy
    if "actor" in tower_roles(recipe):
        if policy.vision is not None and any(recipe.model.path.glob("*.safetensors")):
            policy = with_tower(policy, recipe.model.path)
        else:
            console.print("The vision tower's weights, which are sent too, are left out: their names are not here.")
    for note in models.notes:
        console.print(note, highlight=False)
    check_layout(policy, role_layouts(recipe)["actor"], "actor.parallel")
    if recipe.rollout.external is None:
        check_server_layout(models.policy, recipe.rollout.tp, pads=cluster.device.pads_servers)
    if transport_of(recipe) == "adapters":
        _print_adapters(recipe, models.policy, cluster, console, as_text=as_text)
        return
    plan, quantized = plan_of(recipe, policy, cluster), recipe.rollout.quantization is not None
    if as_text:
        sys.stdout.write(json.dumps(as_json(plan, cluster, quantized=quantized)) + "\n")
    else:
        console.print(render(plan, cluster, quantized=quantized), highlight=False)


def _print_adapters(recipe: Recipe, model: ModelConfig, cluster: Cluster, console: Console, *, as_text: bool) -> None:
    """There is nothing to share out: rank 0 writes one folder."""
    lora = recipe.actor.lora
    assert lora is not None
    bytes_each = 4 if recipe.model.dtype == "float32" else 2
    nbytes = adapter_bytes(model, lora.rank, tuple(lora.targets), bytes_each)
    seconds = adapter_s(cluster, nbytes)
    if as_text:
        sys.stdout.write(
            json.dumps({"transport": "adapters", "bytes": nbytes, "predicted": {"seconds": seconds}}) + "\n"
        )
        return
    console.print(
        f"Weight sync of LoRA adapters alone, as a PEFT folder in the run's: rank 0 writes it, every server reads it.\n"
        f"{nbytes / 1e6:.4g} MB of rank {lora.rank}, to {recipe.rollout.num_servers} servers\n"
        f"{seconds:.3g} s at {cluster.rates.disk_bytes_s / 1e9:g} GB/s of the disk (predicted)",
        highlight=False,
    )
