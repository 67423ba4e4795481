"""`megarl plan`: where the roles of a recipe run best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megarl.commands.options import Overrides, RecipePath
from megarl.core.errors import UserError

READ_BY_SYNC = ("recipe", "overrides", "cluster", "device", "nodes", "devices_per_node", "from_run", "json", "sync")


def plan(
    ctx: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the devices to plan for.")] = None,
    device: Annotated[str | None, typer.Option(help="In place of a file: a device of the table, such as H100.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --device: nodes.")] = 1,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="With --device: devices of a node.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best placements to show.")] = 5,
    placement: Annotated[str, typer.Option(help="auto; or only colocate, hybrid, split or standalone.")] = "auto",
    lengths: Annotated[Path | None, typer.Option(help="Samples, a log or a column of numbers, for lengths.")] = None,
    response_mean: Annotated[float | None, typer.Option(help="Mean response, tokens.")] = None,
    response_spread: Annotated[float, typer.Option(min=0, help="Standard deviation over mean.")] = 0.9,
    prompt_mean: Annotated[float | None, typer.Option(help="Mean prompt, tokens.")] = None,
    rollout_quantization: Annotated[Literal["fp8"] | None, typer.Option(help="fp8: servers' weights in FP8.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Versions that samples may be behind: above 0 also asynchronous plans.")
    ] = None,
    from_run: Annotated[Path | None, typer.Option(help="Run whose measurements calibrate the rates.")] = None,
    simulate: Annotated[int, typer.Option(min=0, max=10**6, help="Also play so many steps, with failures.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="With --simulate: of what is drawn.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Show where seconds and bytes go, and what lost.")] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Instead: who sends which weights of the recipe's placement, and how long.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page there.")] = None,
) -> None:
    """Search where the roles of a recipe run best on some devices, without any of them.

    Predicts seconds and bytes of a step; needs of the model only its config.json.

    Example: megarl plan recipes/qwen3_4b_grpo_8.yaml --device H100 --nodes 2 --explain
    """
    from megarl.placement.simulate import Conditions
    from megarl.run.plan import PlanOptions, choose_cluster, run_plan
    from megarl.run.plan_sync import run_plan_sync

    _check_read(ctx)
    found = choose_cluster(cluster, device, nodes, devices_per_node, from_run)
    if sync:
        run_plan_sync(recipe, overrides or [], found, as_text=json)
        return
    options = PlanOptions(
        top=top,
        name=placement,
        lengths=lengths,
        response_mean=response_mean,
        response_spread=response_spread,
        prompt_mean=prompt_mean,
        max_staleness=max_staleness,
        quantization=rollout_quantization,
        explain=explain,
        from_run=from_run,
        simulate=simulate,
        conditions=Conditions(seed=seed),
        as_text=json,
        html=html,
    )
    run_plan(recipe, overrides or [], found, options)


def _check_read(ctx: typer.Context) -> None:
    """Raise UserError for an option that nothing would read."""
    given = [name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")]
    unread = [name for name in given if name not in READ_BY_SYNC] if "sync" in given else []
    if unread:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        raise UserError(f"{names} cannot go with --sync, which shows how the recipe's own placement sends its weights.")
    if {"sync", "from_run"} <= {*given} and not {"cluster", "device"}.isdisjoint(given):
        raise UserError("--from-run gives --sync its cluster, and so do --cluster and --device. Give one of them.")
    needs = {"seed": "simulate", "response_spread": "response_mean", "nodes": "device", "devices_per_node": "device"}
    for name, needed in needs.items():
        if name in given and not ctx.params[needed]:
            raise UserError(
                f"--{name.replace('_', '-')} is read with --{needed.replace('_', '-')} alone: give that as well."
            )
