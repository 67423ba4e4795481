"""A plan for people and for programs: tables on the terminal, and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megarl.placement.devices import GIB
from megarl.placement.plan import PHASES, PlacementPlan, Plan


def render(plan: Plan, *, explain: bool = False) -> Group:
    """Tables for a terminal. explain: also where each role's seconds and bytes go."""
    best = plan.best
    head = Text(
        f"{best.describe()}\n{plan.cluster.describe()}: {best.step_s:.4g} s a step, "
        f"{plan.tokens_per_s:.4g} tokens/s a device (predicted)"
    )
    parts: list[Any] = [head, _roles(best, plan), _phases(best)]
    if explain:
        parts += [_details(best)]
    if plan.others or plan.bounds:
        parts += [_alternatives(plan, explain=explain)]
    return Group(*parts)


def _roles(placement: PlacementPlan, plan: Plan) -> Table:
    table = Table(title="Pools", title_justify="left")
    for column in ("devices", "role", "layout", "seconds", "GiB awake", "GiB offloaded", "peak of the device, GiB"):
        table.add_column(column, justify="left" if column in ("role", "layout") else "right")
    for pool in placement.pools:
        for index, role in enumerate(pool.roles):
            table.add_row(
                "" if index else f"{pool.first}-{pool.first + pool.devices - 1}",
                role.role,
                role.shape,
                f"{sum(role.seconds.values()):.3g}",
                f"{sum(role.held_bytes.values()) / GIB:.1f}",
                f"{role.offloaded_bytes / GIB:.1f}" if len(pool.roles) > 1 else "",
                ""
                if index
                else f"{pool.peak_bytes / GIB:.1f} of {pool.kind.device.memory_bytes / GIB:.0f} ({pool.peak_role})",
                end_section=index == len(pool.roles) - 1,
            )
    return table


def _phases(placement: PlacementPlan) -> Table:
    table = Table(title="One step", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for phase in PHASES:
        seconds = placement.phases[phase]
        table.add_row(phase, f"{seconds:.3g}", f"{seconds / placement.step_s:.0%}")
    return table


def _details(placement: PlacementPlan) -> Table:
    table = Table(title="Where seconds and bytes go", title_justify="left")
    for column in ("role", "what", "of it"):
        table.add_column(column)
    for pool in placement.pools:
        for role in pool.roles:
            for stage, parts in role.parts.items():
                table.add_row(role.role, f"{stage}, s", _list(parts, 1.0))
            table.add_row(role.role, "awake, GiB", _list(role.held_bytes, GIB), end_section=True)
    return table


def _list(values: Any, unit: float) -> str:
    return ", ".join(f"{name} {value / unit:.3g}" for name, value in values.items() if value / unit > 5e-4)


def _alternatives(plan: Plan, *, explain: bool) -> Table:
    table = Table(title="What lost", title_justify="left")
    table.add_column("placement")
    table.add_column("seconds", justify="right")
    table.add_column("why")
    for other, why in plan.others:
        table.add_row(other.describe(), f"{other.step_s:.4g}", why)
    for bound in plan.bounds if explain else ():
        pools = " | ".join("+".join(pool) for pool in bound.partition)
        if bound.seconds == float("inf"):
            table.add_row(pools, "", "does not fit into the devices' memory")
        else:
            table.add_row(pools, f"over {bound.seconds:.4g}", "not looked into further: no placement of it is faster")
    return table


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    return {
        "cluster": {
            "nodes": plan.cluster.nodes,
            "devices_per_node": plan.cluster.devices_per_node,
            "device": plan.cluster.device.name,
            "others": [
                {"nodes": other.nodes, "devices_per_node": other.devices_per_node, "device": other.device.name}
                for other in plan.cluster.others
            ],
        },
        "tokens_per_s_per_device": plan.tokens_per_s,
        "best": _placement(plan.best),
        "others": [{**_placement(other), "lost": why} for other, why in plan.others],
    }


def _placement(placement: PlacementPlan) -> dict[str, Any]:
    return {
        "names": list(placement.names),
        "asynchronous": placement.asynchronous,
        "step_s": placement.step_s,
        "phases_s": {phase: float(seconds) for phase, seconds in placement.phases.items()},
        "pools": [
            {
                "first_device": pool.first,
                "device": pool.kind.device.name,
                "devices": pool.devices,
                "peak_bytes": pool.peak_bytes,
                "peak_role": pool.peak_role,
                "roles": {
                    role.role: {
                        **role.choice,
                        "seconds": {name: float(seconds) for name, seconds in role.seconds.items()},
                        "parts_s": role.parts,
                        "held_bytes": role.held_bytes,
                        "offloaded_bytes": role.offloaded_bytes,
                    }
                    for role in pool.roles
                },
            }
            for pool in placement.pools
        ],
    }
