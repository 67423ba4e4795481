"""A plan for people and for programs: tables on the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megarl.placement.devices import GIB
from megarl.placement.host import fullest_node, host_words
from megarl.placement.placed import PHASES, PlacementPlan
from megarl.placement.plan import Plan

# Placement, seconds, why it lost; and of how many equal ones the names are shown.
Line = tuple[str, str, str]
EQUALS = 3


def render(plan: Plan, *, explain: bool = False) -> Group:
    """Tables for a terminal. explain: also where each role's seconds and bytes go."""
    best = plan.best
    head = Text(
        f"{best.describe()}\n{plan.cluster.describe()}: {best.step_s:.4g} s a step, "
        f"{plan.tokens_per_s:.4g} tokens/s a device (predicted)"
    )
    parts: list[Any] = [head, _roles(best), *_host(best), _phases(best)]
    if explain:
        parts += [_details(best)]
    if plan.others or plan.bounds or plan.own:
        parts += [_alternatives(plan, explain=explain)]
    return Group(*parts)


def _host(placement: PlacementPlan) -> list[Text]:
    words = host_words(placement)
    return [Text(f"{words[:1].upper()}{words[1:]}\n")] if words else []


def _roles(placement: PlacementPlan) -> Table:
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
    if plan.own is not None:
        table.add_row(*own_line(plan), end_section=True)
    for line in other_lines(plan):
        table.add_row(*line)
    for line in _bound_lines(plan) if explain else ():
        table.add_row(*line)
    return table


def own_line(plan: Plan) -> Line:
    """The recipe's own placement."""
    assert plan.own is not None
    predicted = plan.own.predicted
    name, seconds = ("", "") if predicted is None else (f": {predicted.describe()}", f"{predicted.step_s:.4g}")
    return f"the recipe's own{name}", seconds, plan.own_words


def other_lines(plan: Plan) -> list[Line]:
    """The best of other partitions; those that are equal in all that is said of them are one line."""
    return _joined((other.describe(), f"{other.step_s:.4g}", why) for other, why in plan.others)


def _bound_lines(plan: Plan) -> list[Line]:
    """What is known of all that is not shown."""
    lines = []
    for bound in plan.bounds:
        pools = " | ".join("+".join(pool) for pool in bound.partition)
        if bound.seconds == float("inf"):
            lines.append((pools, "", "does not fit into the devices' memory"))
        else:
            lines.append((pools, f"over {bound.seconds:.4g}", "not looked into further: no placement of it is faster"))
    return _joined(lines)


def _joined(lines: Iterable[Line]) -> list[Line]:
    """Lines whose seconds and reasons are equal as one: the first few placements by name, the others by their number."""
    alike: dict[tuple[str, str], list[str]] = {}
    for placement, seconds, why in lines:
        alike.setdefault((seconds, why), []).append(placement)
    found = []
    for (seconds, why), placements in alike.items():
        more = [f"and {len(placements) - EQUALS} more"] if len(placements) > EQUALS else []
        found.append(("\n".join([*placements[:EQUALS], *more]), seconds, why))
    return found


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
        "own": None if plan.own is None else _own(plan),
    }


def _own(plan: Plan) -> dict[str, Any]:
    assert plan.own is not None
    predicted = {} if plan.own.predicted is None else _placement(plan.own.predicted)
    return {**predicted, "fits": plan.own.problem is None, "says": plan.own_words}


def _placement(placement: PlacementPlan) -> dict[str, Any]:
    return {
        "names": list(placement.names),
        "asynchronous": placement.asynchronous,
        "step_s": placement.step_s,
        "host_bytes": fullest_node(placement.pools)[0],
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
